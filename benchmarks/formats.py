"""Test AUC of a preset with each format of the dense part's products, three seeds each: a row of a table for each.

    python benchmarks/formats.py movietweetings
    python benchmarks/formats.py synthetic train.steps=2000 --seeds 0 1 2

CPUs do not round the factors of float32 products. Here they are rounded by hand to TensorFloat32's 10 bits of mantissa
where `compute_dtype=tensorfloat32` lets a GPU do so, to nearest, which is what a GPU does.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from recjax.cli.main import main as recjax
from recjax.models import dense, layers

FORMATS = ("float32", "tensorfloat32", "bfloat16")
_dot = dense._dot


def _rounded(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) if x.dtype == jnp.float32 else x


def _rounding_dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int, precision: Any) -> jax.Array:
    if precision == dense.Precision.HIGH:
        left, right = _rounded(left), _rounded(right)
    return _dot(left, right, left_axis, right_axis, precision)


class _Rounding:
    """Stands for jax.numpy in the layers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def einsum(self, how: str, *factors: jax.Array, precision: Any) -> jax.Array:
        """`jnp.einsum` of rounded factors."""
        if precision == dense.Precision.HIGH:
            factors = tuple(map(_rounded, factors))
        return jnp.einsum(how, *factors, precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    dense._dot = _rounding_dot
    layers.jnp = _Rounding()  # type: ignore[assignment, attr-defined]
    for of in FORMATS:
        found = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                settings = [f"compute_dtype={of}", f"seed={seed}", *options.overrides]
                if recjax(["train", options.preset, *settings, "--out", str(out)]):
                    sys.exit(f"{options.preset} {' '.join(settings)} failed")
                found.append(json.loads((out / "summary.json").read_text())["eval"]["auc"])
        each = ", ".join(f"{auc:.4f}" for auc in found)
        print(f"| {of} | {each}: {sum(found) / len(found):.5f} |", flush=True)


if __name__ == "__main__":
    main()
