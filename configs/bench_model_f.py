"""The shape of Meta's model F, on paper: 12 trillion parameters in 22 tables.

    recjax plan bench_model_f mesh.devices=128 plan=balanced
    recjax plan bench_model_f mesh.devices=1024 plan=balanced

Published (Mudigere et al., ISCA 2022, arXiv:2104.05158, "Software-Hardware Co-design for Fast and Scalable Training of
Deep Learning Recommendation Models"): 12T parameters, all D = 256. Chosen here: 22 tables of 2,130,681,819 rows, for
with fewer a table would have more rows than int32 can count; 20 ids a bag; 512 dense features; MLPs of 512, 256 and
512, 512, 256, 1 with the dot products between; 65,536 samples a step. Float32 throughout, row-wise Adagrad. Ids are
`(Generator.zipf(1.1) - 1) % rows`.

Tables and slots take 43.8 TiB: 351 GiB a device on average if there are 128, 43.8 if there are 1,024.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig

TABLES, DIM = 22, 256
ROWS = 2_130_681_819  # of each table; times tables and D: 12.0e12 parameters

config = RunConfig(
    data=ZipfStream(rows=(ROWS,) * TABLES, ids_per_bag=(20,), dense=512),
    model=DLRMConfig(bottom=(512, 256), top=(512, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=DIM, optimizer=RowWiseAdagrad(learning_rate=0.004)),
    train=TrainConfig(batch_size=65_536, optimizer=DenseAdagrad(0.004), shuffle=False),
    mesh=MeshConfig(devices=128),
)
