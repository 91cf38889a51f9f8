"""PARAM's basic communication trace (facebookresearch/param, `commsTraceReplay --trace-type basic`): `{rank}.json`.

PARAM's newest sources read execution traces alone, which `chakra_et` writes; older ones read both.

A list of operations as one thread issues them: the process groups (`init`), collectives with sizes in elements, and a
`wait` where something needs the result of a collective. Splits of an `all_to_allv` are the true ones, so the buffers
are too: padding is not carried, nor are times of computing and durations; of all-gathers and reductions, which need
equal blocks, the padded sizes are. `markers` hold phase and scope, and from the second step on its number.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.fields import Fields, parse_file
from recjax.lab.formats.issued import Waited, with_waits
from recjax.lab.formats.names import dtype_of, kind_of, written_dtype
from recjax.lab.formats.process_groups import AllRanks, process_groups, world_of
from recjax.lab.formats.trace import COMPUTE, ITEM_BYTES, MAX_EVENTS, Event, Trace

_STEP = re.compile(r"step (\d{1,9})")


def write(trace: Trace) -> dict[str, bytes]:
    """File name -> content."""
    numbers = process_groups([event.group for _, event in trace.collectives()], trace.world)
    start: list[dict[str, Any]] = [
        {"comms": "init", "req": -1, "pg_id": number, "global_ranks": list(group), "world_size": len(group)}
        for group, number in numbers.items()
    ]
    files = {}
    for rank, events in trace.ranks.items():
        lines = list(start)
        for event, waits in with_waits(events):
            pg = {"req": event.id, "pg_id": numbers[event.group], "world_size": len(event.group)}
            lines.append({"comms": "wait", **pg} if waits else {**_operation(event), **pg})
        files[f"{rank}.json"] = ("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n").encode()
    return files


def _operation(event: Event) -> dict[str, Any]:
    size = event.item_bytes
    ragged = event.kind == "all_to_all" and bool(event.sends)
    bytes_in, bytes_out = (sum(event.sends), sum(event.receives)) if ragged else (event.in_bytes, event.out_bytes)
    marks = [event.phase, event.scope, *([f"step {event.step}"] if event.step else [])]
    line: dict[str, Any] = {"comms": "all_to_allv" if ragged else event.kind, "markers": marks}
    if event.kind != "barrier":
        line |= {
            "in_msg_size": bytes_in // size,
            "out_msg_size": bytes_out // size,
            "dtype": written_dtype(event.dtype),
        }
    if ragged:
        line |= {"in_split": [n // size for n in event.sends], "out_split": [n // size for n in event.receives]}
    if event.kind in ("broadcast", "reduce", "gather", "scatter"):
        line["root"] = event.group[0]
    return line | ({} if event.start_ns is None else {"startTime_ns": event.start_ns})


def read(files: Mapping[int, Path], parse_one: Callable[[Path], Any] = parse_file) -> Trace:
    """The trace of some ranks' files.

    Raises:
      DataError: a file is damaged, or holds something that is no communication.
    """
    world = max(files) + 1
    ranks = {}
    for rank, path in files.items():
        lines = parse_one(path)
        if not isinstance(lines, list) or len(lines) > MAX_EVENTS:
            raise DataError(f"{path}: not a PARAM trace, which is a list of at most {MAX_EVENTS:,} operations.")
        ranks[rank] = _events(lines, world, rank, str(path))
        world = world_of(ranks[rank], world)
    return Trace(world, ranks, {"source": "PARAM basic trace"})


def _events(lines: list[Any], world: int, rank: int, path: str) -> tuple[Event, ...]:
    groups: dict[Any, tuple[int, ...]] = {}
    all_ranks, waited = AllRanks(), Waited()
    events: list[Event] = []
    for number, values in enumerate(lines):
        line = Fields(values, f"{path}, operation {number}")
        if "comms" not in line.values and "compute" in line.values:
            name = line.text("compute")
            events.append(Event(len(events), COMPUTE, name=name, deps=waited.issue(len(events), None, line.place)))
            continue
        kind = kind_of(line.text("comms"), line.place)
        pg = line.values.get("pg_id")
        if not (pg is None or isinstance(pg, (int, str))):
            line.refuse("pg_id", pg, "a number or a name")
        if kind == "init":
            groups[pg] = line.wholes("global_ranks")
            continue
        request = _request(line)
        if kind == "wait":
            waited.wait(request, line.place)
            continue
        group = groups.get(pg) or all_ranks.first(line.whole("world_size", world), line.place)
        deps = waited.issue(len(events), request, line.place)
        events.append(_event(line, kind, len(events), group, deps))
    return tuple(events)


def _request(line: Fields) -> Any:
    """Name of an operation in a wait: mostly a number, of late also a list of numbers."""
    value = line.values.get("req")
    if isinstance(value, list) and len(value) < 8 and all(isinstance(v, (int, bool)) for v in value):
        value = tuple(value)
    if not (value is None or isinstance(value, (int, str, tuple))):
        line.refuse("req", value, "a number")
    return value, line.values.get("pg_id") if isinstance(value, tuple) else None


def _event(line: Fields, kind: str, id: int, group: tuple[int, ...], deps: tuple[int, ...]) -> Event:
    marks = [m for m in line.items("markers", []) if isinstance(m, str)] + ["", ""]
    steps = [int(found[1]) for mark in marks[2:] if (found := _STEP.fullmatch(mark))]
    head = Event(id, kind, marks[0], marks[1], step=steps[0] if steps else 0, group=group, deps=deps)
    start: dict[str, Any] = {"start_ns": line.maybe_whole("startTime_ns")}
    if kind == "barrier":
        return dataclasses.replace(head, **start)
    dtype = dtype_of(line.text("dtype"), line.place)
    size = ITEM_BYTES[dtype]
    sizes: dict[str, Any] = {
        "in_bytes": line.whole("in_msg_size") * size,
        "out_bytes": line.whole("out_msg_size") * size,
    }
    splits: dict[str, Any] = {}
    if line.values.get("in_split") or line.values.get("out_split"):
        for name, key in (("sends", "in_split"), ("receives", "out_split")):
            splits[name] = tuple(n * size for n in line.wholes(key, ()))
    return dataclasses.replace(head, dtype=dtype, **sizes, **splits, **start)
