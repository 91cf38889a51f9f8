"""DCN-v2 on the Criteo 1TB click log as in MLPerf Training v3.0 and later: D=128, three cross layers of rank 512.

    recjax data prepare criteo_1tb --from FOLDER_OF_DAYS --out prepared/ ids.min_count=1 ids.modulo=40_000_000
    recjax train dcnv2_mlperf data.path=prepared/

MLPerf's target is an AUC of 0.80275 on the first half of day 23, which is the test split here. MLPerf makes multi-hot
bags (1 to 100 ids, 214 a sample) of these one-hot ids, and recjax has no such preparation yet: on Criteo's own ids the
figure cannot be compared. The benchmark's tables and bags, on synthetic data:

    recjax plan dcnv2_mlperf mesh.devices=8 data=synthetic data.dense=13 data.rows=40000000,39060,17295,7424,20265,3,\
7122,1543,63,40000000,3067956,405282,10,2209,11938,155,4,976,14,40000000,40000000,40000000,590152,12973,108,36 \
data.ids_per_bag=3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1 small.below_rows=0

Not measured on Criteo's data, which are not ours to have. On a small sample `small` takes the recipe's place, of which
100,000 rows would be 2 steps.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.criteo import Criteo1TB
from recjax.data.prepare.ids import Frequency
from recjax.embedding.optim import Adagrad
from recjax.models.dcnv2 import DCNv2Config

config = RunConfig(
    data=Criteo1TB(ids=Frequency(min_count=1, modulo=40_000_000)),
    model=DCNv2Config(bottom=(512, 256, 128), cross_layers=3, rank=512, top=(1024, 1024, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=128, optimizer=Adagrad(0.004, eps=1e-8, initial_accumulator=0.0)),
    train=TrainConfig(
        batch_size=65_536,
        optimizer=DenseAdagrad(0.004, eps=1e-8, initial_accumulator=0.0),
        eval_every=3200,  # 20 times an epoch
        eval_batch_size=65_536,
    ),
    small=SmallData(below_rows=1_000_000_000),
    compute_dtype="tensorfloat32",  # float32 on a CPU
)
