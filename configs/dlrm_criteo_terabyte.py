"""DLRM on the Criteo 1TB click log, as facebookresearch/dlrm has it: D=64, batch 2048, SGD 0.1, ids modulo 10 million.

    recjax data prepare criteo_1tb --from FOLDER_OF_DAYS --out prepared/ subsample_negatives=0.875 ids.modulo=10_000_000
    recjax train dlrm_criteo_terabyte data.path=prepared/

Published: accuracy 0.8107, with 87.5% of the negative rows left out. Values that occur fewer than 10 times share a row;
`data.ids.min_count=1`, when preparing and when training, gives every value its own, as published.

Not measured on Criteo's data, which are not ours to have. On a small sample `small` takes the recipe's place, of which
100,000 rows would be 49 steps. On the first generated file of configs/dlrm_criteo_kaggle.py (so with
`data=criteo_kaggle`; best possible AUC 0.829): test AUC 0.779.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseSgd, TrainConfig
from recjax.data.datasets.criteo import Criteo1TB
from recjax.data.prepare.ids import Frequency
from recjax.embedding.optim import Sgd
from recjax.models.dlrm import DLRMConfig

config = RunConfig(
    data=Criteo1TB(subsample_negatives=0.875, ids=Frequency(min_count=10, modulo=10_000_000)),
    model=DLRMConfig(bottom=(512, 256, 64), top=(512, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=64, optimizer=Sgd(0.1)),
    train=TrainConfig(batch_size=2048, optimizer=DenseSgd(0.1), eval_every=10_000, eval_batch_size=16_384),
    small=SmallData(below_rows=50_000_000),
)
