"""Speed of the DLRM whose rates NVIDIA publishes: MLPerf's MLPs, D=128, one-hot ids, batch 65,536.

    recjax data prepare bench_nvidia_dlrm --out DIR data.train_rows=8_000_000
    recjax bench bench_nvidia_dlrm data.path=DIR train.shuffle=true

The yardstick is NVIDIA's DLRM for TensorFlow 2 (DeepLearningExamples, `TensorFlow2/Recommendation/DLRM_and_DCNv2`,
`doc/DLRM.md` and the defaults of `dlrm.py`: these MLPs, D, batch and SGD): on one A100 (80 GB), with reading, the mean
of 1,000 steps, 2.84 million samples/s in TF32 and 4.55 in mixed precision, tables in float32. Its tables are Criteo
1TB's with values of 15 occurrences at least, 4.2 billion parameters or 15.6 GiB; here they are Criteo Kaggle's row
counts capped at 2_000_000, 13 million rows or 7 GB of values. An id costs the same in both, but for what caches of the
GPU hold. Ids are `(Generator.zipf(1.1) - 1) % rows`, dense values and labels random: a stream that means nothing.

Not measured on a GPU. Predicted from data sheets for the program of an H200 (`recjax plan bench_nvidia_dlrm --predict
--target h200 --machine a100`): 28.0 ms a step or 2.3 million samples/s on an A100, and 11.1 ms or 5.9 million on an
H200. On two busy cores of an AMD EPYC, prepared and shuffled, with train.batch_size=4096 and data.max_rows=200_000:
1,500 samples/s.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseSgd, TrainConfig
from recjax.data.synthetic.stream import CRITEO_KAGGLE_ROWS, ZipfStream
from recjax.embedding.optim import Sgd
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig

config = RunConfig(
    data=ZipfStream(rows=CRITEO_KAGGLE_ROWS, max_rows=2_000_000),
    model=DLRMConfig(bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1)),
    embedding=EmbeddingConfig(dim=128, optimizer=Sgd(learning_rate=0.01)),
    train=TrainConfig(batch_size=65_536, optimizer=DenseSgd(0.01), shuffle=False),
    mesh=MeshConfig(devices=1),
    compute_dtype="tensorfloat32",  # float32 on a CPU
)
