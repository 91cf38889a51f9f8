"""recjax's own format, with all that a trace holds: `trace.{rank}.json`.

One JSON object for each rank:

  {"format": "recjax-trace", "version": 1, "rank": 0, "world": 8, "about": {...}, "events": [EVENT, ...]}

An EVENT has the fields of `recjax.lab.formats.trace.Event` by their names, without those that have their default.
Integers are bytes, nanoseconds or ranks, as the names say. A change that an older reader would misread raises the
version.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.fields import Fields, parse_file
from recjax.lab.formats.trace import MAX_EVENTS, Event, Trace

FORMAT, VERSION = "recjax-trace", 1
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Event)}


def write(trace: Trace) -> dict[str, bytes]:
    """File name -> content."""
    files = {}
    for rank, events in trace.ranks.items():
        head = {"format": FORMAT, "version": VERSION, "rank": rank, "world": trace.world, "about": dict(trace.about)}
        lines = ",\n".join(json.dumps(_short(event), separators=(",", ":")) for event in events)
        files[f"trace.{rank}.json"] = f'{json.dumps(head)[:-1]}, "events": [\n{lines}\n]}}\n'.encode()
    return files


def _short(event: Event) -> dict[str, Any]:
    return {name: value for name, value in vars(event).items() if value != _DEFAULTS[name]}


def read(files: Mapping[int, Path], parse_one: Callable[[Path], Any] = parse_file) -> Trace:
    """The trace of some ranks' files.

    Raises:
      DataError: a file is damaged, of another format or version, or of another trace than the first one.
    """
    ranks: dict[int, tuple[Event, ...]] = {}
    first: tuple[int, Any] | None = None
    for path in files.values():
        values = Fields(parse_one(path), str(path))
        if values.text("format") != FORMAT:
            raise DataError(f"{path}: the format is {values.text('format')!r}, not {FORMAT!r}.")
        if (version := values.whole("version")) != VERSION:
            raise DataError(
                f"{path}: version {version} of the format, but this recjax reads version {VERSION} alone. Read it with "
                "the recjax that wrote it, or update recjax."
            )
        rank, head = values.whole("rank"), (values.whole("world"), values.fields("about").values)
        if rank in ranks:
            raise DataError(f"{path}: rank {rank} again. Keep each trace in a folder of its own.")
        if first is None:
            first = head
        elif first[0] != head[0]:
            raise DataError(f"{path}: of {head[0]} ranks, but the file before is of {first[0]}: two traces are mixed.")
        events = values.items("events")
        if len(events) > MAX_EVENTS:
            raise DataError(f"{path}: {len(events):,} events, more than the {MAX_EVENTS:,} that a rank may have.")
        ranks[rank] = tuple(_event(Fields(e, f"{path}, event {i}")) for i, e in enumerate(events))
    assert first is not None
    return Trace(first[0], ranks, first[1])


def _event(values: Fields) -> Event:
    if unknown := values.values.keys() - _DEFAULTS:
        raise DataError(f"{values.place}: unknown field {min(unknown)!r}; the fields are {', '.join(_DEFAULTS)}.")
    texts: dict[str, Any] = {name: values.text(name, "") for name in ("phase", "scope", "name", "dtype")}
    lists: dict[str, Any] = {name: values.wholes(name, ()) for name in ("group", "sends", "receives", "deps", "parts")}
    sizes: dict[str, Any] = {name: values.whole(name, 0) for name in ("step", "in_bytes", "out_bytes")}
    times: dict[str, Any] = {name: values.maybe_whole(name) for name in ("start_ns", "duration_ns")}
    return Event(values.whole("id"), values.text("kind"), **texts, **lists, **sizes, **times)
