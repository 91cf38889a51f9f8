"""Plain collectives of all sizes on the present devices: what latency and bandwidth they have.

The sizes are those of nccl-tests, 8 B to 1 GiB, each a message as it counts them: the larger one of a rank's buffers.
Every size is a replay of a few equal collectives, each waiting for the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.errors import ConfigError
from recjax.lab.formats.trace import Event, Trace
from recjax.lab.replay.program import Slot, slots
from recjax.lab.replay.replay import Prepared, Times, measure
from recjax.utils import log
from recjax.utils.units import bus_factor

KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
_CHAIN = 6  # collectives in a run; the first does not count, since ranks begin it at different times
_PASSED = (2**16, 2**18, 2**20, 2**22, 2**24)  # bytes passed over between collectives, so that ranks come unevenly
_FOLLOWED = 2**20  # bytes passed over before each collective, so that computing also follows
_ARRAYS = 8  # of an all-reduce of several; two at least, and otherwise no more than
_ARRAYS_MOST = 2**21  # bytes together, about what lies in a near cache
_UNEVEN_MOST = 2**20  # bytes of a message; of larger ones the time is all copying
_BUFFERS = 4  # of the message's size that a rank needs at most
PASSES = 5
_FIRST = 2  # runs in the first pass at most
_PASS_US = 4e5  # that a later pass may take for a point; those that take longer are measured in the first alone


def sweep(
    mesh: Mesh,
    kinds: Sequence[str],
    sizes: Sequence[int],
    repeats: int,
    memory_bytes: int | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measures collectives over all devices of a mesh: a `Sweep`, in `PASSES` passes.

    Args:
      mesh: as for `Sweep`.
      kinds: likewise.
      sizes: likewise.
      repeats: runs of each size; fewer where one takes long.
      memory_bytes: as for `Sweep`.
      keep: called after each pass with what there is by then, so that a sweep that is stopped has not been for nothing.

    Returns:
      As `Sweep.result`.

    Raises:
      ConfigError: as `Sweep`.
    """
    begun = Sweep(mesh, kinds, sizes, memory_bytes)
    for number in range(PASSES):
        begun.measure(-(-repeats // PASSES))
        if keep:
            keep(begun.result())
        if jax.process_index() == 0:
            log.info(f"pass {number + 1} of {PASSES}")
    return begun.result()


class Sweep:
    """Collectives of all kinds and sizes, compiled, to be measured pass by pass.

    Each pass takes all of them in turn, so that a machine that is slow for some seconds, as shared ones are, makes
    none of them look slower than its neighbours: medians are over all passes.
    """

    def __init__(self, mesh: Mesh, kinds: Sequence[str], sizes: Sequence[int], memory_bytes: int | None = None) -> None:
        """Compiles them.

        Args:
          mesh: from `replay.ranks_mesh`, of two devices at least.
          kinds: of KINDS.
          sizes: bytes of the messages, ascending; rounded up so that blocks are equal and elements whole.
          memory_bytes: that all host devices together may take; sizes that need more are left out.

        Raises:
          ConfigError: only one device.
        """
        self._mesh = mesh
        self._passes = 0
        self._ranks = mesh.devices.size
        if self._ranks < 2:
            raise ConfigError("a sweep needs at least 2 devices: on CPU give --devices 8, say, for host devices.")
        device = mesh.devices.flat[0]
        here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        limit = memory_bytes // len(here) if memory_bytes and device.platform == "cpu" else _device_memory(device)
        fitting = [size for size in sizes if limit is None or size * _BUFFERS <= limit]
        self._left_out = [size for size in sizes if size not in fitting]
        few = [size for size in fitting if size <= _UNEVEN_MOST][::-3][::-1] if jax.process_count() == 1 else []
        self._points: dict[str, list[_Point]] = {}
        for kind in kinds:
            cases = [(size, 0, 1, False) for size in fitting] + [(size, _FOLLOWED, 1, True) for size in few]
            cases += [(size, passed, 1, False) for passed in _PASSED for size in few]
            if kind == "all_reduce":
                several = [max(2, min(_ARRAYS, _ARRAYS_MOST // size)) for size in few]
                cases += [(size, passed, n, False) for passed in _PASSED for size, n in zip(few, several, strict=True)]
            self._points[kind] = [_Point(kind, mesh, *case) for case in cases]
            if jax.process_index() == 0:
                log.info(f"{kind}: {len(cases)} programs compiled")

    def measure(self, repeats: int) -> None:
        """A pass: so many runs of each collective, fewer where one takes long.

        Raises:
          ConfigError: the profiler shows no times on this back end.
        """
        self._passes += 1
        for points in self._points.values():
            runs = {point: count for point in points if (count := point.runs(repeats))}
            found = measure([point.replay for point in runs], list(runs.values()))
            for point, times in zip(runs, found, strict=True):
                point.add(times)

    def result(self) -> dict[str, Any]:
        """Results of all passes together.

        Returns:
          JSON values: "devices", "device", "processes", "versions"; "passes", how many were done; "left_out_bytes", the
          sizes that memory does not hold; "collectives": kind -> "points", each with "bytes", "p50_us", "p95_us",
          "last_us" (of the rank that came last), "skew_us" (from the first rank's beginning to the last one's),
          "done_us" (from the last one's beginning to the last end) and "between_us" (from a rank's end to its next
          beginning), all three None with several processes, "algorithm_bytes_per_s" and "bus_bytes_per_s" at the
          median, and the fit "alpha_us", "bytes_per_s" (see `fit`), "fit_error" (its mean); "uneven", in one process:
          the same of some sizes up to 1 MiB, where ranks come unevenly because they compute before, with
          "between_bytes", the memory that they pass over, and "followed", whether they do that also after it, or the
          next collective follows at once; and of all-reduces of several "arrays" of such a size, which together are
          "bytes".
        """
        found: dict[str, Any] = {}
        for kind, points in self._points.items():
            even = [point.figures(self._ranks) for point in points if not point.passed]
            uneven = [
                {
                    "arrays": point.arrays,
                    "between_bytes": point.passed,
                    "followed": point.followed,
                    **point.figures(self._ranks),
                }
                for point in points
                if point.passed
            ]
            found[kind] = {"points": even, "uneven": uneven, **fit([(p["bytes"], p["p50_us"]) for p in even])}
        return {
            "devices": self._ranks,
            "device": self._mesh.devices.flat[0].device_kind,
            "processes": jax.process_count(),
            "versions": {"jax": jax.__version__},
            "passes": self._passes,
            "left_out_bytes": self._left_out,
            "collectives": found,
        }


def _device_memory(device: Any) -> int | None:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None


def chain(kind: str, size: int, ranks: int, count: int = _CHAIN, arrays: int = 1) -> list[Slot]:
    """Equal collectives over all ranks, one after the other, each of so many arrays of one size."""
    unit = 4 * ranks
    size = -(-size // unit) * unit if kind != "all_reduce" else -(-size // 4) * 4
    in_bytes = size // ranks if kind == "all_gather" else size
    out_bytes = size // ranks if kind == "reduce_scatter" else size
    event = Event(
        0,
        kind,
        dtype="float32",
        group=tuple(range(ranks)),
        in_bytes=in_bytes * arrays,
        out_bytes=out_bytes * arrays,
        parts=(in_bytes,) * arrays if arrays > 1 else (),
    )
    events = tuple(dataclasses.replace(event, id=i, deps=(i - 1,) if i else ()) for i in range(count))
    return slots(Trace(ranks, dict.fromkeys(event.group, events)))


class _Point:
    """A chain of equal collectives, and what was measured of it."""

    def __init__(self, kind: str, mesh: Mesh, size: int, passed: int, arrays: int, followed: bool) -> None:
        chained = chain(kind, size, mesh.devices.size, arrays=arrays)
        self.kind, self.passed, self.arrays, self.followed = kind, passed, arrays, followed
        self.bytes = chained[0].padded_bytes
        # Where nothing is to follow, every other collective follows at once; those are not looked at.
        every = 1 if followed or not passed else 2
        self._counting = slice(every, None, every)
        name = f"sweep_{kind}_{size}_{passed}_{arrays}_{followed}"
        self.replay = Prepared(chained, mesh, between_bytes=passed, every=every, name=name)
        self._us: list[np.ndarray] = []  # [collectives, repeats, ranks] of each pass
        self._start_us: list[np.ndarray] = []  # likewise
        self._between_us: list[np.ndarray] = []  # likewise, from the end of each to the beginning of the next

    def runs(self, repeats: int) -> int:
        """Number of a pass's runs to make."""
        if not self._us:  # how long one takes is not known yet
            return min(repeats, _FIRST)
        return min(repeats, int(_PASS_US / (_CHAIN * np.median(self._us[0]))))

    def add(self, times: Times) -> None:
        """Adds the results of a pass."""
        if times.slots is None or times.starts is None:
            raise ConfigError("the profiler shows no operations on this back end, so nothing can be measured.")
        us, start_us = np.stack(times.slots) / 1e3, np.stack(times.starts) / 1e3
        self._us.append(us[self._counting])
        self._start_us.append(start_us[self._counting])
        self._between_us.append((start_us[1:] - (start_us + us)[:-1])[self._counting])

    def figures(self, ranks: int) -> dict[str, Any]:
        us, start_us = np.concatenate(self._us, axis=1), np.concatenate(self._start_us, axis=1)
        done_us = (start_us + us).max(axis=2) - start_us.max(axis=2)
        p50, one_clock = float(np.median(us)), bool(np.isfinite(start_us).all())
        rate = self.bytes / (p50 / 1e6)
        return {
            "bytes": self.bytes,
            "p50_us": p50,
            "p95_us": float(np.percentile(us, 95)),
            "last_us": float(np.median(us.min(axis=2))),
            "skew_us": float(np.median(np.ptp(start_us, axis=2))) if one_clock else None,
            "done_us": float(np.median(done_us)) if one_clock else None,
            "between_us": float(np.median(np.concatenate(self._between_us, axis=1))) if one_clock else None,
            "algorithm_bytes_per_s": rate,
            "bus_bytes_per_s": rate * bus_factor(self.kind, ranks),
        }


def fit(points: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Latency and rate of t = alpha + bytes / rate with the least mean of squared relative errors.

    Args:
      points: (bytes, us), two at least.

    Returns:
      "alpha_us" and "bytes_per_s" of the message (None if time does not grow with size), neither negative; "fit_error",
      the geometric mean of max(t, fit) / min(t, fit), minus 1.
    """
    if len(points) < 2:
        return {"alpha_us": None, "bytes_per_s": None, "fit_error": None}
    bytes_P, us_P = (np.array(column, float) for column in zip(*points, strict=True))
    columns = np.stack([1 / us_P, bytes_P / us_P], axis=1)
    best: tuple[float, float, float] | None = None
    # both free, or one of them 0: the best that has none below 0
    for kept in ((0, 1), (0,), (1,)):
        found = np.zeros(2)
        found[list(kept)] = np.linalg.lstsq(columns[:, kept], np.ones(len(points)), rcond=None)[0]
        error = float(np.mean((columns @ found - 1) ** 2))
        if (found >= 0).all() and (best is None or error < best[0]):
            best = error, float(found[0]), float(found[1])
    assert best is not None
    _, alpha_us, us_per_byte = best
    off = np.abs(np.log((alpha_us + bytes_P * us_per_byte) / us_P))
    rate = 1e6 / us_per_byte if us_per_byte else None
    return {"alpha_us": alpha_us, "bytes_per_s": rate, "fit_error": float(np.exp(off.mean()) - 1)}
