"""A small model of one's own for tests: a preset, and a module beside it."""

from __future__ import annotations

from pathlib import Path

PRESET = '''
"""A linear model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from head import logits

from recjax.data.synthetic.clicks import Synthetic
from recjax.parallel.mesh import MeshConfig
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import TrainConfig

FACTOR = 1.0


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    kind: ClassVar[str] = "linear"
    bias: float = 0.0

    def build(self, dense, dims, *, dtype, seed):
        return Linear(self, dense + sum(dims.values()), tuple(dims), dtype, nnx.Rngs(seed))


class Linear(nnx.Module):
    def __init__(self, config, width, names, dtype, rngs):
        self.names, self.bias = names, config.bias
        self.linear = nnx.Linear(width, 1, param_dtype=dtype, dtype=dtype, rngs=rngs)

    def __call__(self, dense_BxK, pooled):
        joined = jnp.concatenate([dense_BxK, *(pooled[name] for name in self.names)], axis=1)
        return logits(self.linear(joined), self.bias) * FACTOR


@dataclasses.dataclass(frozen=True)
class LinearRun(RunConfig):
    model: LinearConfig = LinearConfig()


config = LinearRun(
    data=Synthetic(rows=(20, 10), ids_per_bag=(1, 1), dense=2, train_rows=128, validation_rows=64, test_rows=256),
    embedding=EmbeddingConfig(dim=4),
    train=TrainConfig(batch_size=64, steps=2, checkpoint_every=1, log_every=1),
    mesh=MeshConfig(devices=1, platform="cpu"),
)
'''

HELPER = """
def logits(outputs_Bx1, bias):
    return outputs_Bx1[:, 0] + bias
"""


def write(folder: Path, name: str = "mine.py") -> Path:
    """The preset and its helper as files in `folder`; gives the preset's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "head.py").write_text(HELPER)
    (folder / name).write_text(PRESET.lstrip())
    return folder / name


def edit(file: Path, old: str, new: str) -> None:
    """Replaces a text that stands once in a file."""
    text = file.read_text()
    assert text.count(old) == 1, text
    file.write_text(text.replace(old, new))
