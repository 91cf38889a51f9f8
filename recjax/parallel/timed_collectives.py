"""Times plain collectives over the devices of a run: whether the links between them do what they should."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.utils.units import bus_factor

_AXIS = "rank"
_CHAIN = 10  # collectives in a program, one after the other: a dispatch takes as long as one of them
_WARM = 2  # runs before those that count
_COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: jax.lax.psum(x, _AXIS) * 0.5,  # or a long chain would overflow
    "all_to_all": lambda x: jax.lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
}


def time_collectives(devices: Sequence[Any], sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Times an all-reduce and an all-to-all over all devices, by the clock, in programs of a few each.

    Args:
      devices: of all processes, each of which calls this; two or more.
      sizes: bytes of each device's message; rounded up to whole elements for each device.
      repeats: timed runs of each program.

    Returns:
      Kind -> "points", each with "bytes", "p50_us" and "p95_us" of one collective, and "bus_bytes_per_s" at the median:
      bytes that cross each device's link in a second.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))
    timed: dict[str, Any] = {}
    for kind, collective in _COLLECTIVES.items():
        points = []
        for size in sizes:
            message_bytes = -(-size // (4 * len(devices))) * 4 * len(devices)
            us = np.array(_time_chain(mesh, collective, message_bytes // 4, repeats))
            rate = message_bytes * bus_factor(kind, len(devices)) / (float(np.median(us)) / 1e6)
            percentiles = {"p50_us": float(np.median(us)), "p95_us": float(np.percentile(us, 95))}
            points.append({"bytes": message_bytes, **percentiles, "bus_bytes_per_s": rate})
        timed[kind] = {"points": points}
    return timed


def _time_chain(mesh: Mesh, collective: Callable[[jax.Array], jax.Array], elements: int, repeats: int) -> list[float]:
    """Microseconds of one collective in each run of a chain of them."""

    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _CHAIN, lambda _, x: collective(x), x)

    run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False))
    sharding = NamedSharding(mesh, P(_AXIS))
    shape = (elements * mesh.devices.size,)
    message = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
    taken = []
    for _ in range(_WARM + repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(message))
        taken.append((time.perf_counter() - began) * 1e6 / _CHAIN)
    return taken[_WARM:]
