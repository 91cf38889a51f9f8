"""CPU kernels for recjax: handlers of XLA's foreign function interface, and what routing calls. See recjax.kernels."""

import ctypes
import importlib.util

import jax
import numpy as np

INTERFACE = 5  # what recjax.kernels expects; raise both when it changes
HANDLERS = ("interaction_forward", "interaction_backward", "bags_forward", "bags_backward")
HANDLERS += ("table_bags", "update_rowwise_adagrad")
HANDLERS += ("dense_forward", "dense_into_input", "dense_into_kernel")

_spec = importlib.util.find_spec(__name__ + "._kernels")
assert _spec is not None and _spec.origin is not None, "recjax-kernels was installed without its library"
_library = ctypes.CDLL(_spec.origin)

for _name in HANDLERS:
    _handler = jax.ffi.pycapsule(getattr(_library, "recjax_" + _name))
    jax.ffi.register_ffi_target("recjax_" + _name, _handler, platform="cpu")


_library.recjax_instruction_set.restype = ctypes.c_char_p
_library.recjax_use.restype = ctypes.c_bool
_library.recjax_distinct.restype = ctypes.c_int64
_library.recjax_distinct.argtypes = [
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
]


def distinct(keys_L: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique(keys_L, return_inverse=True)` for int32 or int64 from 0 to `limit` - 1; the inverse is int32.

    It does not hold Python's lock while it runs.
    """
    assert keys_L.dtype in (np.int32, np.int64) and keys_L.ndim == 1 and len(keys_L) < 2**31
    keys_L = np.ascontiguousarray(keys_L)
    found_U, inverse_L = np.empty_like(keys_L), np.empty(len(keys_L), np.int32)
    count = _library.recjax_distinct(
        keys_L.ctypes.data, keys_L.itemsize, len(keys_L), limit, found_U.ctypes.data, inverse_L.ctypes.data
    )
    return found_U[:count], inverse_L


def instruction_set() -> str:
    """The variant in use, the best that this processor can run.

    One of "avx512_amx", "avx512_bf16", "avx512", "avx2" and "plain".
    """
    return str(_library.recjax_instruction_set().decode())


def use(name: str) -> bool:
    """Takes the variant of this name from now on; False, and no change, if this processor cannot run it."""
    return bool(_library.recjax_use(name.encode()))
