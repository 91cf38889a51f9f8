"""Builds the shared library. It needs a C++17 compiler and jax, whose headers it takes, and no Python headers."""

import jax.ffi
from setuptools import Extension, setup

# The library is loaded with ctypes. No -march=native: the library holds a variant for each instruction set, and picks
# one when it is loaded.
setup(
    ext_modules=[
        Extension(
            "recjax_kernels._kernels",
            sources=[f"src/{name}.cc" for name in ("handlers", "distinct", "table", "plain", "avx2", "avx512")],
            depends=[f"src/{name}" for name in ("kernels.h", "parallel.h", "variant.inc")],
            include_dirs=[jax.ffi.include_dir()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
        )
    ]
)
