"""A communication trace: what every rank of a program sent to whom, in which order, and when.

A trace is plain data. It comes from a program of recjax (`recjax trace`) or from a file in one of the formats in
`recjax/lab/formats/`, and goes to the report, to the replay and to the simulator.

On every rank the events stand in the order in which they were issued, and an event waits for those that it names in
`deps`. The k-th collective of a group of ranks on one of them is the k-th of that group on all others, as in MPI. A
compute event is a time in which the rank computed; one that lies within a collective's time hides it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from recjax.errors import DataError

COMPUTE = "compute"
# What may be an event's kind besides. Names as PARAM and torch.distributed have them.
COLLECTIVES = (
    "all_to_all",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "collective_permute",
    "barrier",
    "send",
    "recv",
)
JOINED = "+"  # between the phases of one collective
MAX_RANKS, MAX_EVENTS = 2**16, 2**22  # that a file may claim
# Bytes of an element. Names are NumPy's, and bfloat16.
ITEM_BYTES = (
    dict.fromkeys(("bool", "int8", "uint8"), 1)
    | dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2)
    | dict.fromkeys(("int32", "uint32", "float32"), 4)
    | dict.fromkeys(("int64", "uint64", "float64"), 8)
)


@dataclasses.dataclass(frozen=True)
class Event:
    """One collective on one rank, or a time of computing.

    Attributes:
      id: of the event, among those of its rank; ascending in the order in which they were issued.
      kind: one of COLLECTIVES, or COMPUTE.
      phase: of the step, such as "row_exchange": see `recjax.utils.phases.Phase`; "" if not known.
        Several, the one with the most bytes first and JOINED between, where a compiler made one collective of theirs.
      scope: what within the phase, such as a group of tables.
      name: of the instruction or operation.
      step: from 0.
      dtype: of the elements, a key of ITEM_BYTES; "" if not known.
      group: the ranks that take part, in the order of their blocks; empty for COMPUTE.
      in_bytes, out_bytes: of this rank's whole buffers before and after, with what is padding in them.
      sends, receives: bytes of these that mean something, for and from each rank of `group` (this one too); empty
        where nothing is padded and the buffer has equal blocks. A gathered block is sent to each rank, and counts for
        each.
      deps: ids of earlier events that this one waits for; what these wait for need not be named again.
      start_ns: when it began, on a clock that all events of this rank share; None if it was not measured.
      duration_ns: how long it took, waiting for other ranks included; None if it was not measured.
      parts: of an all_reduce, the bytes of each of the arrays that a compiler combined in it, which a back end may send
        one after the other; empty if it is one array.
    """

    id: int
    kind: str
    phase: str = ""
    scope: str = ""
    name: str = ""
    step: int = 0
    dtype: str = ""
    group: tuple[int, ...] = ()
    in_bytes: int = 0
    out_bytes: int = 0
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    deps: tuple[int, ...] = ()
    start_ns: int | None = None
    duration_ns: int | None = None
    parts: tuple[int, ...] = ()

    @property
    def padded_bytes(self) -> int:
        """The size of the message as nccl-tests and PARAM count it: the larger one of both buffers."""
        return max(self.in_bytes, self.out_bytes)

    @property
    def useful_bytes(self) -> int:
        """Bytes of `padded_bytes` that are not padding."""
        if not self.sends and not self.receives:
            return self.padded_bytes
        return sum(self.receives) if self.kind == "all_gather" else max(sum(self.sends), sum(self.receives))

    @property
    def item_bytes(self) -> int:
        """Bytes of an element; 1 if the dtype is not known."""
        return ITEM_BYTES.get(self.dtype, 1)

    @property
    def end_ns(self) -> int | None:
        """Time at which it ended, if that was measured."""
        return None if self.start_ns is None or self.duration_ns is None else self.start_ns + self.duration_ns


@dataclasses.dataclass(frozen=True)
class Trace:
    """The events of all ranks.

    Attributes:
      world: ranks that there were.
      ranks: rank -> its events; a trace may lack some ranks.
      about: JSON values that say where it comes from: "source", and if recjax wrote it "preset", "config" (key ->
        text), "devices", "hosts", "batch_size", "steps", "device", "versions".
    """

    world: int
    ranks: Mapping[int, tuple[Event, ...]]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Returns whether any collective has a time."""
        return any(e.duration_ns is not None for events in self.ranks.values() for e in events if e.kind != COMPUTE)

    @property
    def steps(self) -> int:
        """Steps that it holds, 1 at least."""
        return len({e.step for events in self.ranks.values() for e in events}) or 1

    def collectives(self) -> Iterator[tuple[int, Event]]:
        """(rank, event) of all that is no computing."""
        for rank, events in self.ranks.items():
            for event in events:
                if event.kind != COMPUTE:
                    yield rank, event


def checked(trace: Trace, place: str) -> Trace:
    """The trace itself, if it holds together.

    Raises:
      DataError: it has no ranks or too many, an event of an unknown kind, an event that waits for a later one or is in
        a group without its rank, or splits that do not fit its group; says where, from `place` on.
    """
    if not 0 < trace.world <= MAX_RANKS or not trace.ranks:
        raise DataError(f"{place}: a trace has 1 to {MAX_RANKS:,} ranks, and this one {trace.world:,}.")
    for rank, events in trace.ranks.items():
        where = f"{place}, rank {rank}"
        if not 0 <= rank < trace.world:
            raise DataError(f"{where}: there are only {trace.world} ranks, counted from 0.")
        before: set[int] = set()
        waited: tuple[int, ...] = ()  # by the event before; neighbours often share it
        last, judged = -1, _Groups(rank, trace.world)
        for event in events:
            wrong = _wrong(event, judged)
            if event.id <= last:
                wrong = f"its id is not above {last}, that of the event before"
            elif event.deps is not waited and not before.issuperset(event.deps):
                wrong = f"it waits for {next(d for d in event.deps if d not in before)}, which is no earlier event"
            if wrong:
                raise DataError(f"{where}, event {event.id} ({event.kind}): {wrong}. The trace is damaged, or not one.")
            last, waited = event.id, event.deps
            before.add(last)
    return trace


class _Groups:
    """Judges the groups of a rank's events, each once: events that follow each other share them."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._known: dict[int, tuple[bool, bool]] = {}

    def judge(self, ranks: tuple[int, ...]) -> tuple[bool, bool]:
        """Returns whether the rank is in a group, and whether it holds ranks that there are, each once."""
        if id(ranks) not in self._known:  # the trace holds it meanwhile, so that no other one has its place
            whole = len(set(ranks)) == len(ranks) and all(0 <= r < self._world for r in ranks)
            self._known[id(ranks)] = self._rank in ranks, whole
        return self._known[id(ranks)]


def _wrong(event: Event, groups: _Groups) -> str:
    if event.kind == COMPUTE:
        return ""
    if event.kind not in COLLECTIVES:
        return f"the kind is none of {', '.join(COLLECTIVES)}, {COMPUTE}"
    has_rank, whole = groups.judge(event.group)
    if not has_rank and event.kind not in ("send", "recv"):
        return f"this rank, the last number in its file's name, is not in its group {list(event.group[:8])}"
    if not whole:
        return f"its group {list(event.group[:8])} holds a rank twice or one that does not exist"
    for what in (event.sends, event.receives):
        if what and len(what) != len(event.group):
            return f"it has splits for {len(what)} ranks, and its group has {len(event.group)}"
    numbers = (event.in_bytes, event.out_bytes, *event.sends, *event.receives, *event.parts, event.duration_ns or 0)
    return "a size or time is negative" if min(numbers) < 0 else ""
