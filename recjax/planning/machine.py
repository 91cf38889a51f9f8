"""Machines: what one can do, measured by `recjax calibrate` or written by hand from data sheets.

A machine has rates (what the hardware does at most), overheads, and for each kernel class the times of some sizes or,
where nobody measured, how much of the rates it reaches. Every number that was not measured here names its source.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.resources
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.errors import ConfigError, DataError
from recjax.settings.values import either
from recjax.utils import strict_json
from recjax.utils.files import write_json
from recjax.utils.paths import expanded
from recjax.utils.text import did_you_mean

# What each kernel class is measured over. A name in a file may have a variant after a dot, as in "matmul.nn_f32".
SIZES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "batched_matmul": ("batch", "m", "n", "k"),
    "gather": ("rows", "row_bytes", "table_bytes"),
    "scatter": ("rows", "row_bytes", "table_bytes"),
    "sort": ("keys", "operands"),
    "reduce": ("bytes",),
    "elementwise": ("bytes",),
    "transcendental": ("elements",),
    "convert": ("elements",),
    "copy": ("bytes",),
    "reuse": ("bytes", "distance"),
    "all_reduce": ("bytes", "devices"),
    "all_to_all": ("bytes", "devices"),
    "all_gather": ("bytes", "devices"),
    "reduce_scatter": ("bytes", "devices"),
    "host_read": ("samples", "features", "ids"),
    "host_route": ("ids", "features", "devices"),
    "host_pack": ("ids", "features", "devices"),
    "host_place": ("bytes", "arrays", "devices"),
    "host_dispatch": ("arguments", "devices"),
    "host_lookup": ("ids",),
    "host_swap": ("rows", "row_bytes"),
    "device_swap": ("rows", "row_bytes"),
    "training": ("reference",),
}
COLLECTIVES = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
HOST = tuple(name for name in SIZES if name.startswith("host_") or name == "device_swap")

# name -> unit, and whether a machine may lack it
RATES: dict[str, tuple[str, bool]] = {
    "flops_f32": ("FLOP/s", False),
    "flops_tf32": ("FLOP/s", True),
    "flops_bf16": ("FLOP/s", True),
    "flops_f64": ("FLOP/s", True),
    "memory": ("B/s", False),
    "memory_size": ("B", False),
    "cache": ("B/s", True),
    "cache_size": ("B", True),
    "line_size": ("B", False),
    "matmul_tile": ("elements", True),
    "link": ("B/s", True),
    "link_latency": ("us", True),
    "host_link": ("B/s", True),
    "network": ("B/s", True),
    "network_latency": ("us", True),
    "host_devices": ("devices", True),
    "torus": ("dimensions", True),
    "disk_reads": ("1/s", True),
    "disk_write": ("B/s", True),
    "disk_writes": ("1/s", True),
}
# name -> unit, and whether a machine may lack it
OVERHEADS: dict[str, tuple[str, bool]] = {
    "kernel": ("us", False),
    "loop": ("us", False),
    "launch": ("us", True),
    "host_in_training": ("times", True),
    "kernels_in_training": ("times", True),
    "step_in_training": ("times", True),
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number with its unit, and where it comes from: a data sheet, or "measured"."""

    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True)
class Point:
    """A size of a kernel class and the time that it took.

    Attributes:
      sizes: as `SIZES` names them.
      us: from its start to its end, without the overhead of starting it.
      cores: CPU cores that it kept busy, 1 at least; of a host's stage, how many threads at it do as much as one alone.
    """

    sizes: dict[str, float]
    us: float
    cores: float = 1.0


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Errors of predictions from the points for sizes that are not among them.

    Attributes:
      points: how many sizes.
      ratio_mean: of max(predicted, measured) / min of both, the geometric mean.
      ratio_p50: the median.
      ratio_p90: the 90th percentile.
      gmae: exp(mean log |predicted / measured - 1|), as Lin et al. (arXiv:2201.07821) report it.
    """

    points: int
    ratio_mean: float
    ratio_p50: float
    ratio_p90: float
    gmae: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> HeldOut:
        """The error of predictions.

        Ratios are stricter than GMAE, the measure of Lin et al., a geometric mean of relative errors: that goes to 0
        with one lucky hit, and is the lesser number also otherwise.

        Args:
          pairs: (predicted, measured), one at least, all positive.
        """
        logs = np.abs(np.log([predicted / measured for predicted, measured in pairs]))
        relative = [max(abs(predicted / measured - 1), 1e-9) for predicted, measured in pairs]
        p50, p90 = np.percentile(np.exp(logs), [50, 90])
        gmae = math.exp(float(np.mean(np.log(relative))))
        return cls(len(pairs), float(np.exp(logs.mean())), float(p50), float(p90), gmae)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel class on a machine.

    Attributes:
      efficiency: share of the machine's rates that it reaches; used where no point says more.
      source: of the efficiency.
      points: measured sizes; () if none were.
      held_out: error of predictions from the points; None if none was measured.
      repeat: by how many times what half of the passes measured differs from what the other half did, the geometric
        mean over all sizes: what one size takes is known no better than that. None if it was not measured twice.
    """

    efficiency: float
    source: str
    points: tuple[Point, ...] = ()
    held_out: HeldOut | None = None
    repeat: float | None = None


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
      name: for people.
      measured: whether its numbers were measured on it.
      where: what it was measured on, or how the file came about: "cpu", "device", "versions", "date", "note".
      platform: "cpu", "gpu" or "tpu".
      cores: CPU cores of a host.
      shared: whether a host's devices compute on the cores of the host (CPU).
      streams: kernels that a device runs at a time, collectives apart.
      rates: see `RATES`; of one device, a link's in one direction. `link` joins the devices of a host, of which there
        are `host_devices`, and `network` hosts; on a machine with a `torus` links lead to neighbours alone.
        `disk_reads` and `disk_writes` are of 4 KiB, anywhere, and of a host's disk; `disk_write` is in order.
      overheads: see `OVERHEADS`; "launch" is a kernel's for the thread of the host that hands it to an accelerator, and
        those "in_training" are ratios, see `recjax.lab.predict.in_training`.
      kernels: name of a class, perhaps with a variant -> it. "training" has steps of whole trainings, see
        `recjax.lab.predict.in_training`.
    """

    name: str
    measured: bool
    where: dict[str, str]
    platform: str
    cores: int
    shared: bool
    streams: int
    rates: dict[str, Quantity]
    overheads: dict[str, Quantity]
    kernels: dict[str, Kernel]

    def rate(self, name: str, otherwise: float = math.inf) -> float:
        """A rate's number, or `otherwise` if the machine has none of that name."""
        found = self.rates.get(name)
        return otherwise if found is None else found.value

    def overhead(self, name: str, otherwise: float = 0.0) -> float:
        """An overhead's number, or `otherwise` if the machine has none of that name."""
        found = self.overheads.get(name)
        return otherwise if found is None else found.value

    def longer(self, devices: int) -> float:
        """Returns how many times as long as its work a step of a training takes.

        `step_in_training` is of one device, for whose step a core waits in vain. Of more devices than cores, each core
        has several: it waits when all of them do, as in the model of multiprogramming, in which n programs that wait a
        share p of their time leave a processor idle for p^n of it (Tanenbaum, Modern Operating Systems).

        Args:
          devices: that share the cores of a host; on other machines it does not matter.
        """
        alone = self.overhead("step_in_training", 1.0)
        of_a_core = max(1.0, devices / self.cores) if self.shared else 1.0
        return 1 / (1 - (1 - 1 / alone) ** of_a_core)

    def knows(self, name: str) -> bool:
        """Returns whether a class, or a wider variant of it, was measured."""
        kernel = self.kernel(name)
        return kernel is not None and bool(kernel.points)

    def kernel(self, name: str) -> Kernel | None:
        """The class of this name, or else one of a wider variant; None if the machine has none.

        Wider variants of "matmul.nn_f32" are "matmul.f32", and then "matmul".
        """
        base, _, variant = name.partition(".")
        while variant and f"{base}.{variant}" not in self.kernels:
            variant = variant.partition("_")[2]
        return self.kernels.get(f"{base}.{variant}" if variant else base)


FORMAT, VERSION = "recjax machine", 1
_WHERE = ("cpu", "device", "versions", "date", "note")
_MOST = 1e30  # of any number; whole numbers may be longer than a float holds


def shipped() -> dict[str, Path]:
    """Machines that nobody measured, by the name that --machine takes: files of this package."""
    folder = Path(str(importlib.resources.files("recjax.planning") / "machines"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def open_machine(name: str) -> Machine:
    """A machine by the path of its file or the name of one that is shipped.

    Raises:
      ConfigError: there is no such file.
      DataError: it is no machine file.
    """
    path = (known := shipped()).get(name) or expanded(name)
    try:
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "there is no such file")
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"machine {name}: {error.strerror or error}.{did_you_mean(name, known)} Measure this machine with "
            f"`recjax calibrate --out FILE`, or name one of those that are shipped: {either(list(known))}."
        ) from error
    return parse(content, path)


def write(machine: Machine, path: Path) -> None:
    """Writes a machine's file.

    Raises:
      TrainingError: the disk is full or refuses.
    """
    write_json(path, {"format": FORMAT, "version": VERSION} | _plain(machine))


def _plain(value: Any) -> Any:
    """JSON values of it; what is None in a kernel is left out."""
    found = dataclasses.asdict(value)
    for kernel in found["kernels"].values():
        for name in ("held_out", "repeat"):
            if kernel[name] is None:
                del kernel[name]
    return found


def parse(content: str | bytes, source: object) -> Machine:
    """A machine from the text of its file.

    Args:
      content: the text.
      source: the file's name, for messages.

    Raises:
      DataError: not JSON, of another format or version, a key too many or missing, or a value that cannot be; the
        message names it.
    """
    try:
        return _machine(strict_json.parse(content))
    except strict_json.JsonError as error:
        problem = str(error)
        source = error.at(source)
    except _Wrong as error:
        problem = str(error)
    raise DataError(
        f"{source}: {problem}. A machine file is what `recjax calibrate --out FILE` writes, or a copy of a shipped one "
        "with other numbers: correct it, or measure again."
    )


class _Wrong(Exception):
    """Fault of a value, with its place."""


def _machine(given: Any) -> Machine:
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise _Wrong(f'no machine file (its "format" is not "{FORMAT}")')
    if given.get("version") != VERSION:
        raise _Wrong(f'"version" is {given.get("version")!r}, and this recjax reads version {VERSION}')
    _keys(given, "", {"format", "version", *(field.name for field in dataclasses.fields(Machine))})
    where = _mapping(given["where"], "where", _text)
    if unknown := set(where) - set(_WHERE):
        raise _Wrong(f"where has {sorted(unknown)[0]!r}; it may have {', '.join(_WHERE)}")
    rates = _mapping(given["rates"], "rates", _quantity)
    overheads = _mapping(given["overheads"], "overheads", _quantity)
    needed = [
        f"{place}.{name}"
        for place, all_of, given_of in (("rates", RATES, rates), ("overheads", OVERHEADS, overheads))
        for name in _needed(given_of, place, all_of)
    ]
    if needed:
        raise _Wrong(f"{needed[0]} is missing")
    if given["platform"] not in ("cpu", "gpu", "tpu"):
        raise _Wrong(f"platform is {given['platform']!r}; it must be cpu, gpu or tpu")
    return Machine(
        _text(given["name"], "name"),
        _flag(given["measured"], "measured"),
        where,
        given["platform"],
        _whole(given["cores"], "cores"),
        _flag(given["shared"], "shared"),
        _whole(given["streams"], "streams"),
        rates,
        overheads,
        {name: _kernel(value, f"kernels.{name}", name) for name, value in _dict(given["kernels"], "kernels").items()},
    )


def _kernel(given: Any, place: str, name: str) -> Kernel:
    base = name.partition(".")[0]
    if base not in SIZES:
        raise _Wrong(f"{place}: there is no such class; there are {', '.join(SIZES)}")
    optional = {"held_out", "repeat"}
    _keys(given, place, {"efficiency", "source", "points"} | optional, optional)
    if not isinstance(given["points"], list):
        raise _Wrong(f"{place}.points is no list")
    points = tuple(_point(value, f"{place}.points[{i}]", base) for i, value in enumerate(given["points"]))
    held_out = _held_out(given["held_out"], f"{place}.held_out") if "held_out" in given else None
    repeat = _number(given["repeat"], f"{place}.repeat") if "repeat" in given else None
    efficiency = _number(given["efficiency"], f"{place}.efficiency")
    return Kernel(efficiency, _text(given["source"], f"{place}.source"), points, held_out, repeat)


def _point(given: Any, place: str, base: str) -> Point:
    _keys(given, place, {"sizes", "us", "cores"})
    _keys(given["sizes"], f"{place}.sizes", set(SIZES[base]))
    sizes = {name: _number(given["sizes"][name], f"{place}.sizes.{name}") for name in SIZES[base]}
    return Point(sizes, _number(given["us"], f"{place}.us"), _number(given["cores"], f"{place}.cores"))


def _held_out(given: Any, place: str) -> HeldOut:
    names = [field.name for field in dataclasses.fields(HeldOut)]
    _keys(given, place, set(names))
    numbers = {name: _number(given[name], f"{place}.{name}", zero=True) for name in names[1:]}
    return HeldOut(_whole(given["points"], f"{place}.points"), **numbers)


def _quantity(given: Any, place: str) -> Quantity:
    _keys(given, place, {"value", "unit", "source"})
    return Quantity(
        _number(given["value"], f"{place}.value"),
        _text(given["unit"], f"{place}.unit"),
        _text(given["source"], f"{place}.source"),
    )


def _needed(quantities: Mapping[str, Quantity], place: str, known: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Names that are missing among some quantities, whose units must be those of `known`."""
    for name, quantity in quantities.items():
        if name not in known:
            raise _Wrong(f"{place}.{name}: there is no such number; there are {', '.join(known)}")
        if quantity.unit == "times" and quantity.value < 1:
            raise _Wrong(f"{place}.{name}.value is {quantity.value:g}; a training takes at least 1 times as long")
        if quantity.unit != (unit := known[name][0]):
            raise _Wrong(f"{place}.{name}.unit is {quantity.unit!r}; write the number in {unit!r}")
    return [name for name, (_, optional) in known.items() if not optional and name not in quantities]


def _dict(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _Wrong(f"{place} is no object")
    return given


def _mapping(given: Any, place: str, read: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {name: read(value, f"{place}.{name}") for name, value in _dict(given, place).items()}


def _keys(given: Any, place: str, keys: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:
    before = f"{place}." if place else ""
    for name in sorted(keys - optional - set(_dict(given, place or "the file"))):
        raise _Wrong(f"{before}{name} is missing")
    for name in given:
        if name not in keys:
            raise _Wrong(f"{before}{name}: there is no such key; there are {', '.join(sorted(keys))}")


def _number(given: Any, place: str, zero: bool = False) -> float:
    fits = isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < _MOST
    if not fits or not (given or zero):
        raise _Wrong(f"{place} is {given!r}; it must be a number {'from' if zero else 'above'} 0")
    return float(given)


def _whole(given: Any, place: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise _Wrong(f"{place} is {given!r}; it must be a whole number from 1")
    return given


def _flag(given: Any, place: str) -> bool:
    if not isinstance(given, bool):
        raise _Wrong(f"{place} is {given!r}; it must be true or false")
    return given


def _text(given: Any, place: str) -> str:
    if not isinstance(given, str) or not given:
        raise _Wrong(f"{place} is {given!r}; it must be a text")
    return given
