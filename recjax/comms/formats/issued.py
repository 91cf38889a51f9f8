"""Dependencies as waits: how PARAM and PyTorch's execution traces say what waits for what.

There one thread issues operations and goes on at once; where a later one needs the result of an earlier one, the thread
waits for that. So what is issued after a wait depends on it, which may be more than the program asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recjax.comms.trace import COMPUTE, Event
from recjax.errors import DataError

MOST = 4096  # operations that one may wait for


def with_waits(events: Sequence[Event]) -> Iterator[Event | int]:
    """The collectives of a rank, and where to wait for which: the id of an earlier one. In the end all are waited for.

    Waits for a time of computing are left out, with what that waited for put in its place.
    """
    behind: dict[int, tuple[int, ...]] = {}  # id of a compute event -> collectives that it waits for
    pending: dict[int, None] = {}
    for event in events:
        deps = dict.fromkeys(d for dep in event.deps for d in behind.get(dep, (dep,)))
        if event.kind == COMPUTE:
            behind[event.id] = tuple(deps)
            continue
        for dep in deps:
            if dep in pending:
                del pending[dep]
                yield dep
        yield event
        pending[event.id] = None
    yield from pending


class Waited:
    """Dependencies of the next operation, as the thread issues and waits."""

    def __init__(self) -> None:
        """Nothing so far."""
        self.deps: dict[int, tuple[int, ...]] = {}
        self.front: dict[int, None] = {}

    def issue(self, id: int) -> tuple[int, ...]:
        """Dependencies of an operation that is issued now."""
        self.deps[id] = tuple(sorted(self.front))
        return self.deps[id]

    def wait(self, id: int, place: str) -> None:
        """The thread waited for an operation; what that depended on is implied. One not known is of an earlier time."""
        if id not in self.deps:
            return
        for implied in self.deps[id]:
            self.front.pop(implied, None)
        self.front[id] = None
        if len(self.front) > MOST:
            raise DataError(f"{place}: it waits for more than {MOST:,} operations at once.")


def process_groups(groups: Sequence[tuple[int, ...]], world: int) -> dict[tuple[int, ...], int]:
    """The groups of a trace by number: 0 is all ranks in order, the others as they come."""
    everyone = tuple(range(world))
    return {group: number for number, group in enumerate(dict.fromkeys((everyone, *groups)))}
