"""Programs that LLVM does not optimise, for tests of float64 numbers to 1e-9: compiling is most of their time.

What XLA does with a program, its collectives and its order are the same. How the last bit is rounded may differ, as
where a product and a sum become one operation: such programs are not kept for tests that compare bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler


@contextlib.contextmanager
def light() -> Iterator[None]:
    """Compiles so what is compiled meanwhile, and forgets it in the end."""
    plain = compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        made.executable_build_options.debug_options.xla_backend_optimization_level = 0
        return made

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        yield
    jax.clear_caches()
