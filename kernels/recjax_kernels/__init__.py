"""CPU kernels for recjax, as handlers of XLA's foreign function interface. recjax.kernels calls them."""

import ctypes
import importlib.util

import jax

HANDLERS = ("interaction_forward", "interaction_backward", "bags_forward", "bags_backward")

_spec = importlib.util.find_spec(__name__ + "._kernels")
assert _spec is not None and _spec.origin is not None, "recjax-kernels was installed without its library"
_library = ctypes.CDLL(_spec.origin)

for _name in HANDLERS:
    _handler = jax.ffi.pycapsule(getattr(_library, "recjax_" + _name))
    jax.ffi.register_ffi_target("recjax_" + _name, _handler, platform="cpu")


def instruction_set() -> str:
    """The variant that this processor gets: "avx512", "avx2" or "plain"."""
    _library.recjax_instruction_set.restype = ctypes.c_char_p
    return str(_library.recjax_instruction_set().decode())
