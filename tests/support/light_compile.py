"""Programs that are compiled cheaply, for tests of numbers: compiling is most of their time.

A program's collectives and their order are the same. Its fusions are not: which operations XLA joins in a loop depends
on who makes the loops. What follows is quicker in two ways:

- Always: one LLVM module a program, of XLA's own loops instead of those by MLIR. It halves the time.
- Unless `optimised`: LLVM does not optimise. It takes another half off, for tests of float64 numbers to 1e-9, of files
  and messages, or of bits. How the last bit is rounded may differ, as where a product and a sum become one operation:
  of the modules that compare the bits of different programs, some for each claim are `optimised`.

The last bit shows in float32 draws: 4% of the normal numbers with which dense layers begin end in another last place
than those of users (XLA's float32 `erf_inv`), so that losses in float64 differ by about 1e-9 from theirs. From the same
initial values they are equal to 1e-14: `tests/test_light_compile.py`. Compare numbers of one way to compile alone.

Tests that read compiled programs have them `as_text`: LLVM alone does less, so that the text that XLA gives, and the
memory that it says the program takes, are those of users' programs. Tests that measure programs take them as users do.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compiler

from support.compile_cache import ASKED

OPTIMISED, AS_TEXT = "optimised", "as_text"  # its values where LLVM optimises, and where texts are those of users
_PLAIN = compiler.get_compile_options
_FLAGS = [("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1)]


def _options(asked: str, *args: Any, **kwargs: Any) -> Any:
    made = _PLAIN(*args, **kwargs)
    if asked != AS_TEXT:
        made.env_option_overrides = [*made.env_option_overrides, *_FLAGS]
    if asked != OPTIMISED:
        made.executable_build_options.debug_options.xla_backend_optimization_level = 0
    return made


def stay_as(asked: str = "yes") -> None:
    """Compiles from now on as a value of the environment variable says: for a process of its own."""
    compiler.get_compile_options = functools.partial(_options, asked)


_mode = ""  # how the programs that JAX holds in this process were compiled: a value of the variable


def wanted(marker: Any) -> str:
    """The value of the environment variable for a module with this marker: "" without one."""
    if marker is None:
        return ""
    return next((name for name in (OPTIMISED, AS_TEXT) if marker.kwargs.get(name)), "yes")


@contextlib.contextmanager
def compiling(asked: str) -> Iterator[None]:
    """Compiles as a value of the environment variable says, here and in forks that are started meanwhile.

    Programs that were compiled otherwise are forgotten first, those compiled so stay: to trace and lower the little
    ones with which every command begins takes more than a second of CPU.
    """
    global _mode
    if asked != _mode:
        jax.clear_caches()
        _mode = asked
    if not asked:
        yield
        return
    stay_as(asked)
    os.environ[ASKED] = asked
    try:
        yield
    finally:
        compiler.get_compile_options = _PLAIN
        del os.environ[ASKED]
