"""PLE (Tang et al. 2020, RecSys, doi:10.1145/3383313.3412236): experts of each task, and shared ones, in levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from flax import nnx

from recjax.models.layers import Mlp, check_widths
from recjax.models.stateful import check_rate
from recjax.models.towers import Gate, Joined, TaskModelConfig, Towers
from recjax.settings.values import check_ranges


@dataclasses.dataclass(frozen=True)
class PLEConfig(TaskModelConfig):
    """Shape of a progressive layered extraction."""

    kind: ClassVar[str] = "ple"
    levels: int = 2  # number of levels of experts; 1 is the paper's customized gate control (CGC)
    specific: int = 2  # number of experts of each task alone, in each level
    shared: int = 2  # number of experts for all tasks, in each level
    expert: tuple[int, ...] = (64, 32)  # widths of the layers of each expert
    tower: tuple[int, ...] = (16,)  # widths of each task's own hidden layers; its output comes after them
    batch_norm: bool = False  # normalise before each ReLU, over the whole batch; not in the gates
    dropout: float = 0.0  # share of hidden values that are dropped in training

    def __post_init__(self) -> None:
        check_ranges(self, levels=(1, None), specific=(1, None), shared=(1, None))
        check_widths("expert", self.expert, least=1)
        check_widths("tower", self.tower)
        check_rate(self.dropout)

    def module(self, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]) -> PLE:
        """Like `TaskModelConfig.module`."""
        return PLE(self, inputs, outputs, how)


class PLE(nnx.Module):
    """Levels of experts between the input x = [dense features, pooled embeddings] and a tower for each task.

    In a level each task's gate weighs its own experts and the shared ones by what came from the level below for that
    task (equations 1 to 5); but for the last level, a shared gate weighs all experts, for the shared ones of the level
    above (equations 6 to 8).
    """

    def __init__(self, config: PLEConfig, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]) -> None:
        self.inputs = inputs
        widths = [self.inputs.width] + [config.expert[-1]] * (config.levels - 1)
        last = config.levels - 1
        self.levels = nnx.List([_Level(config, w, len(outputs), i < last, how) for i, w in enumerate(widths)])
        self.towers = Towers(config.expert[-1], config.tower, outputs, **how)

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Task -> outputs [b], or [b, C] of a class, from dense features [b, K] and pooled embeddings [b, D]."""
        found: list[jax.Array] = [self.inputs(dense_BxK, pooled)] * (len(self.towers.tasks) + 1)
        for level in self.levels:
            found = level(found)
        return self.towers(found)


class _Level(nnx.Module):
    """From an input for each task, and a shared one, to the same; the last level has no shared output."""

    def __init__(self, config: PLEConfig, width: int, tasks: int, hands_on: bool, how: dict[str, Any]) -> None:
        def experts(count: int) -> Any:
            return nnx.List([Mlp(width, config.expert, **how) for _ in range(count)])

        def gate(count: int) -> Gate:
            return Gate(width, count, dtype=how["dtype"], rngs=how["rngs"])

        self.specific = nnx.List([experts(config.specific) for _ in range(tasks)])
        self.shared = experts(config.shared)
        self.gates = nnx.List([gate(config.specific + config.shared) for _ in range(tasks)])
        self.shared_gate = gate(tasks * config.specific + config.shared) if hands_on else None

    def __call__(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """[b, M] for each task, and for the shared experts of the next level, from as many [b, N]."""
        *own, common_BxN = inputs
        specific = [[expert(x) for expert in experts] for experts, x in zip(self.specific, own, strict=True)]
        shared = [expert(common_BxN) for expert in self.shared]
        found = [gate(x, [*mine, *shared]) for gate, x, mine in zip(self.gates, own, specific, strict=True)]
        if self.shared_gate is not None:
            found.append(self.shared_gate(common_BxN, [*sum(specific, []), *shared]))
        return found
