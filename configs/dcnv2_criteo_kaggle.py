"""DCN-v2 on the Criteo Kaggle click log: D=16, three cross layers of rank 128 over a width of 432.

    recjax data prepare criteo_kaggle --from FOLDER_OF_TRAIN_TXT --out prepared/
    recjax train dcnv2_criteo_kaggle data.path=prepared/

The shape is recjax's own, like that of dlrm_criteo_kaggle with MLPerf's form of the crosses and a rank of about a
quarter of their width. Others' DCN-v2 reach a test AUC of 0.8145 on the random split of Criteo_x4 (BARS; they use
`data.split=random data.ids.min_count=10`, D=16 and Adam).

Not measured on Criteo's data, which are not ours to have. On a small sample `small` takes the place of train.*. On the
first generated file of configs/dlrm_criteo_kaggle.py (best possible AUC 0.829): test AUC 0.776.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.criteo import CriteoKaggle
from recjax.embedding.optim import Adagrad
from recjax.models.dcnv2 import DCNv2Config

config = RunConfig(
    data=CriteoKaggle(),
    model=DCNv2Config(bottom=(512, 256, 64, 16), cross_layers=3, rank=128, top=(512, 256, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=Adagrad(0.02)),
    train=TrainConfig(batch_size=4096, optimizer=DenseAdagrad(0.02), eval_every=1000, eval_batch_size=16_384),
    small=SmallData(below_rows=5_000_000),
)
