"""Independent replica groups: their tables averaged from time to time, and how far they are apart.

Each group of devices holds all tables, and updates its own by its own part of the batch, while the dense part stays one
for all. Two designs do so:

- averaging: every k steps all groups take the mean of their weights and slots. TorchRec's 2D parallelism (Zhang et al.
  2025, arXiv:2508.03854) does so; in between no row gradient leaves its group.
- never averaging: tables drift apart, held together by the common dense part alone.

A group's gradient is that of the mean loss, times the number of groups: where all samples weigh the same, that of the
mean loss of its own part. So rates mean what they mean otherwise, and groups that take the mean after each step of SGD
make the step of the whole batch. Any other rule sees gradients of smaller batches, one after the other in each group.

Predictions, and so evaluations, are made with the mean of all groups' rows (`GroupExchange.fetch`), which is a
function of the state alone and not of which group a sample comes to. A checkpoint holds every group's tables, so that
as many groups go on exactly; any other number of groups, and whatever else reads the checkpoint, takes the means.

Not one of these programs needs memory of a table's size: they go over the buffers in chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.buffers import GroupSlots, Tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.quantize import Precision, decode, encode, from_storage, nearest
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.parallel.mesh import ACROSS_GROUPS
from recjax.utils.phases import Phase

CHUNK_VALUES = 1 << 20  # of a device's buffer at a time; few enough for the temporaries, enough to fill a network


def make_average(
    bound: BoundPlan, mesh: Mesh, precision: Precision = "float32"
) -> Callable[[Tables, GroupSlots, jax.Array], tuple[Tables, GroupSlots]]:
    """The jitted program that sets every group's tables and slots to the mean of all groups'.

    It donates them and works in place. Collectives: one all-reduce over the groups for each chunk of each buffer; or,
    for tables in a reduced precision, an all-gather of each chunk's rows, encoded as `quantize.py` has it. Then every
    group takes the mean of what all of them sent, its own rows rounded too, so that all have the same. Bfloat16 tables
    are rounded to nearest.

    Args:
      bound: the bound plan.
      mesh: its devices.
      precision: in which rows of tables travel; slots do so as they are.

    Returns:
      average(tables, slots, ok) -> (tables, slots), as they were unless `ok`.
    """

    def body(tables: Tables, slots: GroupSlots, ok: jax.Array) -> tuple[Tables, GroupSlots]:
        def mean(x: jax.Array, precision: Precision) -> jax.Array:
            def chunk(start: jax.Array, size: int, out: jax.Array) -> jax.Array:
                old = jax.lax.dynamic_slice_in_dim(out, start, size)
                wide = _wide(old)
                new = nearest(_mean(wide, precision), old.dtype)
                return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(ok, new, old), start, 0)

            return _in_chunks(x, chunk, x)

        with jax.named_scope(Phase.REPLICA_EXCHANGE):
            means = jax.tree.map(functools.partial(mean, precision=precision), tables)
            return means, jax.tree.map(functools.partial(mean, precision="float32"), slots)

    embeddings: Any = ShardedEmbeddings(bound)
    specs = embeddings.partition_specs(), embeddings.slot_specs()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(*specs, P()), out_specs=specs)
    return jax.jit(mapped, donate_argnums=(0, 1))


def _mean(x_CxW: jax.Array, precision: Precision) -> jax.Array:
    """The mean over all replica groups of a chunk, [C, ...], as it arrives."""
    if precision == "float32":
        return jax.lax.pmean(x_CxW, ACROSS_GROUPS)
    sent_GxCxE = jax.lax.all_gather(encode(x_CxW, precision), ACROSS_GROUPS)
    return jnp.mean(decode(sent_GxCxE, precision), axis=0)


def _wide(x: jax.Array) -> jax.Array:
    """Values of a piece of a buffer, to calculate with."""
    return from_storage(x).astype(jnp.float32) if x.dtype == jnp.uint16 else x


def _in_chunks(x: jax.Array, chunk: Callable[[jax.Array, int, Any], Any], state: Any) -> Any:
    """`chunk(start, rows, state)` for all rows of x, chunk by chunk; each row once."""
    size = max(1, min(len(x), CHUNK_VALUES // max(1, math.prod(x.shape[1:]))))
    whole, rest = divmod(len(x), size)
    steps = jnp.int32(whole)  # int32 throughout, also where JAX is in 64-bit mode
    state = jax.lax.fori_loop(jnp.int32(0), steps, lambda i, state: chunk(i * size, size, state), state)
    return chunk(jnp.int32(whole * size), rest, state) if rest else state
