"""DLRM on MovieLens."""

from recjax.data.movielens import MovieLens
from recjax.embedding.optim import RowWiseAdagrad
from recjax.mesh import MeshConfig
from recjax.models.dlrm import DLRMConfig
from recjax.presets import EmbeddingConfig, RunConfig
from recjax.train.options import DenseSgd, TrainConfig

config = RunConfig(
    data=MovieLens(),
    model=DLRMConfig(bottom=(32,), top=(32, 1), interaction="cat"),
    embedding=EmbeddingConfig(dim=32, optimizer=RowWiseAdagrad(learning_rate=0.004)),
    train=TrainConfig(batch_size=768, epochs=10, shuffle=False, optimizer=DenseSgd(0.3), patience=3),
    mesh=MeshConfig(devices=1, platform="cpu"),
    plan="row_wise",
)
