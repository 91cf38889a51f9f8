"""Makes every in-process test run on eight CPU devices and under JAX's strictest rules.

This file is imported before any test module, so before anything can start the JAX backend.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Tests that need a GPU ask for it: JAX_PLATFORMS=cuda,cpu pytest -m gpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA sizes its thread pool by NPROC. With fewer threads than device programs in flight, JAX 0.10 deadlocks in
# collectives on small machines: twice the devices is safe. Tests that start processes hand it on.
os.environ["NPROC"] = str(max(16, int(os.environ.get("NPROC", "0"))))

from support import compile_cache

os.environ.update(compile_cache.prepare())

import hypothesis
import jax
import pytest
from jax._src import cache_key, compilation_cache
from support import commands, light_compile, pictures
from support.few_programs import few
from support.shared_programs import shared
from support.tiers import (  # noqa: F401  # hooks
    pytest_addoption,
    pytest_collection_finish,
    pytest_configure,
    pytest_ignore_collect,
    pytest_itemcollected,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    slow_first,
)

import recjax

compile_cache.install(compilation_cache)
compile_cache.leave_out_devices(cache_key)
# Processes that tests start take this checkout, whatever is installed, and sitecustomize.py from here.
os.environ["PYTHONPATH"] = os.pathsep.join(
    (str(Path(recjax.__file__).parent.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
).rstrip(os.pathsep)

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("recjax", deadline=None)
hypothesis.settings.load_profile("recjax")

# Prepared data of the tests neither use nor fill the user's cache, and code that they run is not taken for the user's.
_CACHE = tempfile.TemporaryDirectory(prefix="recjax-tests-")
os.environ["RECJAX_CACHE"] = _CACHE.name
os.environ["XDG_STATE_HOME"] = f"{_CACHE.name}/state"

jax.config.update("jax_num_cpu_devices", 8)
# No silent float32 -> float64, int -> float or [n] -> [1, n]. optax.adam and its kin rely on promotion: a test that
# calls them does so under `with jax.numpy_dtype_promotion("standard")`.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
_WIDE = jax.config.read("jax_enable_x64")


@pytest.fixture(autouse=True)
def float32_again() -> Iterator[None]:
    """A command that computes in float64 switches all of the process to it: later tests begin as the first one did."""
    yield
    if jax.config.read("jax_enable_x64") != _WIDE:
        jax.config.update("jax_enable_x64", _WIDE)


@pytest.fixture(scope="session", autouse=True)
def pictures_once() -> None:
    """Draws the pictures of commands once. Test modules, imported before, keep the functions that draw."""
    pictures.keep()


@pytest.fixture(scope="module", autouse=True)
def light_compile_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles programs of a module that is marked so cheaply."""
    with light_compile.compiling(light_compile.wanted(request.node.get_closest_marker("light_compile"))):
        yield


@pytest.fixture(scope="module", autouse=True)
def few_programs_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives routing arrays room for all batches in a module that is marked so: each trainer compiles one step."""
    with few() if request.node.get_closest_marker("few_programs") else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_programs_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets commands of a module that is marked so share what JAX has traced."""
    with shared() if request.node.get_closest_marker("shared_programs") else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the small preset in commands.py."""
    return commands.write_preset(tmp_path_factory.mktemp("preset"))


@pytest.fixture(scope="module")
def clean(preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """summary.eval of the shortest run of that preset, in a folder where nothing ever went wrong."""
    out = tmp_path_factory.mktemp("clean") / "run"
    return commands.inside("train", preset, *commands.SMALL, "--out", out, "--json").result["eval"]


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small prepared data with nothing wrong; not to be changed."""
    return commands.prepare(tmp_path_factory.mktemp("good") / "data")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Turns the compile cache off for a test that is marked so, for this process and those that it starts."""
    if item.get_closest_marker("fresh_compile") is None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
        _use_cache(False)
        try:
            return (yield)
        finally:
            _use_cache(True)


def _use_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # JAX looks only once whether there is one


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the prepared data, and old programs."""
    _CACHE.cleanup()
    if not hasattr(config, "workerinput"):
        compile_cache.prune(compile_cache.top(), time.time())


@pytest.hookimpl(trylast=True)  # so that it sorts what is left to run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs special circumstances, unless its marker is named. Slow tests go first."""
    slow_first(items)
    for marker, needs in (
        ("aot", "pytest -m aot"),
        ("gpu", "JAX_PLATFORMS=cuda,cpu pytest -m gpu"),
        ("benchmark", "a quiet machine: pytest -m benchmark"),
        ("notebook", "pytest -m notebook"),
    ):
        if marker not in config.option.markexpr:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"needs {needs}"))


@pytest.fixture(params=["plain", "avx2", "avx512", "avx512_bf16", "avx512_amx"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels with one instruction set after the other."""
    import recjax_kernels

    best = recjax_kernels.instruction_set()
    if not recjax_kernels.use(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    recjax_kernels.use(best)
