"""Makes every in-process test run on eight CPU devices and under JAX's strictest rules.

This file is imported before any test module, so before anything can start the JAX backend.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Tests that need a GPU ask for it: JAX_PLATFORMS=cuda,cpu pytest -m gpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA sizes its thread pool by NPROC. With fewer threads than device programs in flight, JAX 0.10 deadlocks in
# collectives on small machines: twice the devices is safe. Tests that start processes hand it on.
os.environ["NPROC"] = str(max(16, int(os.environ.get("NPROC", "0"))))

import commands
import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("recjax", deadline=None)
hypothesis.settings.load_profile("recjax")

# Prepared data of the tests neither use nor fill the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="recjax-tests-")
os.environ["RECJAX_CACHE"] = _CACHE.name

jax.config.update("jax_num_cpu_devices", 8)
# No silent float32 -> float64, int -> float or [n] -> [1, n]. optax.adam and its kin rely on promotion: a test that
# calls them does so under `with jax.numpy_dtype_promotion("standard")`.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For modules that run whole commands: a program is compiled once, for this process and those that it starts."""
    options: dict[str, Any] = {"jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compiled")}
    options |= {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX looks only once whether there is one
        jax.devices()  # starts the backend with all devices, before a command with fewer can
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the small preset in commands.py."""
    return commands.write_preset(tmp_path_factory.mktemp("preset"))


@pytest.fixture(scope="module")
def clean(compiled_once: None, preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """summary.eval of the shortest run of that preset, in a folder where nothing ever went wrong."""
    out = tmp_path_factory.mktemp("clean") / "run"
    return commands.inside("train", preset, *commands.SMALL, "--out", out, "--json").result["eval"]


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small prepared data with nothing wrong; not to be changed."""
    return commands.prepare(tmp_path_factory.mktemp("good") / "data")


def pytest_unconfigure() -> None:
    """Removes the prepared data."""
    _CACHE.cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs special circumstances, unless the command line names its marker."""
    for marker, needs in (
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
