"""Keeps processes in step: they agree on the sizes of arrays, and on when to save and to stop.

Capacities follow from the requirements of every process's batch, so their largest are agreed on by a small collective
that runs a step ahead of the one that needs them, in the same order in every process. Whether somebody has been asked
to stop (SIGTERM, Ctrl-C) travels with them, so that all stop after the same step; and so does whether a checkpoint is
due by the clock of process 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax.parallel import watchdog
from recjax.parallel.mesh import Share, put_share, replicated, whole
from recjax.train.routers import InFlight

_AT_ONCE = 2**26  # bytes of all devices that are gathered at a time
_STOP, _SAVE = "\0stop", "\0save"  # beside the names of capacities


class _Begun(NamedTuple):
    """A batch whose numbers are on their way to all processes.

    Attributes:
      batch: of this process.
      names: of the numbers.
      largest: of each over all processes, int32.
    """

    batch: InFlight
    names: list[str]
    largest: jax.Array


class StopRequested(Exception):
    """A pass over data was broken off, in all processes at the same batch, for one of them has been asked to stop.

    Attributes:
      number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def synchronize_batches(
    stream: Iterator[InFlight], mesh: Mesh, stop: Callable[[], int], save: Callable[[], int]
) -> Iterator[InFlight]:
    """Gives each batch the largest required capacities of several processes, and `stop` and `save` of any.

    Args:
      stream: this process's; every process's is equally long.
      mesh: the devices.
      stop: the signal that has asked this process to stop, or 0.
      save: whether this process wants a checkpoint.
    """
    largest, count = _largest(mesh), Share.of(mesh).count

    def begin(batch: InFlight) -> _Begun:
        mine = {**batch.routed.required_capacities, _STOP: int(stop()), _SAVE: int(save())}
        names = sorted(mine)
        row = np.array([mine[name] for name in names], np.int32)
        return _Begun(batch, names, largest(put_share(np.tile(row, (count, 1)), mesh)))

    def finish(begun: _Begun) -> InFlight:
        required = dict(zip(begun.names, np.asarray(begun.largest).tolist(), strict=True))
        asked, due = required.pop(_STOP), bool(required.pop(_SAVE))
        routed = dataclasses.replace(begun.batch.routed, required_capacities=required)
        return dataclasses.replace(begun.batch, routed=routed, stop=asked, save=due)

    waiting: _Begun | None = None
    while True:
        watchdog.phase("input" if waiting else "start")  # the first batch may have to be fetched from far away
        read = next(stream, None)
        watchdog.phase("wait")
        if read is None:
            break
        before, waiting = waiting, begin(read)
        if before:
            yield finish(before)
    if waiting:
        yield finish(waiting)


def gather(mesh: Mesh, array: np.ndarray) -> list[np.ndarray]:
    """Gives every process the arrays of all, in the order of the processes; all must call it.

    Args:
      mesh: the devices.
      array: this process's. All have one dtype, and all axes but the first alike.
    """
    if jax.process_count() == 1:
        return [array]
    shares, own = Share.of_all(mesh), Share.of(mesh)

    def exchange(of_devices: np.ndarray) -> np.ndarray:
        return whole(put_share(of_devices, mesh))

    content = np.ascontiguousarray(array).tobytes()
    sizes_N = exchange(np.tile(np.array([len(content)]).view(np.uint8), (own.count, 1))).view(np.int64)[:, 0]
    most = max(-(-int(sizes_N[share.first]) // share.count) for share in shares)  # bytes of a device
    row = min(_AT_ONCE // own.total, 1 << max(0, most - 1).bit_length())  # of few sizes: each is a program
    found = [bytearray() for _ in shares]
    for start in range(0, most * own.count, row * own.count):
        piece = content[start : start + row * own.count].ljust(row * own.count, b"\0")
        bytes_NxR = exchange(np.frombuffer(piece, np.uint8).reshape(own.count, row))
        for share, received in zip(shares, found, strict=True):
            received += bytes_NxR[share.first : share.first + share.count].tobytes()
    of_all = (bytes(received[: sizes_N[share.first]]) for share, received in zip(shares, found, strict=True))
    return [np.frombuffer(received, array.dtype).reshape(-1, *array.shape[1:]) for received in of_all]


@functools.cache
def _largest(mesh: Mesh) -> Any:
    return jax.jit(lambda rows_NxK: jnp.max(rows_NxK, axis=0), out_shardings=replicated(mesh))
