"""Exact sparse optimizers on gathered rows.

One function serves device rows, replicated rows and, later, rows that live in host memory:

  update(rows_UxD, slots, grads_UxD, step) -> (rows_UxD, slots)

where row u's gradient is the *sum over the global batch* of the gradients of all its occurrences.
Callers pass touched rows only, or mask the result: an untouched row never moves, and a row whose
gradient happens to be zero is not the same as an untouched one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from recjax.errors import ConfigError

Slots = dict[str, jax.Array]  # slot name -> [U, ...]
Updated = tuple[jax.Array, Slots]


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """What an optimizer keeps for every row.

    Attributes:
      initial: value before the row is first touched.
      shape: () for one float a row, (D,) for one an element.
    """

    initial: float
    shape: tuple[int, ...] = ()


def check_rate(rate: float) -> None:
    """Refuses a learning rate that is not positive and finite (ConfigError)."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"learning_rate is {rate}; it must be positive and finite.")


@dataclasses.dataclass(frozen=True)
class Sgd:
    """w -= lr * G."""

    kind: ClassVar[str] = "sgd"
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        del dim
        return {}

    def update(self, rows_UxD: jax.Array, slots: Slots, grads_UxD: jax.Array, step: jax.Array) -> Updated:
        """One step on U rows; see the module's docstring."""
        del step
        return rows_UxD - self.learning_rate * grads_UxD, slots


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad:
    """Adagrad with one accumulator a row: s += mean_d(G^2); w -= lr * G / (sqrt(s) + eps).

    As facebookresearch/dlrm (eps 1e-10 there) and FBGEMM's EXACT_ROWWISE_ADAGRAD (eps 1e-8).
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    learning_rate: float = 0.1
    eps: float = 1e-8  # added to the root of the accumulator
    initial_accumulator: float = 0.0  # s of a row that was never touched

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        for name, value in (("eps", self.eps), ("initial_accumulator", self.initial_accumulator)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and not negative.")
        if self.eps == 0 and self.initial_accumulator == 0:
            raise ConfigError("eps and initial_accumulator are both 0: a zero gradient would divide 0 by 0.")

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        del dim
        return {"sum_of_squares": SlotSpec(self.initial_accumulator)}

    def update(self, rows_UxD: jax.Array, slots: Slots, grads_UxD: jax.Array, step: jax.Array) -> Updated:
        """One step on U rows; see the module's docstring."""
        del step
        s_U = slots["sum_of_squares"] + jnp.mean(jnp.square(grads_UxD), axis=-1)
        scale_U = self.learning_rate / (jnp.sqrt(s_U) + self.eps)
        return rows_UxD - scale_U[:, None] * grads_UxD, {"sum_of_squares": s_U}


SparseOptimizer = RowWiseAdagrad | Sgd  # what a table can be updated with
