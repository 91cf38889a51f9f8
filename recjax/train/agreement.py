"""What all processes must do alike though each sees only its own samples: sizes of arrays, when to save and stop.

Capacities follow from the needs of every process's batch, so their largest are agreed on by a small collective that
runs a step ahead of the one that needs them, in the same order in every process. Whether somebody has been asked to
stop (SIGTERM, Ctrl-C) travels with them, so that all stop after the same step; and so does whether a checkpoint is due
by the clock of process 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.routing.host import Counted
from recjax.parallel import watchdog
from recjax.parallel.mesh import Share, put_share, replicated

_STOP, _SAVE = "\0stop", "\0save"  # beside the names of capacities


def never() -> int:
    """For a pass that nobody asks to stop or to save."""
    return 0


class AskedToStop(Exception):
    """A pass over data was broken off, in all processes at the same batch, for one of them has been asked to stop.

    Attributes:
      number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def agreed(
    stream: Iterator[Counted], mesh: Mesh, stop: Callable[[], int] = never, save: Callable[[], int] = never
) -> Iterator[Counted]:
    """A stream of counted batches whose needs are the largest of all processes, and `stop` and `save` those of any.

    Args:
      stream: this process's; every process's is equally long.
      mesh: the devices.
      stop: the signal that has asked this process to stop, or 0.
      save: whether this process wants a checkpoint.
    """
    if jax.process_count() == 1:
        for counted in stream:
            asked, due = stop(), bool(save())
            yield dataclasses.replace(counted, stop=asked, save=due) if asked or due else counted
        return
    largest, count = _largest(mesh), Share.of(mesh).count

    def begin(counted: Counted) -> tuple[Counted, list[str], jax.Array]:
        needs = {**counted.needs, _STOP: int(stop()), _SAVE: int(save())}
        names = sorted(needs)
        mine = np.array([needs[name] for name in names], np.int32)
        return counted, names, largest(put_share(np.tile(mine, (count, 1)), mesh))

    def finish(counted: Counted, names: list[str], found: jax.Array) -> Counted:
        needs = dict(zip(names, np.asarray(found).tolist(), strict=True))
        asked, due = needs.pop(_STOP), bool(needs.pop(_SAVE))
        return dataclasses.replace(counted, needs=needs, stop=asked, save=due)

    waiting: tuple[Counted, list[str], jax.Array] | None = None
    while True:
        watchdog.phase("input" if waiting else "start")  # the first batch may have to be fetched from far away
        item = next(stream, None)
        watchdog.phase("wait")
        if item is None:
            break
        before, waiting = waiting, begin(item)
        if before:
            yield finish(*before)
    if waiting:
        yield finish(*waiting)


@functools.cache
def _largest(mesh: Mesh) -> Any:
    return jax.jit(lambda needs_NxK: jnp.max(needs_NxK, axis=0), out_shardings=replicated(mesh))
