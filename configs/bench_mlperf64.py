"""Speed of a DLRM with MLPs like MLPerf's: D=64, one-hot ids, batch 4096. The dense part weighs most.

    recjax bench bench_mlperf64
    recjax bench bench_mlperf64 --against torchrec

26 tables with Criteo Kaggle's row counts, capped at 1_000_000, ids `(Generator.zipf(1.1) - 1) % rows`, random dense
values and labels: a stream that means nothing, so it trains (`recjax train bench_mlperf64 train.steps=100`) but learns
nothing.

Measured on two cores of an Intel Xeon with AMX (Python 3.12, JAX 0.12.0.1, recjax-kernels, torch 2.13.0, fbgemm-gpu-cpu
1.8.0, 4 rounds of 10 steps): 19,784 samples/s in float32 and 39,825 in bfloat16, 1.33 and 1.17 times FBGEMM's in the
same run; 1.38 and 1.09 times with JAX 0.10.2 on Python 3.11. On two cores of an AMD EPYC, without AMX and with older
kernels, 1.22 to 1.24 and 1.00 to 1.09 times. All runs: docs/results/cpu_speed.md.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import CRITEO_KAGGLE_ROWS, ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig

config = RunConfig(
    data=ZipfStream(rows=CRITEO_KAGGLE_ROWS, max_rows=1_000_000),
    model=DLRMConfig(bottom=(512, 256, 64), top=(1024, 1024, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=64, optimizer=RowWiseAdagrad(learning_rate=0.01)),
    train=TrainConfig(batch_size=4096, optimizer=DenseAdagrad(0.01), shuffle=False),
    mesh=MeshConfig(devices=1),
)
