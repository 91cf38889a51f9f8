"""Speed of a DLRM with bags of 10 ids: D=64, batch 4096. The sparse part weighs most.

    recjax bench bench_multihot
    recjax bench bench_multihot --against torchrec

26 tables with Criteo Kaggle's row counts, capped at 1_000_000, ids `(Generator.zipf(1.1) - 1) % rows`, random dense
values and labels: a stream that means nothing, so it trains (`recjax train bench_multihot train.steps=100`) but learns
nothing.

Measured on two cores of an Intel Xeon with AMX (Python 3.12, JAX 0.12.0.1, recjax-kernels, torch 2.13.0, fbgemm-gpu-cpu
1.8.0, 4 rounds of 10 steps): 23,991 samples/s in float32 and 36,001 in bfloat16, 1.69 and 1.85 times FBGEMM's in the
same run; 1.70 and 1.76 times with JAX 0.10.2 on Python 3.11. On two cores of an AMD EPYC, without AMX and with older
kernels, 1.10 to 1.17 and 0.96 to 1.00 times. All runs: docs/results/cpu_speed.md.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import CRITEO_KAGGLE_ROWS, ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig

config = RunConfig(
    data=ZipfStream(rows=CRITEO_KAGGLE_ROWS, max_rows=1_000_000, ids_per_bag=(10,)),
    model=DLRMConfig(bottom=(512, 256, 64), top=(512, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=64, optimizer=RowWiseAdagrad(learning_rate=0.01)),
    train=TrainConfig(batch_size=4096, optimizer=DenseAdagrad(0.01), shuffle=False),
    mesh=MeshConfig(devices=1),
)
