"""Dependencies as waits: how PARAM and PyTorch's execution traces say what waits for what.

There one thread issues operations and goes on at once; where a later one needs the result of an earlier one, the thread
waits for that. So what is issued after a wait depends on it, which may be more than the program asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.trace import COMPUTE, Event

MOST = 4096  # operations that one may wait for
_MOST_EACH, _MOST_ALWAYS = 64, 2**20  # in lists of what is waited for: so many for each operation, and these


def with_waits(events: Sequence[Event]) -> Iterator[tuple[Event, bool]]:
    """The collectives of a rank, each with False where it is issued and with True where it is waited for.

    In the end all are waited for. Waits for a time of computing are left out, with what that waited for put in its
    place.
    """
    behind: dict[int, tuple[int, ...]] = {}  # id of a compute event -> collectives that it waits for
    pending: dict[int, Event] = {}
    for event in events:
        deps = dict.fromkeys(d for dep in event.deps for d in behind.get(dep, (dep,)))
        if event.kind == COMPUTE:
            behind[event.id] = tuple(deps)
            continue
        for dep in deps:
            if dep in pending:
                yield pending.pop(dep), True
        yield event, False
        pending[event.id] = event
    yield from ((event, True) for event in pending.values())


class Waited:
    """Dependencies of the next operation, as the thread issues and waits."""

    def __init__(self) -> None:
        """Nothing so far."""
        self.issued: dict[Any, tuple[int, tuple[int, ...]]] = {}  # request -> id and dependencies
        self.front: dict[int, None] = {}
        self._deps: tuple[int, ...] | None = ()  # of what is issued now; None: to be made of the front
        self._left = _MOST_ALWAYS  # dependencies that further lists may hold

    def issue(self, id: int, request: Any, place: str) -> tuple[int, ...]:
        """Dependencies of an operation that is issued now; `request` is its name in a wait."""
        self._left += _MOST_EACH
        if self._deps is None:
            self._left -= len(self.front)
            if self._left < 0:
                raise DataError(
                    f"{place}: it and those before it wait for more than {_MOST_EACH} operations each. Cut "
                    "the trace to fewer steps."
                )
            self._deps = tuple(sorted(self.front))
        self.issued[request] = id, self._deps
        return self._deps

    def wait(self, request: Any, place: str) -> None:
        """The thread waited for an operation; what that depended on is implied.

        One not known is of an earlier time, and one waited for a second time is done.
        """
        if request not in self.issued:
            return
        id, deps = self.issued.pop(request)
        self._deps = None
        for implied in deps:
            self.front.pop(implied, None)
        self.front[id] = None
        if len(self.front) > MOST:
            raise DataError(f"{place}: it waits for more than {MOST:,} operations at once.")
