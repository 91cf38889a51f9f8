"""Plays a workload with times of collectives that were measured: `recjax replay --sweep` in place of a network.

A sweep has, for each kind of collective and size of message, `last_us`: the time of the rank that came last, which so
waited for none. That is what a collective takes once all of its ranks are there; how long the others wait for the last
one follows from the workload, and is simulated. A size between two that were measured takes a time between theirs,
linear in the logarithms of both; one below the least takes as long as that; one above the largest is refused. (The
sweep's fit of a latency and a rate is not used: it is off by far more than neighbouring points are.)

A rank does one collective at a time, in the order of the workload, as on a communicator, and computes beside it.
Several arrays in one all-reduce go one after the other where the sweep is of CPU devices, for XLA reduces each by
itself there, and as one message elsewhere, where NCCL groups them. All groups of a collective go at a time without
hindering each other.

That is what a collective costs at best: its ranks came together, awake, with the data in their caches. In training they
come from computing, one after the other, and those that waited sleep. So the sweep also measures collectives before
which ranks compute: by how much such a one takes longer follows from how unevenly its ranks come, which is simulated,
and what a further array of the same all-reduce takes. On host devices that makes most of the time of a small message
(tests/benchmarks/calibration.py has figures); what the host does beside the steps is not in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax import strict_json
from recjax.errors import ConfigError, DataError
from recjax.simulate.system import Played
from recjax.simulate.units import size_text
from recjax.simulate.workload import Operation, Workload

_EVEN_NS = 1e3  # a skew that costs nothing; ranks that wait for nothing else start a few us after each other


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep measured.

    Attributes:
      source: its file, for messages.
      ranks: of each collective.
      by_array: whether the arrays of an all-reduce go one after the other.
      points: kind -> (bytes, ns), ascending, of a message as nccl-tests count it: the larger one of a rank's buffers.
      uneven: kind -> (bytes, skew in ns, ns) where ranks come unevenly: the last one `skew` after the first.
      further: kind -> (bytes, ns), ascending, of a further array in the same collective.
    """

    source: str
    ranks: int
    by_array: bool
    points: dict[str, tuple[tuple[float, float], ...]]
    uneven: dict[str, tuple[tuple[float, float, float], ...]]
    further: dict[str, tuple[tuple[float, float], ...]]

    def time_ns(self, operation: Operation, skew_ns: float = 0.0) -> float:
        """From the moment when the last rank is there, `skew_ns` after the first, until a collective is done.

        Raises:
          ConfigError: its kind or a size as large as its was not measured.
        """
        sizes = operation.parts if self.by_array and operation.parts else (operation.bytes,)
        more_ns = self._waking_ns(operation.collective, sizes[0], skew_ns)  # for the others it is even
        more_ns += sum(self._fetching_ns(operation.collective, size) for size in sizes[1:])
        return more_ns + sum(self._time_ns(operation, size) for size in sizes)

    def _even_ns(self, kind: str, size_bytes: float) -> float:
        bytes_P, ns_P = np.log(np.array(self.points[kind])).T
        return math.exp(np.interp(math.log(max(size_bytes, 1.0)), bytes_P, ns_P))

    def _fetching_ns(self, kind: str, size_bytes: float) -> float:
        """How much longer a further array takes than one alone that was just written, for it lies in no near cache."""
        if not self.further.get(kind):
            return 0.0
        more = [(math.log(size), max(0.0, ns - self._even_ns(kind, size))) for size, ns in self.further[kind]]
        return float(np.interp(math.log(max(size_bytes, 1.0)), *np.array(more).T))

    def _waking_ns(self, kind: str, size_bytes: float, skew_ns: float) -> float:
        """How much longer it takes where ranks come unevenly: those that waited must be woken."""
        by_size: dict[float, list[tuple[float, float]]] = {}
        for of_bytes, of_skew_ns, ns in self.uneven.get(kind, ()):
            more_ns = max(0.0, ns - self._even_ns(kind, of_bytes))
            by_size.setdefault(of_bytes, []).append((math.log(of_skew_ns), more_ns))
        if not by_size:
            return 0.0
        more = []
        for found in by_size.values():
            log_skew, ns_more = np.array(sorted([(math.log(_EVEN_NS), 0.0), *found])).T
            more.append(np.interp(math.log(max(skew_ns, 1.0)), log_skew, ns_more))
        return float(np.interp(math.log(max(size_bytes, 1.0)), np.log(list(by_size)), more))

    def _time_ns(self, operation: Operation, size_bytes: float) -> float:
        kind = operation.collective
        if kind not in self.points:
            raise ConfigError(
                f"{self.source} has no {kind}, and {operation.name!r} is one. Measure all kinds: "
                f"{_command(self.ranks)}."
            )
        largest = self.points[kind][-1][0]
        if size_bytes > largest * (1 + 1e-9):
            raise ConfigError(
                f"{self.source} ends at {size_text(largest)} for {kind}, and {operation.name!r} has "
                f"{size_text(size_bytes)}. Measure larger ones: {_command(self.ranks)} --max SIZE."
            )
        return self._even_ns(kind, size_bytes)


def _command(ranks: int | str) -> str:
    return f"recjax replay --sweep --devices {ranks} --out sweep.json"


def read_sweep(path: Path) -> Sweep:
    """A sweep from its file.

    Raises:
      ConfigError: there is no such file.
      DataError: it is no sweep, or one without points.
    """
    try:
        return _sweep(str(path), strict_json.parse(path.read_bytes()))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--calibration {path}: {reason}. Measure one: {_command('N')}.") from error
    except strict_json.JsonError as error:
        raise DataError(f"{error.at(path)}: {error}. Give what `recjax replay --sweep --out` wrote.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is not what `recjax replay --sweep --out` writes ({type(error).__name__}: {error})."
        ) from None


def _sweep(source: str, given: Any) -> Sweep:
    points: dict[str, tuple[tuple[float, float], ...]] = {}
    uneven: dict[str, tuple[tuple[float, float, float], ...]] = {}
    further: dict[str, tuple[tuple[float, float], ...]] = {}
    for kind, of_kind in given["collectives"].items():
        found: dict[float, list[float]] = {}
        for point in of_kind["points"]:
            size, us = float(point["bytes"]), float(point["last_us"])
            if not (0 < size < math.inf and 0 < us < math.inf):
                raise ValueError(f"{kind} of {size} bytes in {us} us")
            found.setdefault(size, []).append(us * 1e3)
        if found:  # sizes that were rounded to the same stand there several times
            points[kind] = tuple((size, float(np.mean(ns))) for size, ns in sorted(found.items()))
            uneven[kind], further[kind] = _uneven(kind, of_kind.get("uneven", ()))  # older sweeps have none
    if not points or given["devices"] < 2:
        raise ValueError("nothing was measured")
    return Sweep(source, int(given["devices"]), str(given["device"]).lower() == "cpu", points, uneven, further)


def _uneven(
    kind: str, given: Sequence[Any]
) -> tuple[tuple[tuple[float, float, float], ...], tuple[tuple[float, float], ...]]:
    """`Sweep.uneven` and `Sweep.further` of a kind."""
    alone: dict[tuple[float, float], float] = {}  # (bytes, bytes passed over before) -> ns
    of_skew, several = [], []
    for point in given:
        size, passed, skew_us, us = (float(point[name]) for name in ("bytes", "between_bytes", "skew_us", "last_us"))
        arrays = int(point["arrays"])
        if not (0 < size < math.inf and 0 <= skew_us < math.inf and 0 < us < math.inf and arrays > 0):
            raise ValueError(f"{kind} of {size} bytes in {us} us after {skew_us} us")
        if arrays > 1:
            several.append((size / arrays, passed, arrays, us * 1e3))
            continue
        alone[size, passed] = us * 1e3
        of_skew.append((size, max(skew_us * 1e3, 1.0), us * 1e3))
    further = {size: (ns - alone[size, passed]) / (arrays - 1) for size, passed, arrays, ns in several}
    return tuple(sorted(of_skew)), tuple(sorted(further.items()))


def play(workload: Workload, sweeps: Sequence[Sweep]) -> Played:
    """Plays a workload.

    In the order of the operations, each after all that it depends on, every rank has one stream of computations and one
    of collectives, so one pass over them gives all times.

    Args:
      workload: of a trace.
      sweeps: one for each number of ranks that its collectives have.

    Raises:
      ConfigError: a collective that no sweep has measured, or two sweeps of as many ranks.
    """
    ranks = workload.ranks or 0
    by_ranks = {sweep.ranks: sweep for sweep in sweeps}
    if len(by_ranks) < len(sweeps):
        raise ConfigError("--calibration names two sweeps of as many ranks. Give one for each number of ranks.")
    operations = workload.operations
    places = {operation.name: i for i, operation in enumerate(operations)}
    ready, started, finished, waited = (np.zeros((len(operations), ranks)) for _ in range(4))
    computed, communicated = np.zeros(ranks), np.zeros(ranks)  # until when each rank's streams are taken
    everyone = np.arange(ranks)
    for i, operation in enumerate(operations):
        needs = [places[name] for name in operation.depends_on]
        ready[i] = finished[needs].max(axis=0, initial=0)
        started[i] = finished[i] = ready[i]
        members = np.array(operation.ranks).ravel() if operation.ranks else everyone
        if operation.kind == "compute":
            started[i, members] = np.maximum(ready[i], computed)[members]
            if needs:
                last = np.array(needs)[finished[needs].argmax(axis=0)]
                waited[last[members], members] += (started[i] - computed)[members]
            computed[members] = finished[i, members] = (started[i] + operation.duration_ns)[members]
            continue
        started[i, members] = np.maximum(ready[i], communicated)[members]
        for group in operation.ranks or (tuple(range(ranks)),):
            came = started[i, group]
            finished[i, group] = came.max() + _measured_ns(operation, len(group), float(np.ptp(came)), by_ranks)
        communicated[members] = finished[i, members]
    end = finished.max(axis=0, initial=0)
    for rank in np.flatnonzero(end > computed) if operations else ():
        waited[finished[:, rank].argmax(), rank] += end[rank] - computed[rank]
    return Played(workload, float(end.max(initial=0)), ready, started, finished, waited)


def _measured_ns(operation: Operation, ranks: int, skew_ns: float, sweeps: dict[int, Sweep]) -> float:
    if ranks < 2:
        return 0.0
    if ranks not in sweeps:
        had = ", ".join(f"{sweep.source} {sweep.ranks}" for sweep in sweeps.values())
        raise ConfigError(
            f"{operation.name!r} ({operation.collective}) is of {ranks} ranks, and the calibration of another number "
            f"({had}). Measure as many: {_command(ranks)}."
        )
    return sweeps[ranks].time_ns(operation, skew_ns)
