"""Chakra protobuf execution traces, which ASTRA-sim 2 reads: `trace.{rank}.et`.

A file is a GlobalMetadata and then Nodes, each after its length as a varint (schema/protobuf/et_def.proto of
mlcommons/chakra, version 0.0.4; a test reads what is written here by that schema). Sizes (`comm_size`) are those of the
program, with padding. ASTRA-sim ignores attributes that it does not know, so the rest of an event travels in such: only
times are rounded, to microseconds. Process groups other than all ranks are in `comm_groups.json`, as ASTRA-sim's
`--comm-group-configuration` takes them.

Of the files of others, data dependencies are what waits for what. Control dependencies are so, too, unless they go in
circles with these: Chakra's PyTorch converter puts into them which operation called which.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from recjax.errors import DataError
from recjax.lab.formats.fields import Fields, parse_file
from recjax.lab.formats.files import GROUPS, load
from recjax.lab.formats.process_groups import AllRanks, process_groups
from recjax.lab.formats.trace import COMPUTE, ITEM_BYTES, MAX_EVENTS, MAX_RANKS, Event, Trace
from recjax.settings.values import either

VERSION = "0.0.4"
VERSIONS = ("", VERSION, "1.0.0")  # that are read; Chakra's converters write none, its generator the last one
_ID_TWICE = "{}: two nodes have the same id. The file is damaged."
_LEAST_BYTES = 8  # of a node that has a name and a type
_COMP, _SEND, _RECV, _COLL = 4, 5, 6, 7  # NodeType
_TYPES = {  # CollectiveCommType
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
_KINDS = {number: kind for kind, number in _TYPES.items()} | {8: "reduce_scatter"}
_OWN_TEXTS, _OWN_LISTS = ("phase", "scope", "dtype"), ("sends", "receives", "parts")
# The schema, as far as it is read: message -> its fields, number -> (name, type), in capitals one of the oneof `value`.
# Enums are numbers here, so that those of later versions can be read.
_SCHEMA: dict[str, dict[int, tuple[str, str]]] = {
    **{f"{kind}_list": {1: ("values", f"repeated {kind}")} for kind in ("int32", "int64", "uint32", "uint64")},
    "attribute": {
        1: ("name", "string"),
        7: ("INT32", "int32"),
        8: ("INT32S", "int32_list"),
        9: ("INT64", "int64"),
        10: ("INT64S", "int64_list"),
        11: ("UINT32", "uint32"),
        12: ("UINT32S", "uint32_list"),
        13: ("UINT64", "uint64"),
        14: ("UINT64S", "uint64_list"),
        15: ("SINT32", "sint32"),
        17: ("SINT64", "sint64"),
        21: ("FIXED64", "fixed64"),
        25: ("SFIXED64", "sfixed64"),
        27: ("BOOL", "bool"),
        29: ("STRING", "string"),
    },
    "metadata": {1: ("version", "string"), 2: ("attr", "repeated attribute")},
    "node": {
        1: ("id", "uint64"),
        2: ("name", "string"),
        3: ("type", "int32"),
        4: ("ctrl_deps", "repeated uint64"),
        5: ("data_deps", "repeated uint64"),
        6: ("start_micros", "uint64"),
        7: ("duration_micros", "uint64"),
        10: ("attr", "repeated attribute"),
    },
}


def _classes() -> dict[str, Any]:
    """Message -> its class, made of the schema."""
    file = descriptor_pb2.FileDescriptorProto(name="recjax/chakra.proto", package="recjax_chakra", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _SCHEMA.items():
        made = file.message_type.add(name=message)
        for number, (name, kind) in fields.items():
            repeated, _, kind = kind.rpartition(" ")
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=number, label=label)
            if kind in _SCHEMA:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".recjax_chakra.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
            if name.isupper():
                field.oneof_index = 0
        if message == "attribute":
            made.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"recjax_chakra.{name}")) for name in _SCHEMA
    }


_CLASSES = _classes()


def write(trace: Trace) -> dict[str, bytes]:
    """File name -> content.

    Raises:
      DataError: a kind of event that the format has no node for.
    """
    numbers = process_groups([event.group for _, event in trace.collectives()], trace.world)
    files = {}
    for rank, events in trace.ranks.items():
        content = io.BytesIO()
        proto.serialize_length_prefixed(_CLASSES["metadata"](version=VERSION), content)
        for event in events:
            proto.serialize_length_prefixed(_node(event, numbers, rank), content)
        files[f"trace.{rank}.et"] = content.getvalue()
    if len(numbers) > 1:
        files[GROUPS] = json.dumps({str(n): list(group) for group, n in numbers.items() if n}).encode()
    return files


def _node(event: Event, numbers: Mapping[tuple[int, ...], int], rank: int) -> Any:
    # A time that was measured is never written as one that was not.
    micros = 0 if event.duration_ns is None else max(1, round(event.duration_ns / 1000))
    node = _CLASSES["node"](
        id=event.id,
        name=event.name,
        data_deps=event.deps,
        start_micros=(event.start_ns or 0) // 1000,
        duration_micros=micros,
    )
    node.attr.add(name="is_cpu_op", BOOL=False)
    for name in _OWN_TEXTS:
        if getattr(event, name):
            node.attr.add(name=name, STRING=getattr(event, name))
    if event.step:
        node.attr.add(name="step", INT64=event.step)
    if event.kind == COMPUTE:
        node.type = _COMP
        node.attr.add(name="num_ops", INT64=0)
        node.attr.add(name="tensor_size", UINT64=0)
    elif event.kind in ("send", "recv"):
        node.type = _SEND if event.kind == "send" else _RECV
        ends = (rank, event.group[-1]) if node.type == _SEND else (event.group[-1], rank)
        node.attr.add(name="comm_size", INT64=event.in_bytes)
        for name, end in zip(("comm_src", "comm_dst"), ends, strict=True):
            node.attr.add(name=name, INT64=end)
    elif event.kind in _TYPES:
        node.type = _COLL
        node.attr.add(name="comm_type", INT64=_TYPES[event.kind])
        node.attr.add(name="comm_size", INT64=event.in_bytes)
        for name in ("in_bytes", "out_bytes"):
            node.attr.add(name=name, INT64=getattr(event, name))
        for name in _OWN_LISTS:
            if getattr(event, name):
                node.attr.add(name=name, INT64S=_CLASSES["int64_list"](values=getattr(event, name)))
        if group := numbers[event.group]:
            node.attr.add(name="pg_name", STRING=str(group))
    else:
        raise DataError(f"rank {rank}, event {event.id}: Chakra has no node for {event.kind}. Write --format recjax.")
    return node


def read(files: Mapping[int, Path]) -> Trace:
    """The trace of some ranks' files, with the groups of `comm_groups.json` beside them.

    Raises:
      DataError: a file is damaged, or of a version that this recjax does not know.
    """
    beside = next(iter(files.values())).with_name(GROUPS)
    groups: dict[str, tuple[int, ...]] = {}
    if beside.exists():
        described = Fields(parse_file(beside), str(beside))
        groups = {name: described.wholes(name) for name in described.values}
    world = max([max(files) + 1, *(rank + 1 for group in groups.values() for rank in group)])
    if world > MAX_RANKS:
        raise DataError(f"{beside}: rank {world - 1:,}, but a trace has at most {MAX_RANKS:,} ranks.")
    ranks = {rank: _events(load(path), str(path), groups, world, rank) for rank, path in files.items()}
    return Trace(world, ranks, {"source": "Chakra protobuf execution trace"})


def _messages(data: bytes, path: str) -> Iterator[Any]:
    """The metadata, then the nodes."""
    content, kind, place = io.BytesIO(data), _CLASSES["metadata"], path
    for number in range(MAX_EVENTS + 2):
        try:
            message = proto.parse_length_prefixed(kind, content)
        except (DecodeError, ValueError) as error:
            raise DataError(f"{place}: {error}. The file is cut off, damaged or no protobuf trace.") from error
        if message is None:
            return
        yield message
        kind, place = _CLASSES["node"], f"{path}, node {number}"


def _events(data: bytes, path: str, groups: Mapping[str, tuple[int, ...]], world: int, rank: int) -> tuple[Event, ...]:
    messages = _messages(data, path)
    head = next(messages, None)
    if head is None or len(UnknownFieldSet(head)):
        raise DataError(f"{path}: there is no metadata at its beginning. The file is damaged, or no Chakra trace.")
    version = head.version
    if version not in VERSIONS:
        raise DataError(f"{path}: version {version[:40]!r} of the format; this recjax reads {either(VERSIONS[1:])}.")
    nodes = _nodes(messages, len(data), path)
    found = events_of(nodes, path, groups, world, rank)
    if version != VERSION and not any(node.start_micros for node in nodes):  # of others: it has durations alone
        found = tuple(dataclasses.replace(event, start_ns=None) for event in found)
    return found


def _nodes(messages: Iterator[Any], size: int, path: str) -> list[Any]:
    """The nodes of a file of `size` bytes, which make far more memory of it where they hold next to nothing."""
    nodes: list[Any] = []
    ids: set[int] = set()
    for node in messages:
        nodes.append(node)
        ids.add(node.id)
        if len(ids) < len(nodes):
            raise DataError(_ID_TWICE.format(path))
        if _LEAST_BYTES * len(nodes) > size:
            raise DataError(f"{path}: its nodes have fewer than {_LEAST_BYTES} bytes each. The file is damaged.")
    return nodes


def new_node(attributes: Mapping[str, int | bool], **fields: Any) -> Any:
    """A node of the schema, for formats with the same nodes in another writing.

    Args:
      attributes: name -> value.
      fields: of the node, as the schema calls them.
    """
    node = _CLASSES["node"](**fields)
    for name, value in attributes.items():
        node.attr.add(name=name, **{"BOOL" if isinstance(value, bool) else "INT64": value})
    return node


def events_of(
    nodes: list[Any], path: str, groups: Mapping[str, tuple[int, ...]], world: int, rank: int
) -> tuple[Event, ...]:
    """The events of a rank's nodes.

    Args:
      nodes: of the schema, in the order of the file.
      path: of the file, for errors.
      groups: name of a process group -> its ranks.
      world: ranks of the trace.
      rank: whose nodes they are.

    Raises:
      DataError: too many nodes, two with the same id, one that waits for itself, or a damaged one.
    """
    everyone = AllRanks().first(world, path)
    if len(nodes) > MAX_EVENTS:
        raise DataError(f"{path}: more than the {MAX_EVENTS:,} nodes that a rank may have.")
    ordered = _ordered(nodes, path)
    ids = {node.id: number for number, (node, _) in enumerate(ordered)}
    if list(ids) == sorted(ids):
        ids = {id: id for id in ids}  # as they are
    return tuple(
        _event(node, tuple(ids[d] for d in deps), ids[node.id], groups, everyone, rank, f"{path}, node {node.id}")
        for node, deps in ordered
    )


def _ordered(nodes: list[Any], path: str) -> list[tuple[Any, list[int]]]:
    """The nodes so that none stands before one that it waits for, else as in the file, each with those it waits for.

    DataError if that cannot be.
    """
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        raise DataError(_ID_TWICE.format(path))
    alone = {n.id: sorted({d for d in n.data_deps if d in by_id}) for n in nodes}  # a window may lack some
    with_calls = {n.id: sorted({*alone[n.id], *(d for d in n.ctrl_deps if d in by_id)}) for n in nodes}
    for deps in (with_calls, alone):
        found, stuck = _sorted(list(by_id), deps)
        if not stuck:
            return [(by_id[id], deps[id]) for id in found]
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


def _value(attribute: Any) -> Any:
    """Value of an attribute; None if it is of a type that none of ours has."""
    field = attribute.WhichOneof("value")
    value: Any = None if field is None else getattr(attribute, field)
    return list(value.values) if hasattr(value, "values") else value


def _event(
    node: Any,
    deps: tuple[int, ...],
    id: int,
    groups: Mapping[str, tuple[int, ...]],
    everyone: tuple[int, ...],
    rank: int,
    place: str,
) -> Event:
    given = Fields({one.name: _value(one) for one in node.attr}, place)
    # Others have attributes of these names that are no texts, such as PyTorch's number of a scope.
    own = {name: given.values.get(name) for name in _OWN_TEXTS}
    values: dict[str, Any] = {name: value if isinstance(value, str) else "" for name, value in own.items()}
    values |= {"step": given.whole("step", 0), "deps": deps, "name": node.name}
    if node.duration_micros:
        values |= {"start_ns": node.start_micros * 1000, "duration_ns": node.duration_micros * 1000}
    if values["dtype"] not in ITEM_BYTES:
        values["dtype"] = ""
    launches = given.values.get("is_cpu_op") and "comm_type" not in given.values  # and a node of its own sends
    if node.type not in (_COLL, _SEND, _RECV) or launches:
        return Event(id, COMPUTE, **values)
    size = given.whole("comm_size", 0)
    if node.type != _COLL:
        peer = given.whole("comm_dst" if node.type == _SEND else "comm_src")
        kind = "send" if node.type == _SEND else "recv"
        return Event(id, kind, group=(rank, peer), in_bytes=size, out_bytes=size, **values)
    if (type_number := given.whole("comm_type")) not in _KINDS:
        given.refuse("comm_type", type_number, f"one of {', '.join(map(str, _KINDS))}")
    kind, name = _KINDS[type_number], given.values.get("pg_name", "")
    group = groups.get(str(name)) or everyone
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
