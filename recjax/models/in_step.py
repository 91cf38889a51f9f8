"""The samples that a layer sees while a training step is traced, for layers that draw at random or see the batch.

A module is called with samples and nothing else. What `Dropout` and `BatchNorm` need beside them stands here for the
duration of that call. In an evaluation, a prediction and outside of a step there is nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from recjax.parallel.mesh import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of one call of a module, on one device, inside `jax.shard_map` over BATCH_AXES.

    Attributes:
      number_b: int32 [b], which sample of the global batch each is: the same on any mesh.
      counted_b: bool [b], whether it has any weight; padding has none.
      seed: of the run.
      step: int32 [], steps done before.
      axes: mesh axes that all samples of the batch lie along.
    """

    number_b: jax.Array
    counted_b: jax.Array
    seed: int
    step: jax.Array
    axes: tuple[str, ...] = BATCH_AXES


@dataclasses.dataclass(frozen=True)
class Step:
    """A step; `seed` and `step` as in `Samples`."""

    seed: int
    step: jax.Array

    def samples(self, weights_b: jax.Array) -> Samples:
        """All samples of this device, of weights [b] or [b, T]. Devices have consecutive ones, in their order."""
        b = len(weights_b)
        number_b = jax.lax.axis_index(BATCH_AXES).astype(jnp.int32) * b + jnp.arange(b, dtype=jnp.int32)
        return Samples(number_b, (weights_b > 0).reshape(b, -1).any(axis=1), self.seed, self.step)


_current: contextvars.ContextVar[Samples | None] = contextvars.ContextVar("samples of the step", default=None)


def samples() -> Samples | None:
    """Returns the samples that the module now sees; None outside of a training step."""
    return _current.get()


@contextlib.contextmanager
def of(given: Samples | None) -> Iterator[None]:
    """Makes these the present ones."""
    token = _current.set(given)
    try:
        yield
    finally:
        _current.reset(token)


def arrays(given: Samples | None) -> Any:
    """The arrays that have an entry for each sample; () if there are none."""
    return () if given is None else (given.number_b, given.counted_b)


def with_arrays(given: Samples | None, found: Any) -> Samples | None:
    """The same step with other samples, as `arrays` gave them."""
    return None if given is None else dataclasses.replace(given, number_b=found[0], counted_b=found[1])
