"""What all processes must do alike though each sees only its own samples: sizes of arrays, and when to stop.

Capacities follow from the needs of every process's batch, so their largest are agreed on by a small collective that
runs a step ahead of the one that needs them, in the same order in every process. Whether somebody has been asked to
stop (SIGTERM) travels with them, so that all stop after the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax import watch
from recjax.embedding.route import Counted
from recjax.mesh import Share, put_share, replicated

_STOP = "\0stop"  # beside the names of capacities


class AskedToStop(Exception):
    """A pass over data was broken off, in all processes at the same batch, for one of them has been asked to stop."""


def agreed(stream: Iterator[Counted], mesh: Mesh, stop: Callable[[], bool] = lambda: False) -> Iterator[Counted]:
    """A stream of counted batches whose needs are the largest of all processes, and `last` that of any.

    Args:
      stream: this process's; every process's is equally long.
      mesh: the devices.
      stop: whether this process has been asked to stop.
    """
    if jax.process_count() == 1:
        for counted in stream:
            yield dataclasses.replace(counted, last=True) if stop() else counted
        return
    largest, count = _largest(mesh), Share.of(mesh).count

    def begin(counted: Counted) -> tuple[Counted, list[str], jax.Array]:
        needs = {**counted.needs, _STOP: int(stop())}
        names = sorted(needs)
        mine = np.array([needs[name] for name in names], np.int32)
        return counted, names, largest(put_share(np.tile(mine, (count, 1)), mesh))

    def finish(counted: Counted, names: list[str], found: jax.Array) -> Counted:
        needs = dict(zip(names, np.asarray(found).tolist(), strict=True))
        last = bool(needs.pop(_STOP))
        return dataclasses.replace(counted, needs=needs, last=last)

    waiting: tuple[Counted, list[str], jax.Array] | None = None
    while True:
        watch.phase("input" if waiting else "start")  # the first batch may have to be fetched from far away
        item = next(stream, None)
        watch.phase("wait")
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


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Within it SIGTERM asks the run to stop after the next step. More of them ask no more: schedulers send several.

    Where Python does not allow to handle signals, in a thread other than the main one, nothing is asked.
    """
    asked: list[int] = []  # not an event, whose lock a second signal would wait for while the first one's has it

    def ask(number: int, frame: object) -> None:
        asked.append(number)

    try:
        before = signal.signal(signal.SIGTERM, ask)
    except ValueError:
        yield lambda: bool(asked)
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: it was not Python's
