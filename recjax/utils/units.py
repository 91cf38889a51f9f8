"""Quantities with units as people write them: 50GiB/s, 100Gb/s, 500ns, 1MiB."""

from __future__ import annotations

import re

from recjax.errors import ConfigError

_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {f"{p}B": float(f) for p, f in _PREFIXES.items()} | {"": 1.0}
_RATES = {f"{p}{unit}/s": f / bits for p, f in _PREFIXES.items() for unit, bits in (("B", 1), ("b", 8))}
_RATES |= {f"{p}bps": f / 8 for p, f in _PREFIXES.items()}
_TIMES = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "": 1.0}

_QUANTITY = re.compile(r"\s*+((?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?)\s*+([^0-9\s]*+)\s*+")


def read_bytes(text: str, name: str = "--bytes") -> float:
    """Bytes: a number alone, or with B, kB, MB, GB (powers of 1000), KiB, MiB, GiB (powers of 1024)."""
    return _read(text, _SIZES, name, "1048576, 1MiB or 4MB")


def read_whole_bytes(text: str, name: str) -> int:
    """The same as a whole number of bytes from 1 on: 64kB and 1.5MiB, not 0.5."""
    size = read_bytes(text, name)
    if size < 1 or size != int(size):
        raise ConfigError(f"{name} {text}: that is {size:g} bytes; give a whole number from 1 on, such as 64KiB.")
    return int(size)


def read_rate(text: str, name: str = "--bandwidth") -> float:
    """Bytes a second: GiB/s is 2^30 bytes, GB/s 10^9 bytes, Gb/s 10^9 bits, and so on. Never zero."""
    rate = _read(text, _RATES, name, "50GiB/s, 12.5GB/s or 100Gb/s")
    if not rate:
        raise ConfigError(f"{name} {text}: nothing would ever arrive. Give a bandwidth above 0.")
    return rate


def read_time(text: str, name: str = "--latency") -> float:
    """Nanoseconds: with ns, us, ms or s; 0 needs no unit."""
    found = _read(text, _TIMES, name, "500ns or 0.5us")
    if found and text.strip()[-1:] != "s":
        raise ConfigError(f"{name} {text!r} has no unit. Write {text.strip()}ns, {text.strip()}us or {text.strip()}ms.")
    return found


def _read(text: str, units: dict[str, float], name: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if not match or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ConfigError(f"{name} {text!r} is no quantity here. Write for example {example}; units: {known}.")
    return float(match[1]) * units[match[2]]


def time_text(time_ns: float) -> str:
    """A duration for people: "41.3 us"."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= factor:
            return f"{time_ns / factor:,.2f} {unit}"
    return f"{time_ns:,.0f} ns"


def size_text(size_bytes: float) -> str:
    """A size for people: "2.0 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes:,.0f} B"


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that cross each rank's link for each byte of a message of this kind; 0 for one rank, and for a barrier."""
    if ranks < 2 or kind == "barrier":
        return 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_to_all", "all_gather", "reduce_scatter", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0
