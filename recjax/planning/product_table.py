"""Times of dense layers' products by all who can compute them, measured on one machine, and the choice by them.

A file is what `recjax bench PRESET --products FILE` writes: {"format", "version", "machine", "layers"}, a layer as
{"rows", "terms", "columns", "dtype", "us": {product: {who: microseconds}}}, where who is kernels, xla or onednn.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from recjax import kernels
from recjax.errors import ConfigError
from recjax.models.dense import PRODUCTS, LayerShape, Products, Way, Ways
from recjax.utils import processor, strict_json
from recjax.utils.files import write_json
from recjax.utils.paths import expanded

FORMAT, VERSION = "recjax products", 1
TIE = 0.05  # share by which a time must be the lesser one: below that it is noise, and XLA computes the product
FAR = 4.0  # ratio of a layer's sizes to those of the nearest measured one from which on a remark is made

Times = dict[str, dict[str, float]]  # product -> who -> us


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      machine: what the times depend on, as `this_machine` gives it.
      layers: sizes and times.
    """

    machine: dict[str, str]
    layers: tuple[tuple[LayerShape, Times], ...]

    def joined(self, newer: Table) -> Table:
        """Returns both tables' layers, the newer times where both have some."""
        return Table(newer.machine, tuple((dict(self.layers) | dict(newer.layers)).items()))

    def nearest(self, shape: LayerShape) -> tuple[LayerShape, Times] | None:
        """Returns the measured layer of that dtype whose sizes are nearest; None if there is none of that dtype."""
        alike = [one for one in self.layers if one[0].dtype == shape.dtype]
        return min(alike, key=lambda one: one[0].distance(shape)) if alike else None


def this_machine() -> dict[str, str]:
    """Returns what times of products depend on here: processor, its cores, JAX and the kernels."""
    return {
        "cpu": processor.processor() or "unknown",
        "cores": str(processor.cores()),
        "jax": jax.__version__,
        "kernels": kernels.variant(),
    }


def choose(table: Table, layers: Sequence[LayerShape], name: str) -> Products:
    """Returns who computes the products of a program with these layers, each by the nearest measured one.

    The kernels compute what they are faster at by more than `TIE`, and oneDNN takes XLA's place if the whole is faster
    by more than that. Layers of float64 are always XLA's.

    Args:
      table: of this machine.
      layers: one may be there several times.
      name: of the table's file, for messages.

    Raises:
      ConfigError: no layer of such a dtype was measured.
    """
    times: list[tuple[LayerShape, Times]] = []
    for layer in layers:
        if layer.dtype == "float64":
            continue
        if (found := table.nearest(layer)) is None:
            raise ConfigError(
                f"{name} has no times of {layer.dtype} layers. Measure them with the same settings as those of the "
                f"run, compute_dtype among them: recjax bench PRESET [settings] --products {name}"
            )
        times.append((layer, found[1]))
    plain, plain_us = _by(times, "xla")
    if all("onednn" in of for _, us in times for of in us.values()):
        other, other_us = _by(times, "onednn")
        if other_us < (1 - TIE) * plain_us:
            return Products(True, other)
    return Products(False, plain)


def _by(times: Sequence[tuple[LayerShape, Times]], library: str) -> tuple[tuple[tuple[LayerShape, Ways], ...], float]:
    """The choice where one library stands beside the kernels, and what all products then take, us."""
    chosen: dict[LayerShape, Ways] = {}
    total_us = 0.0
    for layer, us in times:
        ways: dict[str, Way] = {}
        for product in PRODUCTS:
            ours, theirs = us[product].get("kernels"), us[product][library]
            faster = ours is not None and ours < (1 - TIE) * theirs
            ways[product] = "kernels" if faster else "xla"
            total_us += ours if faster and ours is not None else theirs
        chosen[layer] = Ways(**ways)
    return tuple(chosen.items()), total_us


def far(table: Table, layers: Sequence[LayerShape]) -> list[LayerShape]:
    """Returns the layers of which a size and that of the nearest measured one are more than `FAR` times apart."""
    return [layer for layer in dict.fromkeys(layers) if (one := table.nearest(layer)) and one[0].furthest(layer) > FAR]


def read(path: Path | str) -> Table:
    """Reads a table.

    Raises:
      ConfigError: no such file, or it is no table; the paragraph says what is wrong.
    """
    return parse(strict_json_of(path), path)


def strict_json_of(path: Path | str) -> Any:
    """Returns the JSON value of a file of products.

    Raises:
      ConfigError: it cannot be read, or holds no JSON.
    """
    try:
        if expanded(path).exists() and not expanded(path).is_file():  # a pipe, say, that would be waited for for ever
            raise OSError(errno.EINVAL, "it is no regular file")
        return strict_json.parse(expanded(path).read_bytes())
    except (OSError, strict_json.JsonError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"products {path}: {why}. Measure a table on this machine: recjax bench PRESET --products FILE"
        ) from error


def parse(given: Any, path: Path | str) -> Table:
    """A table from its JSON value.

    Raises:
      ConfigError: as for `read`.
    """
    try:
        if given["format"] != FORMAT or given["version"] != VERSION:
            raise ValueError(f'"format" and "version" are not {FORMAT!r} and {VERSION}')
        layers = tuple((shape_of(layer), _times(layer["us"])) for layer in given["layers"])
        return Table({name: str(given["machine"][name]) for name in this_machine()}, layers)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path} is no table of products ({type(error).__name__}: {error}). Delete it and measure again: recjax "
            f"bench PRESET --products {path}"
        ) from error


def write(table: Table, path: Path) -> None:
    """Writes a table.

    Raises:
      TrainingError: no permission, no space.
    """
    layers = [{**dataclasses.asdict(shape), "us": us} for shape, us in table.layers]
    write_json(path, {"format": FORMAT, "version": VERSION, "machine": table.machine, "layers": layers})


def shape_of(given: Any) -> LayerShape:
    """The sizes of a layer from a JSON object that has them among others (KeyError, TypeError, ValueError)."""
    rows, terms, columns = (_count(given[size]) for size in ("rows", "terms", "columns"))
    return LayerShape(rows, terms, columns, str(given["dtype"]))


def _count(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{given!r} is no size of a layer")
    return given


def _times(given: Any) -> Times:
    found = {product: {who: float(us) for who, us in given[product].items()} for product in PRODUCTS}
    for product, of in found.items():
        if "xla" not in of or not all(0 < us < float("inf") for us in of.values()):
            raise ValueError(f"times of {product} are {of}")
    return found
