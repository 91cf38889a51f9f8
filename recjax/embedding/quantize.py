"""Numbers in fewer bits: rows on their way between devices and in exports, and tables that are held in bfloat16.

On the way:

  precision    bytes of a row of D columns   largest error of a value x
  float32      as x is held                  0
  bfloat16     2 D                           2^-8 |x|
  float16      2 (D + 1)                     2^-11 |x|, or 2^-39 m below 2^-28 m, m being the row's largest |x|
  int8         D + 8                         (max - min) / 255 / 2, max and min being the row's
  int4         D / 2 + 8, rounded up         (max - min) / 15 / 2; of exported tables alone
  float8_e4m3  D + 1                         2^-4 |x|, or 2^-17 m below 2^-13 m
  float8_e5m2  D + 1                         2^-3 |x|, or 2^-31 m below 2^-28 m

Each rounds to nearest, and a row is encoded from its own values alone, so that what arrives does not depend on which
other rows travel with it. A row travels as one array, whatever belongs to it: there is one exchange, as for float32.

float16 has a range so small that gradients of a summed loss can leave it on either side. So each row is first
multiplied by the power of two, which costs no bit, that brings its largest value to 2^14 .. 2^15, below half of what
float16 can hold; that exponent travels as one more value. So with the two kinds of float8 of Micikevicius et al. (2022,
arXiv:2209.05433), e4m3 meant for values and e5m2 for gradients: their largest value comes to 2^7 .. 2^8 and to 2^14 ..
2^15, and the exponent is a byte, as that of a block in the microscaling formats of the OCP.

int8 is the affine row-wise code of FBGEMM (fused 8-bit row-wise): x = bias + q * scale with q of 0 to 255, and float32
scale = (max - min) / 255 and bias = min after the row. A symmetric code would save 4 bytes a row, but its step is
never smaller and up to twice as large. int4 is likewise FBGEMM's code of 4 bits, of two values a byte the first in the
lower half, but with scale and bias in float32 as those of int8.

No finite value becomes infinite but by rounding: those within 2^-9 of the largest float32 (float16: 2^-12, float8:
2^-5 and 2^-4). A row of int8 whose max - min exceeds float32 arrives as NaN. A value that is not finite stays so (in
int8 it takes its row with it), so that the step's check still finds it.

The buffer of a table in bfloat16 is uint16, the bits of its values: the update must scatter to it in place, and on CPU
XLA (JAX 0.10) widens the whole operand of a bfloat16 scatter to float32 first. Rows become float32 as soon as they are
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
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

Precision = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3", "float8_e5m2"]
Stored = Literal["float32", "bfloat16", "int8", "int4"]  # of tables that are only read
_TOP = 14  # float16: the row's largest value is brought to 2^14 .. 2^15
_FLOAT8 = {"float8_e4m3": (jnp.float8_e4m3fn, 7), "float8_e5m2": (jnp.float8_e5m2, 14)}  # and where that is brought to
_BIAS = 127  # of a float32's exponent
_TAG = zlib.crc32(b"stochastic rounding")  # keeps its keys apart from those of the initial values


def encoded_bytes(columns: float, precision: Precision, item_bytes: int) -> float:
    """Bytes of an encoded row of so many columns, of `item_bytes` each where precision is float32."""
    sizes = {
        "float32": columns * item_bytes,
        "bfloat16": columns * 2,
        "float16": (columns + 1) * 2,
        "int8": columns + 8,
        "float8_e4m3": columns + 1,
        "float8_e5m2": columns + 1,
    }
    return sizes[precision]


def encode(x_MxD: jax.Array, precision: Precision | Stored) -> jax.Array:
    """Encodes some rows as they travel.

    Args:
      x_MxD: float32 or bfloat16 (exact in float32), [..., D]; or of any dtype where precision is float32.
      precision: of the way.

    Returns:
      [..., E]: x itself (float32); uint16 [..., D] (bfloat16, also for rows that are held so: on CPU, XLA sends
      bfloat16 as float32); float16 [..., D + 1]; or uint8 [..., D + 8] (int8), [..., ceil(D / 2) + 8] (int4) or
      [..., D + 1] (float8).
    """
    if precision == "bfloat16" or (precision == "float32" and x_MxD.dtype == jnp.bfloat16):
        return jax.lax.bitcast_convert_type(x_MxD.astype(jnp.bfloat16), jnp.uint16)
    if precision == "float32":
        return x_MxD
    x_MxD = x_MxD.astype(jnp.float32)
    if precision == "float16":
        exponent_Mx1 = _exponents(x_MxD, _TOP)
        scaled_MxD = x_MxD * _power(_TOP + _BIAS - exponent_Mx1)
        return jnp.concatenate([scaled_MxD, exponent_Mx1.astype(jnp.float32)], axis=-1).astype(jnp.float16)
    if precision in _FLOAT8:
        dtype, top = _FLOAT8[precision]
        exponent_Mx1 = _exponents(x_MxD, top)
        scaled_MxD = (x_MxD * _power(top + _BIAS - exponent_Mx1)).astype(dtype)
        return jnp.concatenate(
            [jax.lax.bitcast_convert_type(scaled_MxD, jnp.uint8), exponent_Mx1.astype(jnp.uint8)], axis=-1
        )
    most = 15 if precision == "int4" else 255
    low_Mx1 = jnp.min(x_MxD, axis=-1, keepdims=True)
    scale_Mx1 = (jnp.max(x_MxD, axis=-1, keepdims=True) - low_Mx1) / most
    steps_MxD = (x_MxD - low_Mx1) / jnp.where(scale_Mx1 > 0, scale_Mx1, 1)  # 0 / 0 would have no whole number
    q_MxD = jnp.clip(jnp.round(steps_MxD), 0, most).astype(jnp.uint8)
    if precision == "int4":
        q_MxD = jnp.pad(q_MxD, [(0, 0)] * (q_MxD.ndim - 1) + [(0, q_MxD.shape[-1] % 2)])
        q_MxD = q_MxD[..., ::2] | (q_MxD[..., 1::2] << 4)
    return jnp.concatenate([q_MxD, _as_bytes(scale_Mx1), _as_bytes(low_Mx1)], axis=-1)


def decode(encoded_MxE: jax.Array, precision: Precision) -> jax.Array:
    """The rows that `encode` was given, up to rounding: [..., D] float32 (float64 if they were). Not of int4."""
    if encoded_MxE.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(encoded_MxE, jnp.bfloat16).astype(jnp.float32)
    if precision == "float32":
        return encoded_MxE
    if precision == "float16":
        exponent_Mx1 = encoded_MxE[..., -1:].astype(jnp.int32)
        return encoded_MxE[..., :-1].astype(jnp.float32) * _power(exponent_Mx1 - _TOP - _BIAS)
    if precision in _FLOAT8:
        dtype, top = _FLOAT8[precision]
        values_MxD = jax.lax.bitcast_convert_type(encoded_MxE[..., :-1], dtype).astype(jnp.float32)
        return values_MxD * _power(encoded_MxE[..., -1:].astype(jnp.int32) - top - _BIAS)
    scale_Mx1, low_Mx1 = _from_bytes(encoded_MxE[..., -8:-4]), _from_bytes(encoded_MxE[..., -4:])
    return low_Mx1 + encoded_MxE[..., :-8].astype(jnp.float32) * scale_Mx1


def _exponents(x_MxD: jax.Array, top: int) -> jax.Array:
    """The exponent of each row's largest value as float32 stores it, int32 [..., 1], such that `_power` has both ways.

    A factor of 2^(top - exponent) brings that value to 2^top .. 2^(top + 1).
    """
    largest_Mx1 = jnp.max(jnp.abs(x_MxD), axis=-1, keepdims=True)
    exponent_Mx1 = jax.lax.bitcast_convert_type(largest_Mx1, jnp.int32) >> 23  # 255 if not finite
    return jnp.clip(exponent_Mx1, top + 1, 254)


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent for int32 from -126 to 127, exact."""
    return jax.lax.bitcast_convert_type((exponent + _BIAS) << 23, jnp.float32)


def _as_bytes(x_Mx1: jax.Array) -> jax.Array:
    """A float32 as four bytes, [..., 4] uint8."""
    return jax.lax.bitcast_convert_type(x_Mx1[..., 0], jnp.uint8)


def _from_bytes(bytes_Mx4: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bytes_Mx4, jnp.float32)[..., None]


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


def random_bits(
    seed: int,
    step: jax.Array,
    tables: Sequence[str],
    table_M: jax.Array,
    position_M: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """Random bits to round the values of some rows by: uint32 [M, W].

    Args:
      seed: of the run.
      step: int32, steps done before this one.
      tables: names.
      table_M: int32, the number of each row's table among these.
      position_M: int32, storage position of each row.
      columns: int32 [M, W], the column of each value in its table; or [W] where all rows have the same.
    """
    keys_Tx2 = jnp.stack([_key(seed, table, step) for table in tables])
    words = _mix(columns.astype(jnp.uint32) + jnp.uint32(1))
    keys_Mx2 = keys_Tx2[table_M]
    row_M = _mix(position_M.astype(jnp.uint32) ^ keys_Mx2[:, 0]) ^ keys_Mx2[:, 1]
    return _mix(row_M[:, None] + (words if words.ndim > 1 else words[None]))


def _key(seed: int, table: str, step: jax.Array) -> jax.Array:
    """Two words of (seed, table, step)."""
    key = jax.random.key(seed, impl="threefry2x32")
    for word in (_TAG, zlib.crc32(table.encode()), step):
        key = jax.random.fold_in(key, word)
    return jax.random.key_data(key)


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a bijection of uint32 in which each bit depends on each."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
