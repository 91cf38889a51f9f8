"""DLRM on the Criteo Kaggle click log, as facebookresearch/dlrm has it: D=16, batch 128, SGD 0.1.

    recjax data prepare criteo_kaggle --from FOLDER_OF_TRAIN_TXT --out prepared/
    recjax train dlrm_criteo_kaggle data.path=prepared/

Published: accuracy 0.789 after one epoch of the whole log. Values that occur fewer than 10 times share a row;
`data.ids.min_count=1`, when preparing and when training, gives every value its own, as published.

Not measured on Criteo's data, which are not ours to have. On a small sample `small` takes the recipe's place. On three
generated files with a planted signal, 100,000 rows to train, best possible AUC 0.828 to 0.829:

    python benchmarks/criteo_like.py raw/train.txt --rows 116667 --signal --seed 0        (and 1, and 2)

test AUC 0.778, 0.787, 0.770. The recipe itself (small.below_rows=0), one epoch of the first file: 0.736. One device,
JAX 0.10.2. The learning rates of `small` are not the outcome of a search.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseSgd, TrainConfig
from recjax.data.datasets.criteo import CriteoKaggle
from recjax.embedding.optim import Sgd
from recjax.models.dlrm import DLRMConfig

config = RunConfig(
    data=CriteoKaggle(),
    model=DLRMConfig(bottom=(512, 256, 64, 16), top=(512, 256, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=Sgd(0.1)),
    train=TrainConfig(batch_size=128, optimizer=DenseSgd(0.1), eval_every=20_000, eval_batch_size=16_384),
    small=SmallData(below_rows=5_000_000),
)
