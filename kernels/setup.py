"""Builds the shared library. It needs a C++17 compiler and jax, whose headers it takes, and no Python headers."""

import glob

import jax.ffi
from setuptools import Extension, setup

SOURCES = ("handlers", "dense", "distinct", "table", "plain", "avx2", "avx512", "avx512_bf16", "amx")

# The library is loaded with ctypes. No -march=native: the library holds a variant for each instruction set, and picks
# one when it is loaded.
setup(
    ext_modules=[
        Extension(
            "recjax_kernels._kernels",
            sources=[f"src/{name}.cc" for name in SOURCES],
            depends=glob.glob("src/*.h") + glob.glob("src/*.inc"),
            include_dirs=[jax.ffi.include_dir()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
        )
    ]
)
