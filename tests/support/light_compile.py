"""Programs that LLVM does not optimise, for tests of float64 numbers to 1e-9: compiling is most of their time.

What XLA does with a program, its collectives and its order are the same. How the last bit is rounded may differ, as
where a product and a sum become one operation: such programs are not kept for tests that compare bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compiler

_PLAIN = compiler.get_compile_options


def _options(*args: Any, **kwargs: Any) -> Any:
    made = _PLAIN(*args, **kwargs)
    made.executable_build_options.debug_options.xla_backend_optimization_level = 0
    return made


def stay() -> None:
    """Compiles so from now on: for a process of its own."""
    compiler.get_compile_options = _options


@contextlib.contextmanager
def light() -> Iterator[None]:
    """Compiles so what is compiled meanwhile, and forgets it in the end."""
    jax.clear_caches()
    stay()
    try:
        yield
    finally:
        compiler.get_compile_options = _PLAIN
        jax.clear_caches()
