"""Ways to hold the dense parameters and to sum their gradients over the devices: `train.dense`.

`Replicated` holds everything on every device and sums gradients by all-reduce; on GPUs `Flat` does, in one vector.
`Sharded` is ZeRO's third stage (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3), also called fully sharded data
parallel: a device holds 1/N of each parameter and of its optimizer state, parameters are gathered before they are used,
and gradients arrive summed and split by reduce-scatter. The numbers are the same, and checkpoints too: whole arrays,
whoever wrote them.

A ring moves 2 (N - 1) / N bytes for each byte of parameters either way: an all-reduce, or an all-gather and a
reduce-scatter. That is why gathered parameters are kept for the backward pass: gathering them once more would cost half
as much again, to save memory that activations outweigh in recommendation models. So what is saved is the memory of
parameters and optimizer state between the steps, (N - 1) / N of it, and the time of the optimizer; within a step there
is room for one whole copy of the parameters.

With `bucket_bytes` both work in buckets, in the order in which the backward pass makes the gradients, so that the first
ones travel while the others are still being computed. XLA combines collectives that do not depend on each other, up to
limits of its own for each back end. Each bucket is therefore one flat array, which nothing can split, and ends in one
number of the bucket before it, so that nothing can combine them; on the wire they come one after the other anyway.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from recjax.config.train import DenseSharding
from recjax.errors import ConfigError
from recjax.parallel.mesh import BATCH_AXES
from recjax.train.module import parameters

Sums: TypeAlias = tuple[Any, jax.Array, jax.Array]  # gradients as they are held, sum of w*l, sum of w


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every device holds all parameters and their optimizer state.

    Attributes:
      bucket_bytes: a bucket is full, and sent, when it holds so many bytes of gradients; 0: one all-reduce of all
        gradients after the backward pass.
    """

    bucket_bytes: int = 0

    def hold(self, dense: Any, opt: Any) -> tuple[Any, Any]:
        """Whole parameters and optimizer state, as a TrainState has them."""
        return dense, opt

    def whole(self, dense: Any, opt: Any) -> tuple[Any, Any]:
        """The inverse of `hold`."""
        return dense, opt

    def specs(self) -> tuple[Any, Any]:
        """PartitionSpecs of both."""
        return P(), P()

    def like(self, dense: Any) -> Any:
        """Whole parameters' shapes and dtypes, from parameters as they are held."""
        return _shapes(dense)

    def gather(self, dense: Any, order: Sequence[int]) -> Any:
        """Whole parameters on each device, of which gradients are those of its own samples alone. Moves nothing."""
        # Made varying: of parameters that are the same everywhere, autodiff would sum the gradients by itself.
        return jax.lax.pcast(dense, BATCH_AXES, to="varying")

    def reduce(self, grads: Any, loss: jax.Array, weight: jax.Array, order: Sequence[int]) -> Sums:
        """Sums over the devices. Loss and weights are known before any gradient: they go with the first bucket."""
        if not self.bucket_bytes:
            return jax.lax.psum((grads, loss, weight), BATCH_AXES)
        leaves, structure = jax.tree.flatten(grads)
        groups = buckets([x.nbytes for x in leaves], order, self.bucket_bytes)
        pieces = [[leaves[i].reshape(-1) for i in group] for group in groups]
        pieces[0].append(jnp.stack([loss, weight]))
        found = _one_after_another(pieces, lambda x: jax.lax.psum(x, BATCH_AXES))
        sums = list(leaves)
        for group, done in zip(groups, found, strict=True):
            for i, part_1xS in zip(group, _columns(done[None], [leaves[i].size for i in group]), strict=True):
                sums[i] = part_1xS.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, sums), *found[0][-2:]

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over all gradients, from the sum over those that this device holds."""
        return x


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A device holds 1/N of each parameter and of its optimizer state: flat, padded with zeros to a multiple of N.

    The optimizer sees these shards, so it must work on each value by itself. All those of `recjax.config.train` do,
    and `Sharded.of` refuses what does not.

    Attributes:
      params: shapes and dtypes of the whole parameters.
      opt: shapes and dtypes of their whole optimizer state.
      split: tree like `opt`: whether a leaf has a value for each value of a parameter (a count of steps has not).
      devices: N.
      bucket_bytes: as for `Replicated`, of whole parameters; 0: one all-gather and one reduce-scatter.
    """

    params: Any
    opt: Any
    split: Any
    devices: int
    bucket_bytes: int = 0

    @classmethod
    def of(cls, params: Any, tx: optax.GradientTransformation, devices: int, bucket_bytes: int) -> Sharded:
        """For `params` (arrays or their shapes) under the optimizer `tx`.

        Raises:
          ConfigError: a value's update depends on other values.
        """
        params = _shapes(params)
        flat = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.size,), x.dtype), params)
        opt, flat_opt = jax.eval_shape(tx.init, params), jax.eval_shape(tx.init, flat)
        whole_sizes, flat_sizes = ([leaf.size for leaf in jax.tree.leaves(tree)] for tree in (opt, flat_opt))
        if whole_sizes != flat_sizes or not _elementwise(jax.make_jaxpr(tx.update)(flat, flat_opt, flat).jaxpr):
            raise ConfigError(
                "train.dense=sharded needs an optimizer that updates each value by itself, since a device sees only "
                "its part of each parameter, and this one also looks at others (a norm, say, or a mean). Use "
                "train.dense=replicated, or train.clip_norm to clip, which knows about the parts."
            )
        return cls(params, opt, jax.tree.map(lambda x: x.ndim == 1, flat_opt), devices, bucket_bytes)

    def hold(self, dense: Any, opt: Any) -> tuple[Any, Any]:
        """Whole parameters and optimizer state, as a TrainState has them: [N * ceil(size / N)] each."""
        hold_opt = jax.tree.map(lambda x, split: self._flat(x) if split else x, opt, self.split)
        return jax.tree.map(self._flat, dense), hold_opt

    def whole(self, dense: Any, opt: Any) -> tuple[Any, Any]:
        """The inverse of `hold`."""
        return jax.tree.map(_unflat, dense, self.params), jax.tree.map(_unflat, opt, self.opt)

    def specs(self) -> tuple[Any, Any]:
        """PartitionSpecs of both."""
        return P(BATCH_AXES), jax.tree.map(lambda split: P(BATCH_AXES) if split else P(), self.split)

    def like(self, dense: Any) -> Any:
        """Whole parameters' shapes and dtypes."""
        return self.params

    def gather(self, dense: Any, order: Sequence[int]) -> Any:
        """Whole parameters on each device, of which gradients are those of its own samples alone.

        Args:
          dense: this device's shards.
          order: of the leaves, in which gradients will be made: the last is needed first.
        """
        shards, structure = jax.tree.flatten(dense)
        shapes = jax.tree.leaves(self.params)
        groups = self._buckets(order)[::-1]
        with jax.named_scope("dense_gather"):
            pieces_S = [[shards[i] for i in group] for group in groups]
            found_NxS = _one_after_another(pieces_S, lambda x: jax.lax.all_gather(x, BATCH_AXES))
            whole = list(shards)
            for group, done_NxS in zip(groups, found_NxS, strict=True):
                for i, part in zip(group, _columns(done_NxS, [len(shards[i]) for i in group]), strict=True):
                    whole[i] = _unflat(part, shapes[i])
        return jax.tree.unflatten(structure, whole)

    def reduce(self, grads: Any, loss: jax.Array, weight: jax.Array, order: Sequence[int]) -> Sums:
        """Sums over the devices, of gradients this device's shards; loss and weights travel on their own, and first."""
        loss, weight = jax.lax.psum(jnp.stack([loss, weight]), BATCH_AXES)
        leaves, structure = jax.tree.flatten(grads)
        parts_NxS = [self._flat(x).reshape(self.devices, -1) for x in leaves]
        groups = self._buckets(order)
        pieces_NxS = [[parts_NxS[i] for i in group] for group in groups]
        found_S = _one_after_another(pieces_NxS, lambda x: jax.lax.psum_scatter(x, BATCH_AXES))
        sums = list(leaves)
        for group, done_S in zip(groups, found_S, strict=True):
            for i, part in zip(group, _columns(done_S[None], [parts_NxS[i].shape[1] for i in group]), strict=True):
                sums[i] = part[0]
        return jax.tree.unflatten(structure, sums), loss, weight

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over all gradients, from the sum over those that this device holds. Padding counts as 0."""
        return jax.lax.psum(x, BATCH_AXES)

    def _buckets(self, order: Sequence[int]) -> list[list[int]]:
        sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(self.params)]
        return buckets(sizes, order, self.bucket_bytes) if self.bucket_bytes else [list(order)]

    def _flat(self, x: Any) -> jax.Array:
        return jnp.pad(jnp.reshape(x, -1), (0, -x.size % self.devices))


@dataclasses.dataclass(frozen=True)
class Flat:
    """Every device holds all parameters in one vector, and their optimizer state in as few.

    A GPU is then given one operation for the update of all, and one for the check of all, where it would be given some
    for each parameter: for a small model their number is the time. The optimizer sees one parameter, so it must work on
    each value by itself. Gradients are one all-reduce.

    Attributes:
      params: shapes and dtypes of the whole parameters, of one dtype.
      opt: structure of their whole optimizer state.
      joined: tree like the state of the vector: whether a leaf has a value for each value of a parameter.
    """

    bucket_bytes: ClassVar[int] = 0

    params: Any
    opt: Any
    joined: Any

    @classmethod
    def of(cls, params: Any, tx: optax.GradientTransformation) -> Flat | None:
        """For parameters of these shapes under the optimizer `tx`; None if they cannot be held so."""
        shapes, flat = _shapes(params), _flat_shape(params)
        if flat is None:
            return None
        opt, flat_opt = jax.eval_shape(tx.init, shapes), jax.eval_shape(tx.init, flat)
        joined = jax.tree.map(lambda x: x.shape == flat.shape, flat_opt)
        expected: list[Any] = []  # shapes of the whole state, if each vector stands for a tree like the parameters
        for leaf, stands in zip(jax.tree.leaves(flat_opt), jax.tree.leaves(joined), strict=True):
            expected += [x.shape for x in jax.tree.leaves(shapes)] if stands else [leaf.shape]
        alike = [x.shape for x in jax.tree.leaves(opt)] == expected
        if not alike or not _elementwise(jax.make_jaxpr(tx.update)(flat, flat_opt, flat).jaxpr):
            return None
        return cls(shapes, jax.tree.structure(opt), joined)

    def hold(self, dense: Any, opt: Any) -> tuple[Any, Any]:
        """Whole parameters and optimizer state, as a TrainState has them: vectors, and what is no parameter's."""
        leaves, count = iter(jax.tree.leaves(opt)), len(jax.tree.leaves(self.params))
        parts = [
            _vector([next(leaves) for _ in range(count)]) if stands else next(leaves)
            for stands in jax.tree.leaves(self.joined)
        ]
        return _vector(jax.tree.leaves(dense)), jax.tree.unflatten(jax.tree.structure(self.joined), parts)

    def whole(self, dense: Any, opt: Any) -> tuple[Any, Any]:
        """The inverse of `hold`."""
        leaves: list[Any] = []
        for leaf, stands in zip(jax.tree.leaves(opt), jax.tree.leaves(self.joined), strict=True):
            leaves += jax.tree.leaves(self._split(leaf)) if stands else [leaf]
        return self._split(dense), jax.tree.unflatten(self.opt, leaves)

    def specs(self) -> tuple[Any, Any]:
        """PartitionSpecs of both."""
        return P(), P()

    def like(self, dense: Any) -> Any:
        """Whole parameters' shapes and dtypes."""
        return self.params

    def gather(self, dense: Any, order: Sequence[int]) -> Any:
        """Whole parameters on each device, of which gradients are those of its own samples alone. Moves nothing."""
        return self._split(jax.lax.pcast(dense, BATCH_AXES, to="varying"))

    def reduce(self, grads: Any, loss: jax.Array, weight: jax.Array, order: Sequence[int]) -> Sums:
        """Sums over the devices, of gradients one vector."""
        sums = jax.lax.psum(_vector([*jax.tree.leaves(grads), loss, weight]), BATCH_AXES)
        return sums[:-2], sums[-2], sums[-1]

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over all gradients, from the sum over those that this device holds."""
        return x

    def _split(self, vector: Any) -> Any:
        leaves, structure = jax.tree.flatten(self.params)
        parts = _columns(vector[None], [x.size for x in leaves])
        return jax.tree.unflatten(structure, [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])


Dense: TypeAlias = Replicated | Sharded | Flat
REPLICATED = Replicated()


def flattened(dense: Dense, params: Any, tx: optax.GradientTransformation, platform: str) -> Dense:
    """Returns `dense`, but on a GPU one vector in place of many parameters, if they can be held so.

    Elsewhere nothing is gained: what a CPU does for each parameter costs little, and a TPU would have to copy the
    parts of a vector for its products. Buckets of gradients want the parameters apart.

    Args:
      dense: as `make_dense` gave it, for any platform.
      params: arrays of the parameters, or their shapes.
      tx: their optimizer.
      platform: "cpu", "gpu" or "tpu".
    """
    if isinstance(dense, Sharded) or dense.bucket_bytes:
        return dense
    return (Flat.of(params, tx) if platform == "gpu" else None) or REPLICATED


def make_dense(
    held: DenseSharding,
    bucket_mib: float,
    model: nnx.Module,
    tx: optax.GradientTransformation,
    dtype: Any,
    devices: int,
    platform: str = "cpu",
) -> Dense:
    """Makes the way that `train.dense` and `train.bucket_mib` ask for, on so many devices of a platform.

    Raises:
      ConfigError: as `Sharded.of`.
    """
    bucket_bytes = int(bucket_mib * 2**20)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), parameters(model))
    if held == "replicated":
        return flattened(Replicated(bucket_bytes), params, tx, platform)
    return Sharded.of(params, tx, devices, bucket_bytes)


def buckets(sizes_bytes: Sequence[int], order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Groups the leaves in their `order`: a group is full when it has `bucket_bytes`, which only the last may lack."""
    groups: list[list[int]] = [[]]
    filled = 0
    for i in order:
        if filled >= bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += sizes_bytes[i]
    return groups


def order_made(gradients: Callable[[Any], Any], like: Any) -> list[int]:
    """The leaves of `like` in the order in which `gradients` makes those of its result; ties as they come.

    Traced, not run: inside `jax.shard_map` it costs nothing at run time.

    Args:
      gradients: from parameters that vary over the devices to a tree like them.
      like: the parameters' shapes and dtypes.
    """

    def trace() -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return gradients(jax.lax.pcast(zeros, BATCH_AXES, to="varying"))

    jaxpr = jax.make_jaxpr(trace)().jaxpr
    made = {id(var): at for at, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    return sorted(range(len(jaxpr.outvars)), key=lambda i: made.get(id(jaxpr.outvars[i]), -1))


def _one_after_another(
    groups: Sequence[Sequence[jax.Array]], collective: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """`collective` of each bucket: pieces [..., S_i] side by side, and after them, in all but the first, the link.

    The link is a number of the result before. A barrier in its place (`optimization_barrier`) would be dropped by XLA
    before it combines reduce-scatters.
    """
    results: list[jax.Array] = []
    for pieces in groups:
        link = [jnp.broadcast_to(results[-1].reshape(-1)[:1], (*pieces[0].shape[:-1], 1))] if results else []
        together = jax.lax.platform_dependent([*pieces, *link], cpu=_put_in_place, default=_concatenated)
        results.append(collective(together))
    return results


def _concatenated(pieces: Sequence[jax.Array]) -> jax.Array:
    """Pieces side by side, in one kernel."""
    return jnp.concatenate(pieces, axis=-1)


def _put_in_place(pieces: Sequence[jax.Array]) -> jax.Array:
    """Pieces side by side, put there one by one: for CPUs.

    XLA for CPUs fuses a concatenation with small sums among its pieces. Such a loop asks for each number which piece it
    is of, and takes the sums there: it takes nearly four times as long.
    """
    first, *others = pieces
    room = sum(piece.shape[-1] for piece in others)
    joined = jnp.pad(first, [(0, 0)] * (first.ndim - 1) + [(0, room)])
    at = first.shape[-1]
    for piece in others:
        joined = jax.lax.dynamic_update_slice_in_dim(joined, piece, at, axis=-1)
        at += piece.shape[-1]
    return joined


def _columns(x_NxS: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Parts of the given widths, one after the other; what lies beyond them is left out."""
    ends = list(itertools.accumulate(widths))
    return [x_NxS[:, end - width : end] for width, end in zip(widths, ends, strict=True)]


def _vector(leaves: Sequence[Any]) -> Any:
    """The values of all leaves, one after the other."""
    return jnp.concatenate([jnp.reshape(x, -1) for x in leaves])


def _shapes(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _flat_shape(params: Any) -> jax.ShapeDtypeStruct | None:
    """Returns the shape of one vector of all parameters; None if they are of several dtypes, or none."""
    leaves = jax.tree.leaves(params)
    if len({x.dtype for x in leaves}) != 1:
        return None
    return jax.ShapeDtypeStruct((sum(x.size for x in leaves),), leaves[0].dtype)


def _unflat(x: Any, shape: Any) -> Any:
    return x.reshape(-1)[: shape.size].reshape(shape.shape)


def _elementwise(jaxpr: Any) -> bool:
    """Returns whether the jaxpr is elementwise: no equation makes an array smaller, as reductions do."""
    return all(
        result.aval.size >= operand.aval.size
        for equation in jaxpr.eqns
        for operand in equation.invars
        for result in equation.outvars
    )
