"""Rows in fewer bytes, for the way between devices.

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
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Precision = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3", "float8_e5m2"]
Stored = Literal["float32", "bfloat16", "int8", "int4"]  # of tables that are only read
_TOP = 14  # float16: the row's largest value is brought to 2^14 .. 2^15
_FLOAT8 = {"float8_e4m3": (jnp.float8_e4m3fn, 7), "float8_e5m2": (jnp.float8_e5m2, 14)}  # and where that is brought to
_BIAS = 127  # of a float32's exponent


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
