"""DCN-v2 on a table of your own: Parquet, CSV or Arrow.

    recjax train table data.from=clicks.parquet data.label=clicked

`data.columns=auto` prints what it takes the columns for, and how to say it otherwise; the data are prepared once, into
the cache folder. The settings are for a log of millions of rows; below 500,000 training rows those of `small` hold,
which were compared with others on six data sets at once (docs/results/quality.md), and stop once two epochs have
brought no better evaluation. Compare with the line `naive Bayes`, which only counts.

ml-100k (RecBole's file with users' and items' columns, genres as a list, 80/10/10 by chance) gives test AUC 0.7822,
0.7887 and 0.7872 for three draws of the splits (seed 0; `benchmarks/table_recipe.py`), in about a minute on one CPU
device of a shared machine (JAX 0.10.2, Python 3.11).
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.own_table import Table
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dcnv2 import DCNv2Config

config = RunConfig(
    data=Table(),
    model=DCNv2Config(bottom=(64, 16)),
    embedding=EmbeddingConfig(dim=16, optimizer=RowWiseAdagrad(learning_rate=0.02)),
    train=TrainConfig(batch_size=2048, epochs=1, optimizer=DenseAdagrad(0.02), eval_every=500, patience=3),
    small=SmallData(below_rows=500_000, epochs=20, patience=None, patience_epochs=2),
)
