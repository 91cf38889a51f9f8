"""DCN on Taobao ad display with few columns: four dense and four categorical ones.

    recjax data prepare taobao --from FOLDER --out prepared/taobao4 data.columns=few
    recjax train dcnv2_taobao4 data.path=prepared/taobao4
    recjax study hot_rows dcnv2_taobao4 data.path=prepared/taobao4 --out studies/hot_rows

FOLDER as for configs/taobao.py. The shape of the data is that of P2RES's study of hot rows, which does not say which
columns they are: here price and the user's age, value and shopping levels; and user, ad, category and brand. The
crosses are DCN-v2's, of full rank.

Not measured: no copy of the data is at hand.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.taobao import Taobao
from recjax.embedding.optim import Adagrad
from recjax.models.dcnv2 import DCNv2Config

config = RunConfig(
    data=Taobao(columns="few"),
    model=DCNv2Config(bottom=(64, 16), cross_layers=3, rank=0, top=(256, 128, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=Adagrad(0.02)),
    train=TrainConfig(batch_size=2048, optimizer=DenseAdagrad(0.02), eval_every=2000, patience=3),
    small=SmallData(below_rows=2_000_000),
)
