"""The shape of Meta's model A, to be compiled on paper: 793 billion parameters in 1000 tables.

    recjax plan bench_model_a --compile --memory-gib 32

Published (Mudigere et al., ISCA 2022, arXiv:2104.05158, "Software-Hardware Co-design for Fast and Scalable Training of
Deep Learning Recommendation Models"): 793B parameters, about 1000s of tables, D from 4 to 384, 15 ids a bag on average,
20 MLP layers of 3,375 on average, 638 MFLOP a sample, 128 V100, 65,536 samples a step.

Chosen here, since nothing more is published: 1000 tables, each looked up by one feature; how many of each D (84 on
average); rows between 1,000 and 110 million, evenly spread on a logarithmic scale within each D, so that rows times D
sum up to 793.0e9; bags of 1 to 38 ids, 15 on average; 512 dense features; 6 bottom layers of 3,680, and 14 top layers:
a narrow one of 1,084, twelve of 3,696, the logit (3,376 on average). The interaction is a concatenation (`cat`), for
dot products need equal D, and the narrow layer projects its 87,840 values: it has 95M of the 319M dense parameters, and
the forward pass 638 MFLOP, which is how the published figure is read here (layers of equal width would need 1,056).
Float32 throughout, row-wise Adagrad on tables, Adagrad on the MLPs. Ids are `(Generator.zipf(1.1) - 1) % rows`.

On paper, 128 devices, JAX 0.10.2, exchanges sized by the shares of two devices (15,360,000 ids): 34.3 GiB a device,
of which tables and slots 23.4, the dense part 2.4, temporaries 8.5, so that it does not fit into 32; 4,987 MiB leave a
device in a step, 2,417 of them the all-reduce of the dense gradients. Compiled in 245 s on two busy cores.
"""

from recjax.config.run import EmbeddingConfig, RunConfig, TableConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.settings.values import Named

TABLES = {4: 40, 8: 60, 16: 100, 32: 150, 64: 250, 96: 130, 128: 150, 192: 60, 256: 40, 384: 20}  # D -> tables
IDS = (1, 1, 5, 10, 15, 20, 30, 38)
FEWEST, MOST = 1000, 109_569_806  # rows; with the latter the parameters are 793.0e9

DIMS = [dim for dim, count in TABLES.items() for _ in range(count)]
ROWS = tuple(round(FEWEST * (MOST / FEWEST) ** ((i + 0.5) / count)) for count in TABLES.values() for i in range(count))

config = RunConfig(
    data=ZipfStream(rows=ROWS, ids_per_bag=tuple(IDS[t % len(IDS)] for t in range(len(ROWS))), dense=512),
    model=DLRMConfig(bottom=(3680,) * 6, top=(1084,) + (3696,) * 12 + (1,), interaction="cat"),
    embedding=EmbeddingConfig(
        optimizer=RowWiseAdagrad(learning_rate=0.004),
        tables=Named({f"sparse_{t}": TableConfig(dim=dim) for t, dim in enumerate(DIMS)}),
    ),
    train=TrainConfig(batch_size=65_536, optimizer=DenseAdagrad(0.004), shuffle=False),
    mesh=MeshConfig(devices=128),
)
