"""`recjax bench --products`: the products of a model's dense layers by all who can compute them, into a table.

Every product is a program of its own, with the layer's bias, ReLU or mask. All are run by turns, in an order of each
round's own, so that a drift of the machine hits all alike; a time is the median over rounds of the middle run in each,
less what an empty program takes.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.models.dense import (
    PRODUCTS,
    LayerShape,
    Precision,
    Products,
    Way,
    forward_by,
    into_input_by,
    into_kernel_by,
    onednn_there,
)
from recjax.planning.product_table import Table, choose, read, this_machine, write
from recjax.train.build import build_trainer
from recjax.train.products import layer_shapes
from recjax.utils import log
from recjax.utils.paths import located
from recjax.utils.text import aligned

_LEAST_US = 0.1  # that a product takes: below, the clock says nothing
_ROUND_S = 0.05  # of a product in a round, if three runs of it do not take longer

Run = Callable[[], Any]


def measure(config: RunConfig, rounds: int, path: Path) -> dict[str, Any]:
    """Measures the products of a config's dense layers, adds them to the table in a file, and chooses by it.

    Returns:
      JSON values: "out", the file; "machine"; "layers", of this config: sizes, "us" and who was chosen for each
      product; "onednn", whether it takes XLA's place; "products", the choice in words.

    Raises:
      ConfigError: the mesh is not of CPUs; the layers are of float64; the file holds no table, or one of another
        machine.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; it must be at least 1.")
    earlier = read(path) if path.exists() else None
    trainer = build_trainer(config, weights=False)
    device = trainer.mesh.devices.flat[0]
    if device.platform != "cpu" or trainer.config.compute_dtype == "float64":
        raise ConfigError(
            "--products measures float32 and bfloat16 layers on CPUs, and here the mesh is of "
            f"{device.platform} devices and compute_dtype is {trainer.config.compute_dtype}. Elsewhere XLA alone "
            "computes them: there is nothing to choose."
        )
    machine = this_machine()
    if earlier is not None and earlier.machine != machine:
        raise ConfigError(f"--products {path} holds times of another machine ({earlier.machine}). Name another file.")
    layers = layer_shapes(trainer.model, trainer.config, trainer.mesh.devices.size)
    with jax.default_device(device):
        found = Table(machine, tuple(_times(list(dict.fromkeys(layers)), rounds).items()))
    table = found if earlier is None else earlier.joined(found)
    write(table, located(path))
    chosen = choose(found, layers, str(path))
    return {"out": str(path), "machine": machine, **_figures(found, chosen)}


def _figures(table: Table, chosen: Products) -> dict[str, Any]:
    layers = []
    for shape, us in table.layers:
        ways = chosen.of(shape)
        library = "onednn" if chosen.onednn else "xla"
        by = {product: "kernels" if getattr(ways, product) == "kernels" else library for product in PRODUCTS}
        sizes = dataclasses.asdict(shape)
        layers.append({**sizes, "us": us, "chosen": by})
    return {"layers": layers, "onednn": chosen.onednn, "products": chosen.in_words()}


def to_text(result: dict[str, Any]) -> str:
    """The times for people, and the choice."""
    who = list(result["layers"][0]["us"]["forward"])
    rows = [["layer", "product", *(f"{name}, us" for name in who), "chosen"]]
    for layer in result["layers"]:
        name = f"{layer['rows']} x {layer['terms']} x {layer['columns']} {layer['dtype']}"
        for product, us in layer["us"].items():
            rows.append([name, product, *(f"{us[one]:,.0f}" for one in who), layer["chosen"][product]])
            name = ""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    out = result["out"]
    last = f"dense products {result['products']}; wrote {out}: train.products={out}"
    return "\n".join([machine, "", *aligned(rows, left=(0, 1, len(who) + 2)), "", last])


def _times(layers: list[LayerShape], rounds: int) -> dict[LayerShape, dict[str, dict[str, float]]]:
    """The times of layers, us."""
    cases: dict[tuple[LayerShape, str, str], Run] = {}
    for number, layer in enumerate(layers):
        log.info(f"compiling layer {number + 1} of {len(layers)}")
        cases |= {(layer, product, who): run for product, who, run in _cases(layer)}
    empty = _compiled(lambda x: x + 1, None, jnp.ones(8))
    done: dict[tuple[LayerShape, str, str], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        log.info(f"round {number + 1} of {rounds}")
        order = list(cases)
        random.Random(number).shuffle(order)
        empty_s = _middle_s(empty)
        for case in order:
            done[case].append(_middle_s(cases[case]) - empty_s)
    found: dict[LayerShape, dict[str, dict[str, float]]] = {
        layer: {product: {} for product in PRODUCTS} for layer in layers
    }
    for (layer, product, who), seconds in done.items():
        found[layer][product][who] = round(max(float(np.median(seconds)) * 1e6, _LEAST_US), 2)
    return found


def _middle_s(run: Run) -> float:
    """The median of some runs, after one that does not count."""
    run()
    began = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < 3 or time.perf_counter() - began < _ROUND_S:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _cases(layer: LayerShape) -> Iterator[tuple[str, str, Run]]:
    """Product, who computes it, and a program that does, for everyone who can."""
    dtype, rng = jnp.dtype(layer.dtype), np.random.default_rng(0)

    def normal(*shape: int, of: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(of)

    x, grads = normal(layer.rows, layer.terms, of=dtype), normal(layer.rows, layer.columns, of=dtype)
    kernel, bias = normal(layer.terms, layer.columns), normal(layer.columns)
    y = jax.nn.relu(normal(layer.rows, layer.columns, of=dtype))
    precision = Precision.HIGHEST
    given: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
        "forward": (lambda way, x, w, b: forward_by(way, x, w, b, True, precision), (x, kernel, bias)),
        "into_input": (lambda way, w, y, dy: into_input_by(way, w, y, dy, precision), (kernel, y, grads)),
        "into_kernel": (lambda way, x, y, dy: into_kernel_by(way, x, y, dy, True, precision), (x, y, grads)),
    }
    who: dict[str, tuple[Way, dict[str, Any] | None]] = {"xla": ("xla", None)}
    if kernels.available(dtype):
        who["kernels"] = ("kernels", None)
    if onednn_there():
        who["onednn"] = ("xla", Products(onednn=True).compiler_options)
    for product, (function, operands) in given.items():
        for name, (way, compile_with) in who.items():
            yield product, name, _compiled(functools.partial(function, way), compile_with, *operands)


def _compiled(function: Callable[..., Any], compile_with: dict[str, Any] | None, *operands: jax.Array) -> Run:
    program = jax.jit(function, compiler_options=compile_with).lower(*operands).compile()
    return lambda: jax.block_until_ready(program(*operands))
