"""DLRM on Avazu: is a mobile ad clicked? Ten days of October 2014, 40.4 million rows; the last day is test.

    recjax data prepare avazu --from FOLDER --out prepared/avazu
    recjax train avazu data.path=prepared/avazu

FOLDER holds `train` or `train.csv` of Kaggle's avazu-ctr-prediction, plain or with .gz after its name (get it there;
its terms do not let recjax ship a row). The last day but one validates.

Not measured on the full data here: no copy is at hand. The settings are those of the other click logs, and were only
seen to train on a generated file of this format. One epoch: models of this field overfit in the second.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.avazu import Avazu
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig

config = RunConfig(
    data=Avazu(),
    model=DLRMConfig(bottom=(64, 16), top=(256, 128, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=RowWiseAdagrad(learning_rate=0.02)),
    train=TrainConfig(batch_size=2048, optimizer=DenseAdagrad(0.02), eval_every=2000, patience=3),
    small=SmallData(below_rows=2_000_000),
)
