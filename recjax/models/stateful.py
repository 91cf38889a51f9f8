"""Layers that act otherwise in training: BatchNorm, exact over all devices, and Dropout, the same on any mesh.

flax's own of these names see the samples of one device alone, and draw by the shape that they see: their numbers would
depend on how many devices there are. Both layers here ask `current_samples` which they see while a training step is
traced; where there are none, as in an evaluation, BatchNorm uses its running statistics and Dropout does nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
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


def current_samples() -> Samples | None:
    """Returns the samples that the module now sees; None outside of a training step."""
    return _current.get()


@contextlib.contextmanager
def seeing(given: Samples | None) -> Iterator[None]:
    """Makes these the present ones."""
    token = _current.set(given)
    try:
        yield
    finally:
        _current.reset(token)


def sample_arrays(given: Samples | None) -> Any:
    """The arrays that have an entry for each sample; () if there are none."""
    return () if given is None else (given.number_b, given.counted_b)


def with_sample_arrays(given: Samples | None, arrays: Any) -> Samples | None:
    """The same step with other samples, as `sample_arrays` gave them."""
    return None if given is None else dataclasses.replace(given, number_b=arrays[0], counted_b=arrays[1])


_TAG = zlib.crc32(b"dropout")  # keeps its keys apart from those of stochastic rounding and of initial values


def sum_over_batch(x_bxN: jax.Array) -> jax.Array:
    """The sum over all samples of the batch that count, on all devices: [N] from [b, N].

    For layers of one's own that keep statistics: what is made of such sums alone is the same on all devices, which is
    what a module's state must be. Outside of a training step it is the sum of what is given.
    """
    samples = current_samples()
    if samples is None:
        return jnp.sum(x_bxN, axis=0)
    counted_bx1 = samples.counted_b.reshape(-1, *([1] * (x_bxN.ndim - 1)))
    return jax.lax.psum(jnp.sum(jnp.where(counted_bx1, x_bxN, 0), axis=0), samples.axes)


class BatchNorm(nnx.Module):
    """Batch normalisation (Ioffe and Szegedy 2015, arXiv:1502.03167) over the whole batch, on however many devices.

    y = scale * (x - mean) / sqrt(var + epsilon) + bias, in training with the mean and variance of the samples of this
    batch that have any weight; else with running ones, which move by 1 - decay of the way in each step, towards the
    unbiased variance, as in the paper and in torch.nn.BatchNorm1d (whose momentum is 1 - decay).

    Mean and variance come from two all-reduces, of (n, sum of x) and of the sum of squared distances from the mean.
    Sums are of float32 at least, and so are all parameters and statistics.
    """

    def __init__(self, features: int, *, decay: float = 0.9, epsilon: float = 1e-5) -> None:
        """For inputs [b, features]; starts as the identity but for epsilon."""
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(features, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(features, jnp.float32))
        self.decay, self.epsilon = decay, epsilon

    def __call__(self, x_bxN: jax.Array) -> jax.Array:
        """[b, N] -> [b, N], in the dtype of x."""
        wide_bxN = x_bxN.astype(self.scale.dtype)
        mean_N, var_N = self.mean[...], self.var[...]
        if current_samples() is not None:
            mean_N, var_N = self._of_batch(wide_bxN)
        factor_N = self.scale[...] * jax.lax.rsqrt(var_N + self.epsilon)
        return ((wide_bxN - mean_N[None]) * factor_N[None] + self.bias[...][None]).astype(x_bxN.dtype)

    def _of_batch(self, x_bxN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of the batch, [N] each; the running ones move."""
        sums = sum_over_batch(jnp.concatenate([jnp.ones((len(x_bxN), 1), x_bxN.dtype), x_bxN], axis=1))
        count, mean_N = sums[0], sums[1:] / sums[0]
        squares_N = sum_over_batch(jnp.square(x_bxN - mean_N[None]))
        running = ((self.mean, mean_N), (self.var, squares_N / jnp.maximum(count - 1, 1)))
        for kept, new_N in running:
            kept[...] = jax.lax.stop_gradient(self.decay * kept[...] + (1 - self.decay) * new_N)
        return mean_N, squares_N / count


class Dropout(nnx.Module):
    """Sets a share of the values to 0 in training, and scales the others up by 1 / (1 - rate) (Srivastava et al. 2014).

    Which ones is a function of (seed of the run, step, number of the sample in the global batch, layer, place of the
    value in the sample): the same on any mesh, with any number of parts, and after a resume. Layers of a module count
    in the order in which it is taken apart; each has its own values.
    """

    def __init__(self, rate: float) -> None:
        """Drops values with this probability, 0 to below 1 (ConfigError)."""
        check_rate(rate)
        self.rate = rate
        self.layer = 0  # which of a module's, as `number_dropouts` has it

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, ...] -> the same shape and dtype."""
        samples = current_samples()
        if samples is None or self.rate == 0:
            return x
        key = jax.random.key(samples.seed, impl="threefry2x32")
        for word in (_TAG, samples.step, self.layer):
            key = jax.random.fold_in(key, word)

        def bits(number: jax.Array) -> jax.Array:
            return jax.random.bits(jax.random.fold_in(key, number), x.shape[1:], jnp.uint32)

        kept = jax.vmap(bits)(samples.number_b) >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


def check_rate(rate: float) -> None:
    """Refuses a share of values to drop that is not 0 to below 1 (ConfigError)."""
    if not 0 <= rate < 1:
        raise ConfigError(f"dropout is {rate}; it must be at least 0 and below 1: the share of values that become 0.")


def number_dropouts(model: nnx.Module) -> None:
    """Gives each Dropout of a module a number of its own, by which its values differ from those of the others."""
    layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, Dropout)]
    for number, layer in enumerate(layers):
        layer.layer = number
