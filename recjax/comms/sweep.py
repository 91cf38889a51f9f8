"""Plain collectives of all sizes on the present devices: what latency and bandwidth they have.

The sizes are those of nccl-tests, 8 B to 1 GiB, each a message as it counts them: the larger one of a rank's buffers.
Every size is a replay of a few equal collectives, each waiting for the one before.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.comms.bus import bus_factor
from recjax.comms.replay import replay
from recjax.comms.slots import Slot, slots
from recjax.comms.trace import Event, Trace
from recjax.errors import ConfigError

KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
_CHAIN = 6  # collectives in a run; the first does not count, since ranks begin it at different times
_PASSED = (2**16, 2**18, 2**20, 2**22)  # bytes passed over between collectives, so that ranks come unevenly
_ARRAYS = 8  # of an all-reduce of several
_UNEVEN_MOST = 2**20  # bytes of a message; of larger ones the time is all copying
_BUFFERS = 4  # of the message's size that a rank needs at most


def sweep(
    mesh: Mesh, kinds: Sequence[str], sizes: Sequence[int], repeats: int, memory_bytes: int | None = None
) -> dict[str, Any]:
    """Measures collectives over all devices of a mesh.

    Args:
      mesh: from `replay.ranks_mesh`, of two devices at least.
      kinds: of KINDS.
      sizes: bytes of the messages, ascending; rounded up so that blocks are equal and elements whole.
      repeats: runs of each size; fewer where one takes long.
      memory_bytes: that all host devices together may take; sizes that need more are left out.

    Returns:
      JSON values: "devices", "device", "processes", "versions"; "left_out_bytes", the sizes that memory does not hold;
      "collectives": kind -> "points", each with "bytes", "p50_us", "p95_us", "last_us", "skew_us" (from the first
      rank's beginning to the last one's; None with several processes), "algorithm_bytes_per_s" and "bus_bytes_per_s" at
      the median, and the fit "alpha_us", "bytes_per_s" (see `fit`), "fit_error" (its mean); "uneven", in one process:
      the same of some sizes up to 1 MiB, where ranks come unevenly because they compute before, with "between_bytes",
      the memory that they pass over; and of all-reduces of several "arrays" of such a size, which together are "bytes".

    Raises:
      ConfigError: only one device, or the profiler shows no times on this back end.
    """
    ranks = mesh.devices.size
    if ranks < 2:
        raise ConfigError("a sweep needs at least 2 devices: on CPU give --devices 8, say, for host devices.")
    device = mesh.devices.flat[0]
    here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    limit = memory_bytes // len(here) if memory_bytes and device.platform == "cpu" else _device_memory(device)
    fitting = [size for size in sizes if limit is None or size * _BUFFERS <= limit]
    found: dict[str, Any] = {}
    for kind in kinds:
        points: list[dict[str, Any]] = []
        for size in fitting:
            runs = repeats if not points else max(2, min(repeats, int(2e6 / (_CHAIN * points[-1]["p50_us"]))))
            points.append(_point(kind, size, mesh, runs))
            if jax.process_index() == 0:
                print(f"{kind} {size:,} B: {points[-1]['p50_us']:.1f} us", file=sys.stderr, flush=True)
        few = [size for size in fitting[::3] if size <= _UNEVEN_MOST] if jax.process_count() == 1 else []
        cases = [(size, passed, 1) for passed in _PASSED for size in few]
        cases += [(size, _PASSED[-2], _ARRAYS) for size in few if kind == "all_reduce"]
        uneven = [
            {"arrays": arrays, "between_bytes": passed, **_point(kind, size, mesh, repeats, passed, arrays)}
            for size, passed, arrays in cases
        ]
        found[kind] = {"points": points, "uneven": uneven, **fit([(p["bytes"], p["p50_us"]) for p in points])}
    return {
        "devices": ranks,
        "device": device.device_kind,
        "processes": jax.process_count(),
        "versions": {"jax": jax.__version__},
        "left_out_bytes": [size for size in sizes if size not in fitting],
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
        0, kind, dtype="float32", group=tuple(range(ranks)), in_bytes=in_bytes * arrays, out_bytes=out_bytes * arrays,
        parts=(in_bytes,) * arrays if arrays > 1 else (),
    )  # fmt: skip
    events = tuple(dataclasses.replace(event, id=i, deps=(i - 1,) if i else ()) for i in range(count))
    return slots(Trace(ranks, dict.fromkeys(event.group, events)))


def _point(kind: str, size: int, mesh: Mesh, repeats: int, between_bytes: int = 0, arrays: int = 1) -> dict[str, Any]:
    chained = chain(kind, size, mesh.devices.size, arrays=arrays)
    times = replay(chained, mesh, repeats, between_bytes=between_bytes)
    if times.slots is None or times.skews is None:
        raise ConfigError("the profiler shows no operations on this back end, so nothing can be measured.")
    us = np.stack(times.slots[1:]) / 1e3  # [collectives, repeats, ranks]
    skew_us = np.stack(times.skews[1:]) / 1e3
    p50 = float(np.median(us))
    bytes_ = chained[0].padded_bytes
    rate = bytes_ / (p50 / 1e6)
    return {
        "bytes": bytes_,
        "p50_us": p50,
        "p95_us": float(np.percentile(us, 95)),
        "last_us": float(np.median(us.min(axis=2))),
        "skew_us": float(np.median(skew_us)) if np.isfinite(skew_us).all() else None,
        "algorithm_bytes_per_s": rate,
        "bus_bytes_per_s": rate * bus_factor(kind, mesh.devices.size),
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
