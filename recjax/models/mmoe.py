"""MMoE (Ma et al. 2018, KDD, doi:10.1145/3219819.3220007): experts that tasks share, each by a gate of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from recjax.models.layers import Mlp, check_widths
from recjax.models.stateful import check_rate
from recjax.models.towers import Gate, Joined, TaskModelConfig, Towers
from recjax.settings.values import check_ranges


@dataclasses.dataclass(frozen=True)
class MMoEConfig(TaskModelConfig):
    """Shape of a multi-gate mixture of experts."""

    kind: ClassVar[str] = "mmoe"
    experts: int = 4  # number of experts
    expert: tuple[int, ...] = (64, 32)  # widths of the layers of each expert
    tower: tuple[int, ...] = (16,)  # widths of each task's own hidden layers; its output comes after them
    batch_norm: bool = False  # normalise before each ReLU, over the whole batch; not in the gates
    dropout: float = 0.0  # share of hidden values that are dropped in training

    def __post_init__(self) -> None:
        check_ranges(self, experts=(1, None))
        check_widths("expert", self.expert, least=1)
        check_widths("tower", self.tower)
        check_rate(self.dropout)

    def module(self, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]) -> MMoE:
        """Like `TaskModelConfig.module`."""
        return MMoE(self, inputs, outputs, how)


class MMoE(nnx.Module):
    """y_t = tower_t(sum_e g_t(x)_e expert_e(x)), g_t(x) = softmax(W_t x + b_t) (equations 6 and 7).

    x = [dense features, pooled embeddings]. The paper's gates have no b_t; those of torch-rechub have.
    """

    def __init__(self, config: MMoEConfig, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]) -> None:
        self.inputs = inputs
        width = self.inputs.width
        self.experts = nnx.List([Mlp(width, config.expert, **how) for _ in range(config.experts)])
        self.gates = nnx.List([Gate(width, config.experts, dtype=how["dtype"], rngs=how["rngs"]) for _ in outputs])
        self.towers = Towers(config.expert[-1], config.tower, outputs, **how)

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Task -> outputs [b], or [b, C] of a class, from dense features [b, K] and pooled embeddings [b, D]."""
        x_BxN = self.inputs(dense_BxK, pooled)
        experts = [expert(x_BxN) for expert in self.experts]
        return self.towers([gate(x_BxN, experts) for gate in self.gates])
