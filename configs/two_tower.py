"""Two towers on pairs of a user and an item, from a table of your own: Parquet, CSV or Arrow.

    recjax train two_tower data.from=clicks.csv data.user=user data.item=item

Each row is a user and an item that belong together. `data.time=COLUMN` splits by time, and `data.test=FILE` takes the
test from a file. See docs/guides/retrieval.md.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdam, TrainConfig
from recjax.data.datasets.own_table import Table
from recjax.embedding.optim import Adam
from recjax.models.two_tower import TwoTowerConfig

config = RunConfig(
    data=Table(),
    model=TwoTowerConfig(),
    embedding=EmbeddingConfig(dim=64, optimizer=Adam(learning_rate=0.001)),
    train=TrainConfig(batch_size=2048, epochs=20, optimizer=DenseAdam(0.001), patience=3),
    # Below 40 batches an epoch: smaller ones, so that there are as many, and more patience
    small=SmallData(
        below_rows=81_920,
        steps=40,
        epochs=20,
        eval_every=0,
        patience=6,
        optimizer=DenseAdam(0.001),
        tables=Adam(learning_rate=0.003),
    ),
)
