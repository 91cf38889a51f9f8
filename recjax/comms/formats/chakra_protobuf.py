"""Chakra protobuf execution traces, which ASTRA-sim 2 reads: `trace.{rank}.et`.

A file is a GlobalMetadata and then Nodes, each after its length as a varint (schema/protobuf/et_def.proto of
mlcommons/chakra, version 0.0.4; a test reads what is written here with Google's own protobuf and that schema). Sizes
(`comm_size`) are those of the program, with padding. ASTRA-sim ignores attributes that it does not know, so the rest of
an event travels in such: only times are rounded, to microseconds. Process groups other than all ranks are in
`comm_groups.json`, as ASTRA-sim's `--comm-group-configuration` takes them.

Of the files of others, data dependencies are what waits for what. Control dependencies are so, too, unless they go in
circles with these: Chakra's PyTorch converter puts into them which operation called which.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recjax.comms.formats.fields import Fields, parse
from recjax.comms.formats.files import GROUPS, load
from recjax.comms.formats.issued import process_groups
from recjax.comms.formats.wire import block, fields, integers, number, packed, read_varint, text
from recjax.comms.trace import COMPUTE, ITEM_BYTES, MAX_EVENTS, MAX_RANKS, Event, Trace
from recjax.errors import DataError
from recjax.settings.values import either

VERSION = "0.0.4"
VERSIONS = ("", VERSION, "1.0.0")  # that are read; Chakra's converters write none, its generator the last one
_COMP, _SEND, _RECV, _COLL = 4, 5, 6, 7  # NodeType
_TYPES = {"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
          "reduce_scatter": 7, "barrier": 9}  # CollectiveCommType  # fmt: skip
_KINDS = {number: kind for kind, number in _TYPES.items()} | {8: "reduce_scatter"}
# Fields of AttributeProto's value.
_INT64, _INT64S, _UINT64, _BOOL, _STRING = 9, 10, 13, 27, 29
_SIGNED = (5, 9)  # int32, int64: negative values wrap around
_ZIGZAG = (15, 17)
_OWN_TEXTS, _OWN_LISTS, _OWN_SIZES = (
    ("phase", "scope", "dtype"),
    ("sends", "receives", "parts"),
    ("step", "in_bytes", "out_bytes"),
)


def write(trace: Trace) -> dict[str, bytes]:
    """File name -> content.

    Raises:
      DataError: a kind of event that the format has no node for.
    """
    numbers = process_groups([event.group for _, event in trace.collectives()], trace.world)
    files = {}
    for rank, events in trace.ranks.items():
        messages = [block(1, VERSION.encode())] + [_node(event, numbers, rank) for event in events]
        files[f"trace.{rank}.et"] = b"".join(packed([len(m)]) + m for m in messages)
    if len(numbers) > 1:
        files[GROUPS] = json.dumps({str(n): list(group) for group, n in numbers.items() if n}).encode()
    return files


def _node(event: Event, numbers: Mapping[tuple[int, ...], int], rank: int) -> bytes:
    attributes = [_attribute("is_cpu_op", _BOOL, 0)]
    for name in _OWN_TEXTS:
        if getattr(event, name):
            attributes.append(_attribute(name, _STRING, getattr(event, name)))
    if event.step:
        attributes.append(_attribute("step", _INT64, event.step))
    if event.kind == COMPUTE:
        kind = _COMP
        attributes += [_attribute("num_ops", _INT64, 0), _attribute("tensor_size", _UINT64, 0)]
    elif event.kind in ("send", "recv"):
        kind = _SEND if event.kind == "send" else _RECV
        ends = (rank, event.group[-1]) if kind == _SEND else (event.group[-1], rank)
        attributes.append(_attribute("comm_size", _INT64, event.in_bytes))
        attributes += [_attribute(name, _INT64, end) for name, end in zip(("comm_src", "comm_dst"), ends, strict=True)]
    elif event.kind in _TYPES:
        kind = _COLL
        attributes.append(_attribute("comm_type", _INT64, _TYPES[event.kind]))
        attributes.append(_attribute("comm_size", _INT64, event.in_bytes))
        attributes += [_attribute(name, _INT64, getattr(event, name)) for name in ("in_bytes", "out_bytes")]
        attributes += [_attribute(name, _INT64S, getattr(event, name)) for name in _OWN_LISTS if getattr(event, name)]
        if group := numbers[event.group]:
            attributes.append(_attribute("pg_name", _STRING, str(group)))
    else:
        raise DataError(f"rank {rank}, event {event.id}: Chakra has no node for {event.kind}. Write --format recjax.")
    return b"".join(
        (
            number(1, event.id),
            block(2, event.name.encode()) if event.name else b"",
            number(3, kind),
            block(5, packed(event.deps)) if event.deps else b"",
            number(6, (event.start_ns or 0) // 1000),
            # A time that was measured is never written as one that was not.
            number(7, 0 if event.duration_ns is None else max(1, round(event.duration_ns / 1000))),
            *(block(10, attribute) for attribute in attributes),
        )
    )


def _attribute(name: str, field: int, value: Any) -> bytes:
    head = block(1, name.encode())
    if field == _STRING:
        return head + block(field, value.encode())
    if field == _INT64S:
        return head + block(field, block(1, packed(value)))
    return head + packed([field << 3, value])  # of a oneof, also 0 is written


def read(files: Mapping[int, Path]) -> Trace:
    """The trace of some ranks' files, with the groups of `comm_groups.json` beside them.

    Raises:
      DataError: a file is damaged, or of a version that this recjax does not know.
    """
    beside = next(iter(files.values())).with_name(GROUPS)
    groups: dict[str, tuple[int, ...]] = {}
    if beside.exists():
        described = Fields(parse(load(beside), str(beside)), str(beside))
        groups = {name: described.wholes(name) for name in described.values}
    world = max([max(files) + 1, *(rank + 1 for group in groups.values() for rank in group)])
    if world > MAX_RANKS:
        raise DataError(f"{beside}: rank {world - 1:,}, but a trace has at most {MAX_RANKS:,} ranks.")
    ranks = {rank: _events(load(path), str(path), groups, world, rank) for rank, path in files.items()}
    return Trace(world, ranks, {"source": "Chakra protobuf execution trace"})


def _messages(data: bytes, place: str) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, at = read_varint(data, at, place)
        if at + size > len(data):
            raise DataError(f"{place}: it ends within a node, at byte {len(data):,}. The file is cut off.")
        yield data[at : at + size]
        at += size


@dataclasses.dataclass
class _Node:
    """A Node as it is in the file."""

    id: int = 0
    name: str = ""
    kind: int = 0
    deps: list[int] = dataclasses.field(default_factory=list)
    calls: list[int] = dataclasses.field(default_factory=list)  # control dependencies
    start: int = 0
    duration: int = 0
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)


def _events(data: bytes, path: str, groups: Mapping[str, tuple[int, ...]], world: int, rank: int) -> tuple[Event, ...]:
    messages = _messages(data, path)
    head = list(fields(next(messages, b""), path))
    if not head and not data or any((field, kind) not in ((1, 2), (2, 2)) for field, kind, _ in head):
        raise DataError(f"{path}: there is no metadata at its beginning. The file is damaged, or no Chakra trace.")
    version = "".join(text(value, path) for field, _, value in head if field == 1)
    if version not in VERSIONS:
        raise DataError(f"{path}: version {version[:40]!r} of the format; this recjax reads {either(VERSIONS[1:])}.")
    nodes: list[_Node] = []
    for message in messages:
        nodes.append(_read_node(message, f"{path}, node {len(nodes)}"))
        if len(nodes) > MAX_EVENTS:
            raise DataError(f"{path}: more than the {MAX_EVENTS:,} nodes that a rank may have.")
    ordered = _ordered(nodes, path)
    ids = {node.id: number for number, node in enumerate(ordered)}
    if list(ids) == sorted(ids):
        ids = {id: id for id in ids}  # as they are
    found = tuple(_event(node, ids, groups, world, rank, f"{path}, node {node.id}") for node in ordered)
    if version != VERSION and not any(node.start for node in nodes):  # of others: it has durations alone
        found = tuple(dataclasses.replace(event, start_ns=None) for event in found)
    return found


def _read_node(message: bytes, place: str) -> _Node:
    node = _Node()
    for field, kind, value in fields(message, place):
        if field == 2 and kind == 2:
            node.name = text(value, place)
        elif field in (1, 3, 6, 7) and isinstance(value, int):
            setattr(node, {1: "id", 3: "kind", 6: "start", 7: "duration"}[field], min(value, 2**63 - 1))
        elif field in (4, 5):
            (node.calls if field == 4 else node.deps).extend(integers(kind, value, place))
        elif field == 10 and isinstance(value, bytes):
            name, found = _read_attribute(value, place)
            node.attributes[name] = found
    return node


def _read_attribute(message: bytes, place: str) -> tuple[str, Any]:
    name = ""
    found: Any = None
    for field, kind, value in fields(message, place):
        if field == 1:
            name = text(value, place)
        elif field == _STRING:
            found = text(value, place)
        elif kind == 0 and isinstance(value, int):
            found = value - 2**64 if field in _SIGNED and value >= 2**63 else value
            if field in _ZIGZAG:
                found = value >> 1 ^ -(value & 1)
        elif field in (8, 10, 12, 14) and isinstance(value, bytes):  # lists of int32, int64, uint32, uint64
            found = [n for f, k, v in fields(value, place) if f == 1 for n in integers(k, v, place)]
        elif kind == 1 and field in (21, 25):  # fixed64
            found = value
    return name, found


def _ordered(nodes: list[_Node], path: str) -> list[_Node]:
    """The nodes so that none stands before one that it waits for, else as in the file; DataError if that cannot be."""
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        raise DataError(f"{path}: two nodes have the same id. The file is damaged.")
    with_calls = {n.id: sorted({d for d in n.deps + n.calls if d in by_id}) for n in nodes}  # a window may lack some
    alone = {n.id: sorted({d for d in n.deps if d in by_id}) for n in nodes}
    for deps in (with_calls, alone):
        found, stuck = _sorted(list(by_id), deps)
        if not stuck:
            for node in nodes:
                node.deps = deps[node.id]
            return [by_id[id] for id in found]
    raise DataError(f"{path}: node {stuck[0]} waits for itself, over other nodes. The file is damaged.")


def _sorted(ids: list[int], deps: Mapping[int, list[int]]) -> tuple[list[int], list[int]]:
    """The ids so that none stands before one that it waits for, else as they are; and those that wait in a circle."""
    place = {id: at for at, id in enumerate(ids)}
    if all(place[d] < at for id, at in place.items() for d in deps[id]):
        return ids, []
    after: dict[int, list[int]] = {}
    open_deps = {id: len(deps[id]) for id in ids}
    for id in ids:
        for dep in deps[id]:
            after.setdefault(dep, []).append(id)
    ready = [id for id in reversed(ids) if not open_deps[id]]
    found: list[int] = []
    while ready:
        found.append(ready.pop())
        freed = []
        for later in after.get(found[-1], ()):
            open_deps[later] -= 1
            if not open_deps[later]:
                freed.append(later)
        ready += sorted(freed, key=place.__getitem__, reverse=True)
    return found, [id for id in ids if open_deps[id]]


def _event(
    node: _Node, ids: Mapping[int, int], groups: Mapping[str, tuple[int, ...]], world: int, rank: int, place: str
) -> Event:
    given = Fields(node.attributes, place)
    # Others have attributes of these names that are no texts, such as PyTorch's number of a scope.
    own = {name: node.attributes.get(name) for name in _OWN_TEXTS}
    values: dict[str, Any] = {name: value if isinstance(value, str) else "" for name, value in own.items()}
    values |= {"step": given.whole("step", 0), "deps": tuple(ids[d] for d in node.deps), "name": node.name}
    if node.duration:
        values |= {"start_ns": node.start * 1000, "duration_ns": node.duration * 1000}
    if values["dtype"] not in ITEM_BYTES:
        values["dtype"] = ""
    id = ids[node.id]
    launches = node.attributes.get("is_cpu_op") and "comm_type" not in node.attributes  # and a node of its own sends
    if node.kind not in (_COLL, _SEND, _RECV) or launches:
        return Event(id, COMPUTE, **values)
    size = given.whole("comm_size", 0)
    if node.kind != _COLL:
        peer = given.whole("comm_dst" if node.kind == _SEND else "comm_src")
        kind = "send" if node.kind == _SEND else "recv"
        return Event(id, kind, group=(rank, peer), in_bytes=size, out_bytes=size, **values)
    if (type_number := given.whole("comm_type")) not in _KINDS:
        given.refuse("comm_type", type_number, f"one of {', '.join(map(str, _KINDS))}")
    kind, name = _KINDS[type_number], given.values.get("pg_name", "")
    group = groups.get(str(name)) or tuple(range(world))
    n = len(group)
    values |= {
        "group": group,
        "in_bytes": size,
        "out_bytes": {"all_gather": size * n, "reduce_scatter": size // n}.get(kind, size),
    }
    for key in ("in_bytes", "out_bytes"):
        values[key] = given.whole(key, values[key])
    values |= {key: given.wholes(key, ()) for key in _OWN_LISTS}
    return Event(id, kind, **values)
