"""Exact sparse optimizers on gathered rows.

One function serves device rows, replicated rows and, later, rows that live in host memory:

  apply(rows_UxD, slots, grads_UxD, at) -> (rows_UxD, slots)

where row u's gradient is the *sum over the global batch* of the gradients of all its occurrences.
Callers pass touched rows only, or mask the result: an untouched row never moves, and a row whose
gradient happens to be zero is not the same as an untouched one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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


@dataclasses.dataclass(frozen=True)
class At:
    """When and where an update happens.

    Attributes:
      step: int32 [], steps done before this one.
      rate: [], what the schedule multiplies the learning rate with in this step.
      row_mean: [U, D] -> [U], the mean over all D columns of each row, also where this device holds only some.
    """

    step: jax.Array
    rate: jax.Array
    row_mean: Callable[[jax.Array], jax.Array]


def check_rate(rate: float) -> None:
    """Refuses a learning rate that is not positive and finite (ConfigError)."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"learning_rate is {rate}; it must be positive and finite.")


@dataclasses.dataclass(frozen=True)
class Sgd:
    """w -= lr * G."""

    kind: ClassVar[str] = "sgd"
    learning_rate: float = 0.1
    every_row: bool = False  # dense-optimizer mode: each step updates every row of the table, touched or not

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        del dim
        return {}

    def apply(self, rows_UxD: jax.Array, slots: Slots, grads_UxD: jax.Array, at: At) -> Updated:
        """One step on U rows; see the module's docstring."""
        rate = self.learning_rate * jnp.asarray(at.rate, rows_UxD.dtype)
        return rows_UxD - rate * grads_UxD, slots


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad:
    """Adagrad with one accumulator a row: s += mean_d(G^2); w -= lr * G / (sqrt(s) + eps).

    As facebookresearch/dlrm (eps 1e-10 there) and FBGEMM's EXACT_ROWWISE_ADAGRAD (eps 1e-8).
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    learning_rate: float = 0.1
    eps: float = 1e-8  # added to the root of the accumulator
    initial_accumulator: float = 0.0  # s of a row that was never touched
    every_row: bool = False  # dense-optimizer mode: each step updates every row of the table, touched or not

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

    def apply(self, rows_UxD: jax.Array, slots: Slots, grads_UxD: jax.Array, at: At) -> Updated:
        """One step on U rows; see the module's docstring."""
        s_U = slots["sum_of_squares"] + at.row_mean(jnp.square(grads_UxD))
        scale_U = (self.learning_rate * jnp.asarray(at.rate, rows_UxD.dtype)) / (jnp.sqrt(s_U) + self.eps)
        return rows_UxD - scale_U[:, None] * grads_UxD, {"sum_of_squares": s_U}


SparseOptimizer = RowWiseAdagrad | Sgd
