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
which ranks compute: how much longer such a one takes follows from how unevenly its ranks come, which is simulated, and
so does what a further array of the same all-reduce takes. A third kind is also followed by computing: a rank that is
woken then queues after the one that woke it until that one waits itself, so it is done later, and comes later to what
is next. On host devices all this makes most of the time of a small message (benchmarks/calibration.py has
figures); what the host does beside the steps is not in it, nor is a collective beside which its own ranks compute.
"""

from __future__ import annotations

import dataclasses
import errno
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.errors import ConfigError, DataError
from recjax.lab.simulate.stalls import Stall, shared
from recjax.lab.simulate.system import Played
from recjax.lab.simulate.workload import Operation, Workload
from recjax.utils import strict_json
from recjax.utils.units import size_text

_MOST = 2_000  # points of a kind; each that is followed by computing is compared with all uneven ones
_EVEN_NS = 1e3  # a skew that costs nothing; ranks that wait for nothing else start a few us after each other


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Measurements of a sweep.

    Attributes:
      source: its file, for messages.
      ranks: of each collective.
      by_array: whether the arrays of an all-reduce go one after the other.
      points: kind -> (bytes, ns, ns), ascending: a message as nccl-tests count it, the larger one of a rank's buffers;
        the time of the rank that came last; and how much later the others are done.
      uneven: kind -> (bytes, skew in ns, ns, ns) where ranks come unevenly, the last one `skew` after the first: how
        much longer the last one takes, and how much later the others are done, than where they come together.
      followed: kind -> (bytes, ns, share, ns): where ranks compute next, how much longer the last one takes; for what
        share of that computing the others are later still; and for how long they computed when that was measured.
      further: kind -> (bytes, skew in ns, ns) of a further array in the same collective.
    """

    source: str
    ranks: int
    by_array: bool
    points: dict[str, tuple[tuple[float, float, float], ...]]
    uneven: dict[str, tuple[tuple[float, float, float, float], ...]]
    followed: dict[str, tuple[tuple[float, float, float, float], ...]]
    further: dict[str, tuple[tuple[float, float, float], ...]]

    def time_ns(self, operation: Operation, skew_ns: float = 0.0, next_ns: float = 0.0) -> tuple[float, float]:
        """From the moment when the last rank is there until it is done, and until the others are.

        Args:
          operation: the collective.
          skew_ns: how long before the last rank the first one came.
          next_ns: how long they compute before the next collective.

        Raises:
          ConfigError: its kind or a size as large as its was not measured.
        """
        kind = operation.collective
        sizes = operation.parts if self.by_array and operation.parts else (operation.bytes,)
        for size in sizes:
            self._require(operation, size)
        even_ns, behind_ns = self._even(kind, sizes[0])
        longer_ns, uneven_behind_ns = self._uneven(kind, sizes[0], skew_ns)
        last_ns = even_ns + longer_ns + sum(self._further_ns(kind, size, skew_ns) for size in sizes[1:])
        if self.followed.get(kind):
            at, (bytes_P, *more_3xP) = math.log(max(sizes[-1], 1.0)), np.array(self.followed[kind]).T
            followed_ns, share, most_ns = (float(np.interp(at, np.log(bytes_P), more_P)) for more_P in more_3xP)
            last_ns += min(next_ns, followed_ns)
            behind_ns += min(next_ns, most_ns) * share
        # after the first array all are awake
        return last_ns, last_ns + behind_ns + (uneven_behind_ns if len(sizes) == 1 else 0.0)

    def _even(self, kind: str, size_bytes: float) -> tuple[float, float]:
        """The time of the rank that came last, and how much later the others are done, where all come together."""
        bytes_P, ns_P, behind_P = np.array(self.points[kind]).T
        at, log_P = math.log(max(size_bytes, 1.0)), np.log(bytes_P)
        return math.exp(np.interp(at, log_P, np.log(ns_P))), float(np.interp(at, log_P, behind_P))

    def _further_ns(self, kind: str, size_bytes: float, skew_ns: float) -> float:
        """A further array: less than one alone, for all ranks are there; more, where uneven ones got in a muddle."""
        even_ns, _ = self._even(kind, size_bytes)
        ratios = [
            (size, of_skew_ns, math.log(ns / self._even(kind, size)[0]))
            for size, of_skew_ns, ns in self.further.get(kind, ())
        ]
        return even_ns * math.exp(_between(ratios, size_bytes, skew_ns)) if ratios else even_ns

    def _uneven(self, kind: str, size_bytes: float, skew_ns: float) -> tuple[float, float]:
        """Extra time of both where ranks come unevenly: those that waited must be woken."""
        more: tuple[list[tuple[float, float, float]], ...] = ([], [])
        for of_bytes, of_skew_ns, *both_ns in self.uneven.get(kind, ()):
            for found, ns in zip(more, both_ns, strict=True):
                found += [(of_bytes, _EVEN_NS, 0.0), (of_bytes, of_skew_ns, ns)]
        longer_ns, behind_ns = (_between(found, size_bytes, skew_ns) if found else 0.0 for found in more)
        return longer_ns, behind_ns

    def _require(self, operation: Operation, size_bytes: float) -> None:
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


def _between(points: Sequence[tuple[float, float, float]], size_bytes: float, skew_ns: float) -> float:
    """Value at a size and skew from points (bytes, skew ns, value), linear in the logarithms of both between points."""
    by_size: dict[float, dict[float, float]] = {}
    for of_bytes, of_skew_ns, value in points:
        by_size.setdefault(of_bytes, {})[math.log(of_skew_ns)] = value
    at_skew = [np.interp(math.log(max(skew_ns, 1.0)), *np.array(sorted(v.items())).T) for v in by_size.values()]
    log_sizes, values = np.array(sorted(zip(np.log(list(by_size)), at_skew, strict=True))).T
    return float(np.interp(math.log(max(size_bytes, 1.0)), log_sizes, values))


def _command(ranks: int | str) -> str:
    return f"recjax replay --sweep --devices {ranks} --out sweep.json"


def read_sweep(path: Path) -> Sweep:
    """A sweep from its file.

    Raises:
      ConfigError: there is no such file.
      DataError: it is no sweep, or one without points.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe, say, that would be waited for for ever
            raise OSError(errno.EINVAL, "it is no regular file")
        return _sweep(str(path), strict_json.parse(path.read_bytes()))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--calibration {path}: {reason}. Measure one: {_command('N')}.") from error
    except strict_json.JsonError as error:
        raise DataError(f"{error.at(path)}: {error}. Give what `recjax replay --sweep --out` wrote.") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path} is not what `recjax replay --sweep --out` writes now ({type(error).__name__}: {error}). Measure "
            f"again: {_command('N')}."
        ) from None


def _sweep(source: str, given: Any) -> Sweep:
    points: dict[str, tuple[tuple[float, float, float], ...]] = {}
    for kind, of_kind in given["collectives"].items():
        found: dict[float, list[tuple[float, float]]] = {}
        for point in of_kind["points"]:
            size, ns, behind_ns = _times(kind, point)
            found.setdefault(size, []).append((ns, behind_ns))
        if found:  # sizes that were rounded to the same stand there several times
            means = ((size, np.mean(times, axis=0)) for size, times in sorted(found.items()))
            points[kind] = tuple((size, float(ns), float(behind_ns)) for size, (ns, behind_ns) in means)
    if not points or given["devices"] < 2:
        raise ValueError("nothing was measured")
    sweep = Sweep(source, int(given["devices"]), str(given["device"]).lower() == "cpu", points, {}, {}, {})
    for kind in points:
        _add_uneven(sweep, kind, given["collectives"][kind].get("uneven", ()))  # older sweeps have none
    return sweep


def _times(kind: str, point: Any) -> tuple[float, float, float]:
    """Bytes, ns of the rank that came last, and how much later the others are done (0 if that is not known)."""
    size, ns = float(point["bytes"]), float(point["last_us"]) * 1e3
    done_ns = ns if point.get("done_us") is None else float(point["done_us"]) * 1e3
    if not (0 < size < math.inf and 0 < ns < math.inf and 0 <= done_ns < math.inf):
        raise ValueError(f"{kind} of {size} bytes in {ns / 1e3} us")
    return size, ns, max(0.0, done_ns - ns)


def _add_uneven(sweep: Sweep, kind: str, given: Sequence[Any]) -> None:
    """Adds a kind to `Sweep.uneven`, `Sweep.followed` and `Sweep.further`."""
    alone: dict[tuple[float, float], float] = {}  # (bytes, bytes passed over before) -> ns
    uneven, followed, several = [], [], []
    if len(given) > _MOST:
        raise ValueError(f"{kind} has {len(given):,} points, and {_MOST:,} are the most")
    for point in given:
        size, ns, behind_ns = _times(kind, point)
        passed, skew_ns, arrays = float(point["between_bytes"]), float(point["skew_us"]) * 1e3, int(point["arrays"])
        if not (0 <= skew_ns < math.inf and arrays > 0):
            raise ValueError(f"{kind} of {size} bytes after {skew_ns / 1e3} us")
        skew_ns = max(skew_ns, 1.0)
        if point["followed"]:
            followed.append((size, skew_ns, ns, behind_ns, max(float(point["between_us"]) * 1e3, 1.0)))
        elif arrays > 1:
            several.append((size / arrays, passed, arrays, skew_ns, ns))
        else:
            alone[size, passed] = ns
            even_ns, even_behind_ns = sweep._even(kind, size)
            uneven.append((size, skew_ns, max(0.0, ns - even_ns), max(0.0, behind_ns - even_behind_ns)))
    sweep.uneven[kind] = tuple(sorted(uneven))
    further = [
        (size, skew_ns, (ns - alone[size, passed]) / (arrays - 1)) for size, passed, arrays, skew_ns, ns in several
    ]
    sweep.further[kind] = tuple(sorted(point for point in further if point[2] > 0))
    sweep.followed[kind] = tuple(
        (
            size,
            max(0.0, ns - sweep._even(kind, size)[0] - sweep._uneven(kind, size, skew_ns)[0]),
            behind_ns / next_ns,
            next_ns,
        )
        for size, skew_ns, ns, behind_ns, next_ns in sorted(followed)
    )


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
    ready, started, finished, late_ns = (np.zeros((len(operations), ranks)) for _ in range(4))
    stalls: list[Stall] = []
    computed, communicated = np.zeros(ranks), np.zeros(ranks)  # until when each rank's streams are taken
    everyone = np.arange(ranks)
    all_needs = [[places[name] for name in operation.depends_on] for operation in operations]
    until_next = _until_next_ns(operations, ranks)
    for i, operation in enumerate(operations):
        needs = all_needs[i]
        ready[i] = finished[needs].max(axis=0, initial=0)
        started[i] = finished[i] = ready[i]
        members = np.array(operation.ranks).ravel() if operation.ranks else everyone
        late_ns[i, members] = np.broadcast_to(operation.late_ns or 0.0, ranks)[members]
        if operation.kind == "compute":
            started[i, members] = np.maximum(ready[i], computed)[members]
            if needs:
                stood = members[started[i, members] > computed[members]].tolist()
                stalls += [Stall(rank, computed[rank], started[i, rank], needs) for rank in stood]
            started[i] += late_ns[i]
            computed[members] = finished[i, members] = (started[i] + operation.duration_ns)[members]
            continue
        started[i, members] = (np.maximum(ready[i], communicated) + late_ns[i])[members]
        for group in operation.ranks or (tuple(range(ranks)),):
            came = started[i, group]
            next_ns = float(until_next[i, group].mean())
            last_ns, others_ns = _measured_ns(operation, len(group), float(np.ptp(came)), next_ns, by_ranks)
            finished[i, group] = came.max() + np.where(came == came.max(), last_ns, others_ns)
        communicated[members] = finished[i, members]
    end = finished.max(axis=0, initial=0)
    for rank in np.flatnonzero(end > computed) if operations else ():
        open_then = np.flatnonzero(finished[:, rank] > computed[rank]).tolist()
        stalls.append(Stall(int(rank), computed[rank], end[rank], open_then))
    waited, lateness = shared(stalls, all_needs, ready, started, finished, (started - late_ns, started))
    computes = np.array([operation.kind == "compute" for operation in operations], bool)
    lateness[computes] = late_ns[computes]
    return Played(workload, float(end.max(initial=0)), ready, started, finished, waited, lateness)


def _until_next_ns(operations: Sequence[Operation], ranks: int) -> np.ndarray:
    """[operations, ranks]: how long a rank computes between an operation and the next collective."""
    found, computing = np.zeros((len(operations), ranks)), np.zeros(ranks)
    for i in reversed(range(len(operations))):
        found[i] = computing
        operation = operations[i]
        members = np.array(operation.ranks).ravel() if operation.ranks else np.arange(ranks)
        took = computing + operation.duration_ns + np.array(operation.late_ns or 0.0)
        computing[members] = took[members] if operation.kind == "compute" else 0
    return found


def _measured_ns(
    operation: Operation, ranks: int, skew_ns: float, next_ns: float, sweeps: dict[int, Sweep]
) -> tuple[float, float]:
    if ranks < 2:
        return 0.0, 0.0
    if ranks not in sweeps:
        had = ", ".join(f"{sweep.source} {sweep.ranks}" for sweep in sweeps.values())
        raise ConfigError(
            f"{operation.name!r} ({operation.collective}) is of {ranks} ranks, and the calibration of another number "
            f"({had}). Measure as many: {_command(ranks)}."
        )
    return sweeps[ranks].time_ns(operation, skew_ns, next_ns)
