"""Tables that are held in bfloat16: how, and how new values get there.

The buffer of such a table is uint16, the bits of its values: the update must scatter to it in place, and on CPU XLA
(JAX 0.10) widens the whole operand of a bfloat16 scatter to float32 first. Rows become float32 as soon as they are
gathered, are updated in float32, with slots in float32, and are rounded when they are written.

Rounding to nearest loses every update of less than half a step of the value (2^-9 to 2^-8 of it), however many there
are. Stochastic rounding (Gupta et al. 2015; also in FBGEMM) goes to one of the two neighbours at random, to each with a
probability that is the share of the way there, so that updates arrive in the mean.

The random bits are a function of (seed, step, table, storage position of the row, column) alone: the same on every
mesh, under every plan, and after a resume. Threefry makes two words of (seed, table, step); integer hashes (the
finaliser of MurmurHash3, Appleby 2011) make the bits from these, position and column: a few operations for a value.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from recjax.embedding.address import locator
from recjax.embedding.layout import Group

_TAG = zlib.crc32(b"stochastic rounding")  # keeps its keys apart from those of the initial values


def storage_dtype(group: Group, dtype: Any) -> Any:
    """Dtype of a group's buffer where tables hold `dtype` unless they say otherwise."""
    return jnp.dtype(jnp.uint16) if group.dtype == "bfloat16" else jnp.dtype(dtype)


def from_storage(x: jax.Array) -> jax.Array:
    """Returns the values of a piece of a buffer: bfloat16 if it is uint16, else itself."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Float values as a buffer of `dtype` holds them, rounded to nearest."""
    if dtype != jnp.uint16:
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def stochastic(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Float32 values as uint16 holds them, rounded up or down at random; without bias, exact where bfloat16 is.

    Args:
      x: float32.
      bits: uint32 of the same shape, of which the upper 16 count.
    """
    wide = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # The lower 16 bits are the share of the way to the neighbour that is further from 0; a carry goes there.
    carried = ((wide + (bits >> 16)) >> 16).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), carried, nearest(x, jnp.uint16))


def to_storage(
    group: Group,
    new_MxW: jax.Array,
    homes_M: jax.Array,
    seed: int,
    step: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Updated rows as the group's buffer holds them. Inside `jax.shard_map` over MODEL_AXES where they are rounded.

    Args:
      group: the table group.
      new_MxW: the rows.
      homes_M: their homes in this device's part of the buffer (`address.py`); beyond R for what is not written.
      seed: of the run.
      step: int32, steps done before this one.
      dtype: of the buffer.
    """
    if dtype != jnp.uint16 or group.rounding == "nearest":
        return nearest(new_MxW, dtype)
    part = group.sharding.this_part()
    _, column = group.place(part)
    segment_M, position_M, _ = locator(group, part)(homes_M)
    column_W = group.columns.start(column) + jnp.arange(group.width, dtype=jnp.int32)
    keys_Tx2 = jnp.stack([_key(seed, s.spec.name, step) for s in group.segments])
    if any(s.first for s in group.segments):
        first_T = jnp.asarray([s.first for s in group.segments], jnp.int32)
        words_MxW = _words(first_T[segment_M][:, None] + column_W[None])
    else:
        words_MxW = _words(column_W)[None]
    return stochastic(new_MxW, _bits(keys_Tx2[segment_M], position_M, words_MxW))


def _key(seed: int, table: str, step: jax.Array) -> jax.Array:
    """Two words of (seed, table, step)."""
    key = jax.random.key(seed, impl="threefry2x32")
    for word in (_TAG, zlib.crc32(table.encode()), step):
        key = jax.random.fold_in(key, word)
    return jax.random.key_data(key)


def _bits(keys_Mx2: jax.Array, position_M: jax.Array, words_MxW: jax.Array) -> jax.Array:
    """uint32 [M, W], one word for each value; `words_MxW` of its columns may be [1, W] where all rows have the same."""
    row_M = _mix(position_M.astype(jnp.uint32) ^ keys_Mx2[:, 0]) ^ keys_Mx2[:, 1]
    return _mix(row_M[:, None] + words_MxW)


def _words(columns: jax.Array) -> jax.Array:
    """uint32 of each column."""
    return _mix(columns.astype(jnp.uint32) + jnp.uint32(1))


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a bijection of uint32 in which each bit depends on each."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
