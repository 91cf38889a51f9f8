"""DCN-v2 on the Criteo Kaggle click log with its integers as categories: 39 features and one dense column.

    recjax data prepare criteo_kaggle --from FOLDER_OF_TRAIN_TXT --out prepared/ data.integers=categories
    recjax train dcnv2_criteo_kaggle39 data.path=prepared/
    recjax study hot_rows dcnv2_criteo_kaggle39 data.path=prepared/ --out studies/hot_rows

The shape of the data is that of P2RES's study of hot rows (1 dense, 39 categorical). The 13 integers are in buckets,
2 + floor(log(x)^2) above 2; the dense column is how many of them are missing, which is our choice.

Not measured on Criteo's data, which are not ours to have. The recipe is that of dcnv2_criteo_kaggle.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.criteo import CriteoKaggle
from recjax.embedding.optim import Adagrad
from recjax.models.dcnv2 import DCNv2Config

config = RunConfig(
    data=CriteoKaggle(integers="categories"),
    model=DCNv2Config(bottom=(64, 16), cross_layers=3, rank=128, top=(512, 256, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=Adagrad(0.02)),
    train=TrainConfig(batch_size=4096, optimizer=DenseAdagrad(0.02), eval_every=1000, eval_batch_size=16_384),
    small=SmallData(below_rows=5_000_000),
)
