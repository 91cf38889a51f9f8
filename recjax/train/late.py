"""Dense gradients that arrive one step late: `train.dense_delay`.

A device keeps the sums over its own samples until the next step. That one adds them up over all devices, and nothing of
its own forward and backward pass, nor of the tables' exchange, depends on what arrives: so the all-reduce may run
beside them. The parameters of step t + 1 are made of those of step t and the gradients of step t - 1; those of the
first step are taken to be zero, and those of the last are never used. Row gradients are not late.

A checkpoint holds the sums over all devices, independent of the mesh; whoever goes on with it gives them to its first
device, and zeros to the others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.parallel.mesh import BATCH_AXES, put, replicated, sharded
from recjax.train.dense import Dense
from recjax.train.gradients import spoilt
from recjax.utils.phases import Phase


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Late:
    """Gradients that each of N devices has not sent yet.

    Attributes:
      grads: tree like the whole dense parameters: sums of its samples' gradients, [N, ...] each.
      weight: sums of the weights of these samples, by which the sum over the devices is to be divided, [N]; all 0 if
        there is nothing to divide by, as before the first step and for tasks (whose weights are divided already).
    """

    grads: Any
    weight: Any


def hold(grads: Any, weight: Any, mesh: Mesh) -> Late:
    """Returns sums over all devices as the first device's, [N, ...] each.

    Args:
      grads: tree of arrays, alike in all processes.
      weight: [].
      mesh: the devices.
    """

    def body(x: Any) -> Any:
        first = jax.lax.axis_index(BATCH_AXES) == 0
        return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x))[None], x)

    placed = put(Late(grads, np.asarray(weight)), replicated(mesh))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(BATCH_AXES))
    made: Late = jax.jit(mapped, out_shardings=sharded(mesh))(placed)
    return made


def total(late: Late) -> Late:
    """The inverse of `hold`: sums over all devices, without the leading axis, on every device."""
    sharding: Any = late.weight.sharding
    added: Late = jax.jit(
        lambda x: jax.tree.map(lambda x: jnp.sum(x, axis=0), x), out_shardings=replicated(sharding.mesh)
    )(late)
    return added


def like(params: Any, mesh: Mesh) -> Late:
    """Shapes, dtypes and shardings for parameters of these shapes."""
    N, split = mesh.devices.size, sharded(mesh)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((N, *x.shape), x.dtype, sharding=split), params)
    dtype = jax.tree.leaves(params)[0].dtype
    return Late(grads, jax.ShapeDtypeStruct((N,), dtype, sharding=split))


def kept(grads: Any, weight: jax.Array) -> Late:
    """Gradients that a device keeps of this step, [1, ...] each; inside `jax.shard_map`."""
    return jax.tree.map(lambda x: x[None], Late(grads, weight))


def means(dense: Dense, late: Late, order: list[int], loss: jax.Array) -> tuple[Any, jax.Array]:
    """Returns the means of what was kept in the step before, as the dense part is held; and the loss.

    Args:
      dense: its `reduce` adds up over the devices.
      late: this device's, [1, ...] each.
      order: of the leaves, in which this step makes gradients; late ones are all there, so any would do.
      loss: [], of this device's samples in this step. It comes back unchanged, but made after the means: XLA would
        combine its all-reduce with theirs, which would then wait for the forward pass.
    """
    grads, weight = jax.tree.map(lambda x: x[0], (late.grads, late.weight))
    with jax.named_scope(Phase.DENSE_GRADS):
        sums, _, weight = dense.reduce(grads, jnp.zeros_like(weight), weight, order)
        arrived = sum((x.reshape(-1)[0] for x in jax.tree.leaves(sums)), weight)
        loss = jnp.where(weight < 0, arrived, loss)  # no weight is negative, which XLA does not know
        weight = jnp.where(weight > 0, weight, 1)
        return jax.tree.map(lambda g: g / weight, sums), loss


def not_finite(grads: Any) -> jax.Array:
    """Counts the values of this device's new gradients that are not finite: int32 []."""
    leaves = jax.tree.leaves(grads)
    with jax.named_scope(Phase.FINITE_CHECK):
        one = jnp.ones((), leaves[0].dtype) if leaves else jnp.ones(())
        return spoilt(leaves, one, (), ())[0]
