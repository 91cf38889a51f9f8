"""DIN on a log of events of your own: what users did before, weighed by the item in question.

    recjax train din data.from=log.csv data.user=user data.item=item data.time=time data.label=clicked

Each event becomes a row with the user's events before it; the last of each user is the test, the one before validates,
and `data.split=time:0.8,0.1,0.1` splits by time instead. `data.history=COLUMN,...` names further columns that the
history tells. The settings of training are those of `table`.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.sequences import Sequences
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.din import DinConfig

config = RunConfig(
    data=Sequences(),
    model=DinConfig(),
    embedding=EmbeddingConfig(dim=16, optimizer=RowWiseAdagrad(learning_rate=0.02)),
    train=TrainConfig(batch_size=2048, epochs=1, optimizer=DenseAdagrad(0.02), eval_every=500, patience=3),
    small=SmallData(below_rows=500_000, epochs=20, patience=None, patience_epochs=2),
)
