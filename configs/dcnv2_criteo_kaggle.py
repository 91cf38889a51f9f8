"""DCN-v2 on the Criteo Kaggle click log: D=16, three cross layers of rank 128 over a width of 432.

    recjax data prepare criteo_kaggle --from FOLDER_OF_TRAIN_TXT --out prepared/
    recjax train dcnv2_criteo_kaggle data.path=prepared/

The shape is recjax's own, like that of dlrm_criteo_kaggle with MLPerf's form of the crosses and a rank of about a
quarter of their width. Others' DCN-v2 reach a test AUC of 0.8145 on the random split of Criteo_x4 (BARS; they use
`data.split=random data.ids.min_count=10`, D=16 and Adam).

Not measured: Criteo's data are not ours to have. On fewer rows than `small.below_rows` the settings of `small` take the
recipe's place, which would make 25 steps of 100,000 rows; configs/dlrm_criteo_kaggle.py says what they gave
with D=16 on a generated file.
"""

from recjax.data.criteo import CriteoKaggle
from recjax.embedding.optim import Adagrad
from recjax.models.dcnv2 import DCNv2Config
from recjax.presets import EmbeddingConfig, RunConfig
from recjax.train.options import DenseAdagrad, TrainConfig
from recjax.train.small import SmallData

config = RunConfig(
    data=CriteoKaggle(),
    model=DCNv2Config(bottom=(512, 256, 64, 16), cross_layers=3, rank=128, top=(512, 256, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=Adagrad(0.02)),
    train=TrainConfig(batch_size=4096, optimizer=DenseAdagrad(0.02), eval_every=1000, eval_batch_size=16_384),
    small=SmallData(below_rows=5_000_000),
)
