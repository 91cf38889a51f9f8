"""What the tests of the kernels share; the fixture `variant` is in conftest.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

F32, BF16 = np.dtype(np.float32), jnp.dtype(jnp.bfloat16)


def pull(function: Callable[..., Any], x: Any, cotangent: Any) -> tuple[Any, Any]:
    """The value, and the gradient for x."""
    value, back = jax.vjp(function, jnp.asarray(x))
    return np.asarray(value), np.asarray(back(jnp.asarray(cotangent))[0])


def check_sums(result: np.ndarray, exact: np.ndarray, magnitudes: np.ndarray, terms: int) -> None:
    """A sum in float32 errs by at most n 2^-24 times the sum of its terms' magnitudes; bfloat16 rounds once more."""
    bound = (terms + 1) * 2.0**-24 * magnitudes
    if result.dtype == BF16:
        bound = bound + 2.0**-8 * np.abs(exact)
    assert result.shape == exact.shape
    assert (np.abs(result.astype(np.float64) - exact) <= bound).all()
