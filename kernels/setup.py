"""Builds the shared library. It needs a C++17 compiler and jax, whose headers it takes, and no Python headers."""

import glob

import jax.ffi
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = tuple("handlers dense distinct simulate table plain avx2 avx512 avx512_bf16 amx older_systems".split())


class AnyPython(build_ext):
    """Names the library as any Python finds it: it is loaded with ctypes, so that one serves them all."""

    def get_ext_filename(self, name: str) -> str:
        """Returns a library's path, without the name of this Python in it."""
        return name.replace(".", "/") + ".so"


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel py3-none-PLATFORM, for the same reason."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tags of Python, its binary interface, and the platform."""
        return "py3", "none", super().get_tag()[2]


# No -march=native: the library holds a variant for each instruction set, and picks one when it is loaded.
setup(
    cmdclass={"build_ext": AnyPython, "bdist_wheel": AnyPythonWheel},
    ext_modules=[
        Extension(
            "recjax_kernels._kernels",
            sources=[f"src/{name}.cc" for name in SOURCES],
            depends=glob.glob("src/*.h") + glob.glob("src/*.inc"),
            include_dirs=[jax.ffi.include_dir()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
        )
    ],
)
