"""Losses by name, and the settings of a task: what is learnt of one label.

Each loss takes labels [n] and outputs of the model, [n] or [n, C], and gives the loss of each sample, [n]. The formulas
are written for any array library (`xp`: jax.numpy in a step, numpy in an evaluation), so that both measure the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from recjax.data.batch import LabelKind
from recjax.embedding.optim import check_not_negative
from recjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LogLoss:
    """Cross-entropy of a label of 0 or 1 with its logit x, in nats: ln(1 + e^-x) or ln(1 + e^x)."""

    kind: ClassVar[str] = "binary"
    of: ClassVar[LabelKind] = "binary"

    def losses(self, xp: Any, labels_n: Any, outputs_n: Any) -> Any:
        """Loss of each sample, [n]."""
        return xp.logaddexp(0.0, (1 - 2 * labels_n) * outputs_n)


@dataclasses.dataclass(frozen=True)
class Focal:
    """Cross-entropy that counts less where the label is predicted well: a_t (1 - p_t)^gamma * -ln p_t.

    Source: Lin et al. 2017, arXiv:1708.02002, equation 5; p_t is the probability of the label that is there, and a_t is
    alpha for label 1 and 1 - alpha for 0.
    """

    kind: ClassVar[str] = "focal"
    of: ClassVar[LabelKind] = "binary"
    gamma: float = 2.0  # exponent of 1 - p_t; 0: a factor of 1
    alpha: float | None = 0.25  # weight a_t of label 1; none: both labels count alike

    def __post_init__(self) -> None:
        check_not_negative(self, "gamma")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be 0 to 1, or none.")

    def losses(self, xp: Any, labels_n: Any, outputs_n: Any) -> Any:
        """Loss of each sample, [n]."""
        signed_n = (1 - 2 * labels_n) * outputs_n  # 1 - p_t = sigmoid of it
        losses_n = xp.exp(-self.gamma * xp.logaddexp(0.0, -signed_n)) * xp.logaddexp(0.0, signed_n)
        if self.alpha is None:
            return losses_n
        return losses_n * (self.alpha * labels_n + (1 - self.alpha) * (1 - labels_n))


@dataclasses.dataclass(frozen=True)
class SquaredError:
    """(x - y)^2."""

    kind: ClassVar[str] = "mse"
    of: ClassVar[LabelKind] = "number"

    def losses(self, xp: Any, labels_n: Any, outputs_n: Any) -> Any:
        """Loss of each sample, [n]."""
        return xp.square(outputs_n - labels_n)


@dataclasses.dataclass(frozen=True)
class AbsoluteError:
    """|x - y|; its gradient is 0 where the two are equal."""

    kind: ClassVar[str] = "mae"
    of: ClassVar[LabelKind] = "number"

    def losses(self, xp: Any, labels_n: Any, outputs_n: Any) -> Any:
        """Loss of each sample, [n]."""
        apart_n = outputs_n - labels_n
        return xp.sign(apart_n) * apart_n  # the gradient of JAX's abs is 1 at 0


@dataclasses.dataclass(frozen=True)
class Huber:
    """Huber's loss of d = x - y: d^2 / 2 up to |d| = delta, and delta (|d| - delta / 2) beyond."""

    kind: ClassVar[str] = "huber"
    of: ClassVar[LabelKind] = "number"
    delta: float = 1.0  # distance from which on the loss grows linearly

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise ConfigError(f"delta is {self.delta}; it must be positive and finite.")

    def losses(self, xp: Any, labels_n: Any, outputs_n: Any) -> Any:
        """Loss of each sample, [n]."""
        apart_n = xp.abs(outputs_n - labels_n)
        near_n = xp.minimum(apart_n, self.delta)
        return near_n * (apart_n - near_n / 2)


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Negative log likelihood of a count y with the expectation e^x, without the term ln y!: e^x - y x."""

    kind: ClassVar[str] = "poisson"
    of: ClassVar[LabelKind] = "number"

    def losses(self, xp: Any, labels_n: Any, outputs_n: Any) -> Any:
        """Loss of each sample, [n]."""
        return xp.exp(outputs_n) - labels_n * outputs_n


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Cross-entropy of a class with the softmax of C outputs, in nats."""

    kind: ClassVar[str] = "softmax"
    of: ClassVar[LabelKind] = "class"

    def losses(self, xp: Any, labels_n: Any, outputs_nxC: Any) -> Any:
        """Loss of each sample, [n]."""
        most_nx1 = xp.max(outputs_nxC, axis=1, keepdims=True)
        total_n = xp.log(xp.sum(xp.exp(outputs_nxC - most_nx1), axis=1)) + most_nx1[:, 0]
        return total_n - xp.take_along_axis(outputs_nxC, labels_n.astype("int32")[:, None], axis=1)[:, 0]


Loss = LogLoss | Focal | SquaredError | AbsoluteError | Huber | Poisson | Softmax

LOSSES: dict[str, type[Loss]] = {
    "binary": LogLoss,
    "focal": Focal,
    "mse": SquaredError,
    "mae": AbsoluteError,
    "huber": Huber,
    "poisson": Poisson,
    "softmax": Softmax,
}

DEFAULTS: dict[LabelKind, Loss] = {"binary": LogLoss(), "number": SquaredError(), "class": Softmax()}


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Settings of one label; None: the loss of its kind, and weight 1."""

    # binary or focal for labels of 0 and 1; mse, mae, huber or poisson for numbers; softmax for classes
    loss: Loss | None = None
    weight: float | None = None  # weight of its mean loss in the sum over the tasks

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 <= self.weight < math.inf:
            raise ConfigError(f"weight is {self.weight}; it must be 0 or more, and finite.")
