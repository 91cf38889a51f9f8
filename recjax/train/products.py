"""Choice of those who compute the products of a run's dense layers, as `train.products` says or by a measured table.

    RUN/products.json    what was chosen by a table: a run goes on with that, and is evaluated with it

Process 0 chooses for all.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast, get_args

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from recjax import kernels
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.models.dense import PRODUCTS, LayerShape, Products, Way, Ways, onednn_there
from recjax.models.layers import Linear
from recjax.parallel import distributed
from recjax.planning import product_table
from recjax.utils.files import write_json

CHOICES = ("auto", "kernels", "xla", "onednn")  # of `train.products`, but for a file's path
FILE = "products.json"  # in a run folder
FORMAT, VERSION = "recjax chosen products", 1


def is_file(choice: str) -> bool:
    """Returns whether `train.products` is the path of a table."""
    return choice not in CHOICES


def set_products(model: nnx.Module, config: RunConfig, mesh: Mesh) -> Products | None:
    """Sets who computes the products of a model's dense layers, and returns that; None: who usually does.

    Raises:
      ConfigError: `train.products` asks for what is not to be had here, or names a table that is none, of another
        machine, or without times of such layers.
    """
    products = _chosen(config, model, mesh)
    for _, module in nnx.iter_graph(model) if products is not None else ():
        if isinstance(module, Linear):
            module.products = products
    return products


def layer_shapes(model: nnx.Module, config: RunConfig, devices: int) -> list[LayerShape]:
    """Returns the sizes of a model's dense layers in a training step on so many devices, in the order of the layers."""
    rows = math.ceil(math.ceil(config.train.batch_size / devices) / config.train.accumulate)
    layers = [module for _, module in nnx.iter_graph(model) if isinstance(module, Linear)]
    found = []
    for layer in layers:
        terms, columns = layer.kernel.shape
        found.append(LayerShape(rows, terms, columns, jnp.dtype(layer.dtype).name))
    return found


def _chosen(config: RunConfig, model: nnx.Module, mesh: Mesh) -> Products | None:
    choice, platform = config.train.products, mesh.devices.flat[0].platform
    if choice == "auto" or (choice == "xla" and platform != "cpu"):
        return None
    if platform != "cpu":
        if _recorded(choice):
            return None
        raise ConfigError(
            f"train.products={choice} is for CPUs, and the mesh is of {platform} devices. Leave it at auto there."
        )
    if choice == "kernels":
        if not kernels.installed() or config.compute_dtype == "float64":
            why = "are for float32 and bfloat16" if kernels.installed() else "are not installed, or off"
            raise ConfigError(
                f"train.products=kernels, but the kernels {why}. Install them (`pip install ./kernels` in recjax's "
                "folder), or leave train.products at auto: then they are taken where they can be."
            )
        return None
    if choice == "onednn" and not onednn_there():
        raise ConfigError(
            "train.products=onednn, but the JAX at hand does not call oneDNN for a product, or not on this processor: "
            "JAX 0.12 does on x86-64. Leave train.products at auto."
        )
    if choice in CHOICES:
        return Products(choice == "onednn")
    return _by_main(config, model, mesh)


def _by_main(config: RunConfig, model: nnx.Module, mesh: Mesh) -> Products:
    """The choice of process 0 by its table, or by what it had chosen before."""
    answer: dict[str, Any] = {}
    if distributed.is_main():
        try:
            answer = _to_json(_by_file(config, model, mesh))
        except ConfigError as error:  # all processes end with the same paragraph
            answer = {"refused": str(error)}
    answer = json.loads(distributed.from_main("products", json.dumps(answer)))
    if "refused" in answer:
        raise ConfigError(answer["refused"]).in_all()
    return _from_json(answer)


def _by_file(config: RunConfig, model: nnx.Module, mesh: Mesh) -> Products:
    choice = config.train.products
    given = _read(choice)
    here = product_table.this_machine()
    if isinstance(given, dict) and given.get("format") == FORMAT:
        recorded, products = _parse(given, choice)
        if other := _differing(recorded, here):
            distributed.note(
                f"{choice} was chosen on another machine ({other}): the run keeps to it as far as this one can, but "
                "numbers may differ in their last bits"
            )
        return products if not products.onednn or onednn_there() else dataclasses.replace(products, onednn=False)
    table = product_table.parse(given, choice)
    if other := _differing(table.machine, here):
        raise ConfigError(
            f"train.products={choice} was measured on another machine ({other}). Measure on this one (recjax bench "
            "PRESET --products FILE), or leave train.products at auto."
        )
    layers = layer_shapes(model, config, mesh.devices.size)
    for layer in product_table.far(table, layers)[:1]:
        distributed.note(
            f"{choice} has no times of layers like {layer.rows} x {layer.terms} x {layer.columns}: the nearest one "
            f"decides. To measure all of this model: recjax bench PRESET --products {choice}"
        )
    return product_table.choose(table, layers, choice)


def _read(choice: str) -> Any:
    try:
        return product_table.strict_json_of(choice)
    except ConfigError as error:
        raise ConfigError(f"train.products is none of {', '.join(CHOICES)}, but a file: {error}") from error


def _recorded(choice: str) -> bool:
    """Returns whether it is the path of what a run has chosen."""
    given = _read(choice) if is_file(choice) else None
    return isinstance(given, dict) and given.get("format") == FORMAT


def _differing(there: dict[str, str], here: dict[str, str]) -> str:
    return "; ".join(f"{name}: {there[name]} there, {here[name]} here" for name in here if there[name] != here[name])


def record_products(run: Path, choice: str, products: Products | None) -> None:
    """Writes what was chosen by a table into a run folder.

    Args:
      run: the folder.
      choice: `train.products`; nothing is written unless it is the path of a table.
      products: of the trainer.

    Raises:
      TrainingError: no permission, no space.
    """
    if products is not None and is_file(choice):
        about = {"format": FORMAT, "version": VERSION, "asked": choice, "machine": product_table.this_machine()}
        write_json(run / FILE, about | _to_json(products))


def with_recorded_products(config: RunConfig, run: Path) -> RunConfig:
    """A config with what a begun run has chosen by the same `train.products`, in place of the table's path.

    Raises:
      ConfigError: what the run folder says is damaged.
    """
    asked, file = config.train.products, run / FILE
    begun = any((run / "checkpoints").glob("[0-9]*"))  # else it may have been chosen for another config
    if not is_file(asked) or not begun or not file.is_file():
        return config
    given = _read(str(file))
    _parse(given, file)
    if given.get("asked") != asked:
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, products=str(file)))


def in_words(products: Products | None, mesh: Mesh) -> str:
    """A phrase for people: who computes the products of dense layers."""
    if products is not None:
        return products.in_words()
    return "kernels" if mesh.devices.flat[0].platform == "cpu" and kernels.variant() != "none" else "XLA"


def _to_json(products: Products) -> dict[str, Any]:
    layers = [{**dataclasses.asdict(shape), **dataclasses.asdict(ways)} for shape, ways in products.layers]
    return {"onednn": products.onednn, "layers": layers}


def _from_json(given: dict[str, Any]) -> Products:
    """The choice (KeyError, TypeError, ValueError: it is none)."""
    layers = []
    for layer in given["layers"]:
        ways = {product: layer[product] for product in PRODUCTS}
        if not all(way in get_args(Way) for way in ways.values()):
            raise ValueError(f"who computes is {ways}")
        layers.append((product_table.shape_of(layer), Ways(**cast("dict[str, Way]", ways))))
    return Products(bool(given["onednn"]), tuple(layers))


def _parse(given: Any, path: Path | str) -> tuple[dict[str, str], Products]:
    """The machine that was chosen on, and the choice."""
    try:
        if given["format"] != FORMAT or given["version"] != VERSION:
            raise ValueError(f'"format" and "version" are not {FORMAT!r} and {VERSION}')
        machine = {name: str(given["machine"][name]) for name in product_table.this_machine()}
        return machine, _from_json(given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}). Delete it: the run then chooses again, by "
            "train.products."
        ) from error
