"""Schedules: what the learning rates, dense and sparse, are multiplied with in each step.

Steps count from 1, as in PyTorch's schedulers and MLPerf: with a warm-up of W steps the first step's factor is 1 / W
and that of step W is 1. `factor` takes the number of steps *done*, so that it is 0 for the first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from recjax.config.optax_rules import OptaxSchedule
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges

_MOST = 2**31 - 1  # steps, which are counted in int32


@dataclasses.dataclass(frozen=True)
class Constant:
    """Linear warm-up to 1, and 1 from then on."""

    kind: ClassVar[str] = "constant"
    warmup_steps: int = 0  # W; step t of the first W has the factor t / W

    def __post_init__(self) -> None:
        check_ranges(self, warmup_steps=(0, _MOST))

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done."""
        return _warmup(step, self.warmup_steps)


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """Linear warm-up, hold at 1, polynomial decay, hold at the end value.

    From step S = decay_start on, while step t < S + decay_steps:
    end + (1 - end) * (1 - (t - S) / decay_steps)^power. Then `end`.

    With power 2 it is the policy of facebookresearch/dlrm and of MLPerf's DLRM, with two differences: while that one
    holds, it stays at the last factor of the warm-up, (W - 1) / W, where here it is 1; and after the decay it stays at
    the last one of the decay, 1 / decay_steps^2, where here it is `end`.
    """

    kind: ClassVar[str] = "polynomial"
    warmup_steps: int = 0  # W; step t of the first W has the factor t / W
    decay_start: int = 1  # S, the first step of the decay; its factor is still 1
    decay_steps: int = 10_000  # number of steps that the decay takes
    power: float = 2.0  # exponent of the decay; 1: linear
    end: float = 0.0  # factor after the decay

    def __post_init__(self) -> None:
        check_ranges(self, warmup_steps=(0, _MOST), decay_start=(1, _MOST), decay_steps=(1, _MOST), end=(0, 1))
        if self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"decay_start is {self.decay_start} and warmup_steps {self.warmup_steps}: the decay cannot start "
                "before the warm-up ends. Raise decay_start."
            )
        if not 0 < self.power < math.inf:
            raise ConfigError(f"power is {self.power}; it must be positive and finite.")

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done."""
        # Counted in integers, so that no rounding moves an edge.
        left = self.decay_steps - jnp.clip(step + 1 - self.decay_start, 0, self.decay_steps)
        decay = self.end + (1 - self.end) * _ratio(left, self.decay_steps) ** self.power
        return _warmup(step, self.warmup_steps) * decay


@dataclasses.dataclass(frozen=True)
class StepDecay:
    """Linear warm-up, then the factor is multiplied by `decay` after every `every` steps: decay^floor((t - 1) / every).

    Steps 1 to `every` have the factor 1 (warm-up apart), the next `every` steps have `decay`, and so on.
    """

    kind: ClassVar[str] = "step"
    warmup_steps: int = 0  # W; step t of the first W has the factor t / W, times the decay's
    every: int = 10_000  # steps between two decays
    decay: float = 0.1  # factor of each decay

    def __post_init__(self) -> None:
        check_ranges(self, warmup_steps=(0, _MOST), every=(1, _MOST))
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is {self.decay}; it must be above 0 and at most 1.")

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done."""
        times = (step // self.every).astype(float)
        return _warmup(step, self.warmup_steps) * self.decay**times


Schedule = Constant | Polynomial | StepDecay | OptaxSchedule


def _warmup(step: jax.Array, warmup_steps: int) -> jax.Array:
    if not warmup_steps:
        return jnp.ones((), float)
    return _ratio(jnp.minimum(step, warmup_steps - 1) + 1, warmup_steps)


def _ratio(count: jax.Array, of: int) -> jax.Array:
    return count.astype(float) / of
