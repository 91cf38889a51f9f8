"""Machine files: those of this package and of `recjax calibrate`, found, read, checked and written."""

from __future__ import annotations

import dataclasses
import errno
import importlib.resources
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.planning.machine import OVERHEADS, RATES, SIZES, HeldOut, Kernel, Machine, Point, Quantity
from recjax.settings.values import either
from recjax.utils import strict_json
from recjax.utils.files import write_json
from recjax.utils.paths import expanded
from recjax.utils.text import did_you_mean

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
