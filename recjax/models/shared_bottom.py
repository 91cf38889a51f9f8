"""Shared bottom (Caruana 1997, Multitask Learning): one MLP that all tasks share, and a tower for each."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from recjax.models.layers import Mlp, check_widths
from recjax.models.stateful import check_rate
from recjax.models.towers import Joined, TaskModelConfig, Towers


@dataclasses.dataclass(frozen=True)
class SharedBottomConfig(TaskModelConfig):
    """Shape of a shared bottom with towers."""

    kind: ClassVar[str] = "shared_bottom"
    bottom: tuple[int, ...] = (64, 32)  # widths of the layers that all tasks share
    tower: tuple[int, ...] = (16,)  # widths of each task's own hidden layers; its output comes after them
    batch_norm: bool = False  # normalise before each ReLU, over the whole batch
    dropout: float = 0.0  # share of hidden values that are dropped in training

    def __post_init__(self) -> None:
        check_widths("bottom", self.bottom, least=1)
        check_widths("tower", self.tower)
        check_rate(self.dropout)

    def module(self, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]) -> SharedBottom:
        """Like `TaskModelConfig.module`."""
        return SharedBottom(self, inputs, outputs, how)


class SharedBottom(nnx.Module):
    """y_t = tower_t(bottom(x)), x = [dense features, pooled embeddings]."""

    def __init__(
        self, config: SharedBottomConfig, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]
    ) -> None:
        self.inputs = inputs
        self.bottom = Mlp(self.inputs.width, config.bottom, **how)
        self.towers = Towers(config.bottom[-1], config.tower, outputs, **how)

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Task -> outputs [b], or [b, C] of a class, from dense features [b, K] and pooled embeddings [b, D]."""
        bottom_BxN = self.bottom(self.inputs(dense_BxK, pooled))
        return self.towers([bottom_BxN] * len(self.towers.tasks))
