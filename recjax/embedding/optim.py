"""Exact sparse optimizers on gathered rows.

One function serves device rows, replicated rows and, later, rows that live in host memory:

  apply(rows_UxD, slots, grads_UxD, at) -> (rows_UxD, slots)

where row u's gradient G is the *sum over the global batch* of the gradients of all its occurrences, and lr is the
learning rate times the schedule's factor. No rule looks across rows.

Lazy mode, the default: callers pass touched rows only, or mask the result. A row that the batch does not name keeps
its weights and its slots, whatever its momentum, and is not decayed; a row whose gradient happens to be zero is
touched, and moves if its momentum or decay says so.

Dense-optimizer mode, `every_row`: callers pass all rows of the table, with G = 0 where the batch does not touch, as if
the table were a dense parameter. Published results with an L2 penalty on whole tables, or with a dense Adam, need it.
It costs a gradient as large as the table and a pass over all rows in each step, so a table may have at most
EVERY_ROW_VALUES values.

Two ways to decay weights, both as FBGEMM has them: `l2` adds l2 * w to G before anything else (also within the means
over a row); `weight_decay` is decoupled (Loshchilov and Hutter 2019): w *= 1 - lr * weight_decay, beside the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from recjax.errors import ConfigError

Slots = dict[str, jax.Array]  # slot name -> [U, ...]
Updated = tuple[jax.Array, Slots]

EVERY_ROW_VALUES = 2**26  # rows * columns of the largest table for `every_row`: 256 MiB in float32


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """State that an optimizer keeps for every row.

    Attributes:
      initial: value before the row is first touched.
      shape: () for one float a row, (D,) for one an element.
    """

    initial: float
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OptimizerContext:
    """Step and place of an update.

    Attributes:
      step: int32 [], steps done before this one.
      rate: [], what the schedule multiplies the learning rate with in this step.
      row_mean: [U, D] -> [U], the mean over all D columns of each row, also where this device holds only some.
      learning_rate: [], in place of the rule's own, so that a program serves all of them; None: the rule's own.
    """

    step: jax.Array
    rate: jax.Array
    row_mean: Callable[[jax.Array], jax.Array]
    learning_rate: jax.Array | None = None


def check_not_negative(config: Any, *names: str) -> None:
    """Refuses fields that are negative or not finite (ConfigError)."""
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be finite and not negative.")


def _check_fractions(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 0 and below 1.")


def check_adagrad(optimizer: Any) -> None:
    """Refuses an `eps` and `initial_accumulator` that are negative, or both 0 (ConfigError)."""
    check_not_negative(optimizer, "eps", "initial_accumulator")
    if optimizer.eps == 0 and optimizer.initial_accumulator == 0:
        raise ConfigError("eps and initial_accumulator are both 0: a zero gradient would divide 0 by 0.")


@dataclasses.dataclass(frozen=True)
class Rates:
    """Settings of sparse and dense optimizers alike: w = (1 - lr * weight_decay) * w - lr * direction(G + l2 * w)."""

    learning_rate: float = 0.1  # lr, before the schedule's factor
    l2: float = dataclasses.field(default=0.0, kw_only=True)  # factor of w that is added to the gradient
    weight_decay: float = dataclasses.field(default=0.0, kw_only=True)  # decoupled decay: w *= 1 - lr * weight_decay

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if not 0 < rate < math.inf:
            raise ConfigError(f"learning_rate is {rate}; it must be positive and finite.")
        check_not_negative(self, "l2", "weight_decay")
        if rate * self.weight_decay >= 1:
            raise ConfigError(
                f"weight_decay is {self.weight_decay} and learning_rate {rate}: weights are multiplied by 1 minus "
                "their product, which must be less than 1. Lower one of them."
            )


@dataclasses.dataclass(frozen=True)
class SgdSettings(Rates):
    """Settings of SGD, with heavy-ball momentum or Nesterov's variant, if asked for."""

    kind: ClassVar[str] = "sgd"
    momentum: float = 0.0  # factor of the momentum; 0 keeps no state
    nesterov: bool = False  # look ahead along the momentum

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fractions(self, "momentum")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov is true, but momentum is 0. Give momentum, for example 0.9.")


@dataclasses.dataclass(frozen=True)
class AdamSettings(Rates):
    """Settings of Adam, or with `weight_decay` of AdamW."""

    kind: ClassVar[str] = "adam"
    learning_rate: float = 1e-3  # lr, before the schedule's factor
    b1: float = 0.9  # decay of the mean of the gradients
    b2: float = 0.999  # decay of the mean of their squares
    eps: float = 1e-8  # term added to the root

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fractions(self, "b1", "b2")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps is {self.eps}; it must be positive and finite: a zero gradient divides 0 by it.")


@dataclasses.dataclass(frozen=True)
class Rule(Rates):
    """Base of most optimizers."""

    row_wise: ClassVar[bool] = False  # whether `direction` asks for the mean over each row of the squares of G + l2 * w
    every_row: bool = dataclasses.field(default=False, kw_only=True)  # dense-optimizer mode: update untouched rows too

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        raise NotImplementedError

    def direction(self, slots: Slots, grads_UxD: jax.Array, at: OptimizerContext) -> Updated:
        """Returns the direction to step against, [U, D], and the new slots."""
        raise NotImplementedError

    def _shape(self, dim: int) -> tuple[int, ...]:
        """Shape of a slot that sums squares: a number for each element or, if `row_wise`, for each row."""
        return () if self.row_wise else (dim,)

    def _squares(self, grads_UxD: jax.Array, at: OptimizerContext) -> jax.Array:
        """Squares that such a slot takes in: [U, D], or [U]."""
        return at.row_mean(jnp.square(grads_UxD)) if self.row_wise else jnp.square(grads_UxD)

    def _beside(self, x: jax.Array) -> jax.Array:
        """Something that was made of such a slot, to go with gradients [U, D]."""
        return x[:, None] if self.row_wise else x

    def regularised(self, rows_UxD: jax.Array, grads_UxD: jax.Array) -> jax.Array:
        """Returns G + l2 * w."""
        return grads_UxD + self.l2 * rows_UxD if self.l2 else grads_UxD

    def apply(self, rows_UxD: jax.Array, slots: Slots, grads_UxD: jax.Array, at: OptimizerContext) -> Updated:
        """One step on U rows; see the module's docstring."""
        lr = self.learning_rate if at.learning_rate is None else at.learning_rate
        rate = lr * jnp.asarray(at.rate, rows_UxD.dtype)
        grads_UxD = self.regularised(rows_UxD, grads_UxD)
        direction_UxD, slots = self.direction(slots, grads_UxD, at)
        if self.weight_decay:
            rows_UxD = rows_UxD * (1 - rate * self.weight_decay)
        return rows_UxD - rate * direction_UxD, slots


@dataclasses.dataclass(frozen=True)
class Sgd(SgdSettings, Rule):
    """w -= lr * G; with momentum m = momentum * m + G; w -= lr * m (heavy ball, as torch.optim.SGD and optax.sgd).

    Nesterov's variant steps by G + momentum * m (Sutskever et al. 2013).
    """

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        return {"momentum": SlotSpec(0.0, (dim,))} if self.momentum else {}

    def direction(self, slots: Slots, grads_UxD: jax.Array, at: OptimizerContext) -> Updated:
        """Returns the direction to step against, [U, D], and the new slots."""
        del at
        if not self.momentum:
            return grads_UxD, slots
        m_UxD = self.momentum * slots["momentum"] + grads_UxD
        return grads_UxD + self.momentum * m_UxD if self.nesterov else m_UxD, {"momentum": m_UxD}


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad, element by element: s += G^2; w -= lr * G / (sqrt(s) + eps).

    Duchi, Hazan and Singer 2011; as torch.optim.Adagrad and FBGEMM's EXACT_ADAGRAD.
    """

    kind: ClassVar[str] = "adagrad"
    eps: float = 1e-8  # term added to the root of the accumulator
    initial_accumulator: float = 0.0  # s of a row that was never touched

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adagrad(self)

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        return {"sum_of_squares": SlotSpec(self.initial_accumulator, self._shape(dim))}

    def direction(self, slots: Slots, grads_UxD: jax.Array, at: OptimizerContext) -> Updated:
        """Returns the direction to step against, [U, D], and the new slots."""
        s = slots["sum_of_squares"] + self._squares(grads_UxD, at)
        return grads_UxD / self._beside(jnp.sqrt(s) + self.eps), {"sum_of_squares": s}


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator a row: s += mean_d(G^2); w -= lr * G / (sqrt(s) + eps).

    As facebookresearch/dlrm (eps 1e-10 there) and FBGEMM's EXACT_ROWWISE_ADAGRAD (eps 1e-8).
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    row_wise: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Adam(AdamSettings, Rule):
    """Adam: m = b1*m + (1-b1)*G; v = b2*v + (1-b2)*G^2; w -= lr * m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps).

    Kingma and Ba 2015; AdamW with `weight_decay`. t is the *global* step, from 1, also for a row that is touched for
    the first time late: the mean of a rare row then starts small but its root smaller still, so that its first step is
    up to (1-b1) / sqrt(1-b2) = 3.2 times lr. FBGEMM's ADAM and torch.optim.SparseAdam count in the same way. In lazy
    mode m and v stay as they are while a row is untouched.
    """

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        return {"m": SlotSpec(0.0, (dim,)), "v": SlotSpec(0.0, self._shape(dim))}

    def direction(self, slots: Slots, grads_UxD: jax.Array, at: OptimizerContext) -> Updated:
        """Returns the direction to step against, [U, D], and the new slots."""
        m_UxD = self.b1 * slots["m"] + (1 - self.b1) * grads_UxD
        v = self.b2 * slots["v"] + (1 - self.b2) * self._squares(grads_UxD, at)
        root = jnp.sqrt(v / _bias(self.b2, at.step, v.dtype)) + self.eps
        return m_UxD / _bias(self.b1, at.step, m_UxD.dtype) / self._beside(root), {"m": m_UxD, "v": v}


@dataclasses.dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """Adam with one v a row: v = b2*v + (1-b2)*mean_d(G^2); m an element, and the rest, as `Adam`.

    FBGEMM's PARTIAL_ROWWISE_ADAM. Half of Adam's slots.
    """

    kind: ClassVar[str] = "partial_rowwise_adam"
    row_wise: ClassVar[bool] = True
    b2: float = 0.999  # decay of the mean of the rows' mean squares


def _bias(decay: float, step: jax.Array, dtype: Any) -> jax.Array:
    """1 - decay^(step + 1), without the cancellation that would cost float32 four digits in the first steps."""
    return -jnp.expm1((step + 1).astype(dtype) * math.log(decay)) if decay else jnp.ones((), dtype)


@dataclasses.dataclass(frozen=True)
class Ftrl:
    """FTRL-Proximal, element by element (McMahan et al. 2013, algorithm 1).

      sigma = (sqrt(n + G^2) - sqrt(n)) / lr;  z += rate * G - sigma * w;  n += G^2
      w = 0 if |z| <= l1 else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)

    Weights are a function of z and n alone. So a row's initial value is forgotten when the row is first touched, as in
    TensorFlow's Ftrl: the rule is meant for wide (first-order) weights, which start at 0. For the same reason there is
    no decoupled decay; `l2` is the paper's lambda_2, a penalty around 0 in the closed form, not added to G.

    The paper has a fixed rate; here the schedule's factor, `rate`, multiplies G within z, so that (without l1) it
    multiplies the move of w, and a factor of 0 moves nothing. `lr` above is learning_rate itself: a changing one would
    weigh the sigmas of earlier steps wrongly.
    """

    kind: ClassVar[str] = "ftrl"
    row_wise: ClassVar[bool] = False
    learning_rate: float = 0.1  # alpha
    beta: float = 1.0  # term that damps the first steps
    l1: float = 0.0  # penalty that makes weights exactly 0
    l2: float = 0.0  # penalty that pulls weights towards 0
    initial_accumulator: float = 0.0  # n of a row that was never touched
    every_row: bool = False  # dense-optimizer mode: update untouched rows too

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be positive and finite.")
        check_not_negative(self, "beta", "l1", "l2", "initial_accumulator")
        if self.beta == 0 and self.initial_accumulator == 0:
            raise ConfigError("beta and initial_accumulator are both 0: a zero gradient would divide 0 by 0.")

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """Its slots for rows of `dim` columns, by name."""
        return {"z": SlotSpec(0.0, (dim,)), "n": SlotSpec(self.initial_accumulator, (dim,))}

    def apply(self, rows_UxD: jax.Array, slots: Slots, grads_UxD: jax.Array, at: OptimizerContext) -> Updated:
        """One step on U rows; see the module's docstring."""
        lr = self.learning_rate if at.learning_rate is None else at.learning_rate
        n_UxD = slots["n"] + jnp.square(grads_UxD)
        sigma_UxD = (jnp.sqrt(n_UxD) - jnp.sqrt(slots["n"])) / lr
        z_UxD = slots["z"] + jnp.asarray(at.rate, rows_UxD.dtype) * grads_UxD - sigma_UxD * rows_UxD
        shrunk_UxD = jnp.sign(z_UxD) * jnp.maximum(jnp.abs(z_UxD) - self.l1, 0)
        curvature_UxD = (self.beta + jnp.sqrt(n_UxD)) / lr + self.l2
        return -shrunk_UxD / curvature_UxD, {"z": z_UxD, "n": n_UxD}


@dataclasses.dataclass(frozen=True)
class Frozen:
    """No update: rows stay as they are to the last bit, and keep no slots. `train.freeze` gives it to a table.

    No config chooses it by its kind, and no gradient is sent for such a table (`ShardedEmbeddings`).
    """

    kind: ClassVar[str] = "frozen"
    row_wise: ClassVar[bool] = False
    every_row: ClassVar[bool] = False

    def slots(self, dim: int) -> dict[str, SlotSpec]:
        """None."""
        return {}


SparseOptimizer = RowWiseAdagrad | Adagrad | Sgd | Adam | PartialRowWiseAdam | Ftrl
