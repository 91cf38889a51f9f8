"""Importing recjax is cheap, and starts nothing."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.full, pytest.mark.smoke]


def python(program: str) -> str:
    """What `program` prints in a fresh interpreter."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_costs_little_more_than_jax_and_flax() -> None:
    clock = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    seconds: dict[str, list[float]] = {"import jax, flax": [], "import recjax": []}
    # Taken in turn, best of several: a busy machine slows both.
    for _ in range(3):
        for statement, times in seconds.items():
            times.append(float(python(clock.format(statement))))
    assert min(seconds["import recjax"]) < 1.5 * min(seconds["import jax, flax"])


def test_import_pulls_in_nothing_heavy() -> None:
    loaded = set(python("import sys, recjax; print(*sys.modules)").split())
    heavy = {"tensorflow", "torch", "matplotlib", "orbax", "tensorflow_datasets", "grain"}
    assert "recjax" in loaded
    assert not loaded & heavy


def test_no_module_imports_tensorflow_torch_or_matplotlib_or_starts_a_backend() -> None:
    program = """
import importlib, pkgutil, sys
import recjax
for module in pkgutil.walk_packages(recjax.__path__, "recjax."):
    importlib.import_module(module.name)
print(*sys.modules)
import jax
jax.config.update("jax_num_cpu_devices", 3)  # JAX refuses this once a backend runs
assert len(jax.devices("cpu")) == 3
"""
    loaded = set(python(program).split())
    assert "recjax.data.batch" in loaded
    assert not loaded & {"tensorflow", "torch", "matplotlib"}
