"""Speed of MLPerf's DLRM-DCNv2: its row counts times `data.scale`, its multi-hot sizes (214 ids a sample), D=128.

    recjax bench bench_mlperf_dcnv2 mesh.platform=gpu data.scale=0.5

For accelerators. At scale 1 tables and slots take 98.1 GiB, at the default of 0.02 2 GiB. As everywhere in these
presets the tables have row-wise Adagrad (MLPerf: one accumulator an element), and ids are
`(Generator.zipf(1.1) - 1) % rows` with random dense values and labels: a stream that means nothing and learns nothing.

On paper (`recjax plan bench_mlperf_dcnv2 data.scale=1 mesh.devices=N --compile`, JAX 0.10.2, 8 / 64 / 128 devices):
16.8 / 2.5 / 1.4 GiB a device, of which temporaries 4.4 / 0.8 / 0.5; 654 / 229 / 184 MiB leave a device in a step.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dcnv2 import DCNv2Config
from recjax.parallel.mesh import MeshConfig

MLPERF_ROWS = tuple(
    int(count)
    for count in """
    40_000_000 39_060 17_295 7424 20_265 3 7122 1543 63 40_000_000 3_067_956 405_282 10 2209 11_938 155 4 976 14
    40_000_000 40_000_000 40_000_000 590_152 12_973 108 36
    """.split()
)
MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

config = RunConfig(
    data=ZipfStream(rows=MLPERF_ROWS, scale=0.02, ids_per_bag=MLPERF_IDS),
    model=DCNv2Config(bottom=(512, 256, 128), cross_layers=3, rank=512, top=(1024, 1024, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=128, optimizer=RowWiseAdagrad(learning_rate=0.004)),
    train=TrainConfig(
        batch_size=65_536, optimizer=DenseAdagrad(0.004, eps=1e-8, initial_accumulator=0.0), shuffle=False
    ),
    mesh=MeshConfig(devices=1),
    compute_dtype="tensorfloat32",  # compute_dtype=bfloat16 is faster still
)
