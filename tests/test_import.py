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


def test_import_loads_little_of_the_standard_library_and_nothing_else() -> None:
    loaded = python("import sys; before = set(sys.modules); import recjax; print(*set(sys.modules) - before)").split()
    assert "recjax" in loaded
    assert {name.partition(".")[0] for name in loaded} <= {"recjax", *sys.stdlib_module_names}
    assert len(loaded) < 100  # 9 on Python 3.11, 35 on 3.12; JAX and Flax are 800


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


def test_a_training_starts_without_scipy() -> None:
    """A quarter of a second of each start; what fits costs and draws laws takes it when it does so."""
    loaded = set(python("import sys, recjax.main; print(*sys.modules)").split())
    assert "recjax.train.loop" in loaded
    assert not loaded & {"scipy.optimize", "scipy.special", "scipy.linalg"}
