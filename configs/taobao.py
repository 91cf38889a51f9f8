"""DLRM on Taobao ad display: is an ad clicked? Eight days of May 2017, 26.6 million rows; the last day is test.

    recjax data prepare taobao --from FOLDER --out prepared/taobao
    recjax train taobao data.path=prepared/taobao

FOLDER holds raw_sample.csv, ad_feature.csv and user_profile.csv of Alibaba's data set 56 at tianchi.aliyun.com, plain
or with .gz after their names (get them there; their terms do not let recjax ship a row). The last day but one
validates.

Not measured on the full data here: no copy is at hand. The settings are those of the other click logs, and were only
seen to train on a generated file of this format. One epoch: models of this field overfit in the second.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.taobao import Taobao
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig

config = RunConfig(
    data=Taobao(),
    model=DLRMConfig(bottom=(64, 16), top=(256, 128, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=RowWiseAdagrad(learning_rate=0.02)),
    train=TrainConfig(batch_size=2048, optimizer=DenseAdagrad(0.02), eval_every=2000, patience=3),
    small=SmallData(below_rows=2_000_000),
)
