"""Times of a step's operations on a device, as a trace keeps them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from recjax.lab.formats.trace import COMPUTE, Event
from recjax.lab.replay.profile import Span
from recjax.planning.compiled_collectives import KINDS

_COLLECTIVE = re.compile(rf"({'|'.join(KINDS)})")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Operations of one device in one step: `spans`, by their beginnings."""

    spans: tuple[Span, ...] = ()

    def joined(self, events: Sequence[Event], step: int, first_id: int) -> list[Event]:
        """The collectives with their times, in the order of these, and times of computing between their edges.

        Args:
          events: of this device and step, as `record.step_events` gives them; their ids are replaced.
          step: its number.
          first_id: id of the first event; the one before, if any, is of the step before, which this one waits for.
        """
        ends: dict[str, int] = {span.name: span.end for span in self.spans}
        starts = {span.name: span.start for span in reversed(self.spans)}
        timed = []
        for event in events:
            if event.name in starts:
                end = ends.get(re.sub(r"-start\b", "-done", event.name), ends[event.name])
                start = starts[event.name]
                event = dataclasses.replace(event, start_ns=start, duration_ns=end - start)
            timed.append(event)
        return _numbered(timed, self._computing(timed), step, first_id)

    def _computing(self, timed: Sequence[Event]) -> list[Event]:
        """Busy times of computing, cut where a collective begins or ends: one event for each slice between."""
        own = {name for e in timed for name in (e.name, re.sub(r"-start\b", "-done", e.name))}
        edges = sorted({t for e in timed if e.start_ns is not None for t in (e.start_ns, e.end_ns or 0)})
        busy = _union(s for s in self.spans if s.name not in own and not _COLLECTIVE.match(s.name))
        found: list[Event] = []
        for low, high in zip([-1, *edges], [*edges, 2**62], strict=True):
            inside = [(max(s.start, low), min(s.end, high)) for s in busy if s.start < high and s.end > low]
            if inside:
                length = sum(end - begin for begin, end in inside)
                found.append(Event(-1, COMPUTE, name=COMPUTE, start_ns=inside[0][0], duration_ns=length))
        return found


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        if found and span.start <= found[-1].end:
            found[-1] = Span(COMPUTE, found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def _numbered(timed: Sequence[Event], computing: Sequence[Event], step: int, first_id: int) -> list[Event]:
    """All events with ids and dependencies; collectives keep their order, which is the same on all ranks.

    A collective waits for what the program says and for the last computing that ended before it began; computing for
    the collective and the computing that ended last before it.
    """
    ordered: list[Event] = []
    left = list(computing)
    for event in timed:
        while left and event.start_ns is not None and (left[0].start_ns or 0) < event.start_ns:
            ordered.append(left.pop(0))
        ordered.append(event)
    ordered += left
    ids = {e.id: first_id + place for place, e in enumerate(ordered) if e.kind != COMPUTE}
    found: list[Event] = []
    for place, event in enumerate(ordered):
        before: dict[bool, Event] = {}  # the computing, and the collective, that ended last
        for other in found if event.start_ns is not None else ():
            if other.end_ns is not None and other.end_ns <= (event.start_ns or 0):
                key = other.kind == COMPUTE
                if key not in before or other.end_ns >= (before[key].end_ns or 0):
                    before[key] = other
        deps = {before[True].id} if True in before else set()
        if event.kind == COMPUTE:
            deps |= {before[False].id} if False in before else set()
        deps |= {ids[d] for d in event.deps if ids[d] < first_id + place}
        if not deps and first_id:
            deps = {first_id - 1}
        found.append(dataclasses.replace(event, id=first_id + place, step=step, deps=tuple(sorted(deps))))
    return found
