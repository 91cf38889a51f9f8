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


_library.recjax_instruction_set.restype = ctypes.c_char_p
_library.recjax_use.restype = ctypes.c_bool


def instruction_set() -> str:
    """The variant in use, the best that this processor can run: "avx512", "avx2" or "plain"."""
    return str(_library.recjax_instruction_set().decode())


def use(name: str) -> bool:
    """Takes the variant of this name from now on; False, and no change, if this processor cannot run it."""
    return bool(_library.recjax_use(name.encode()))
