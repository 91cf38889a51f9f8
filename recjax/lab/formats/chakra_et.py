"""Chakra host execution traces, as PyTorch's ExecutionTraceObserver writes them: JSON, a file for each rank.

What is read of one: nodes called `record_param_comms`, with their tensors and splits, the process groups, and the names
of the nodes around them, which tell the phase. Schemas 1.0.1 (PyTorch's own) to 1.1.1-chakra.0.0.4; 1.1.1 is written
(`rank-{rank}.json`), which PARAM's `comm_replay --trace-type et` reads. Like PARAM's basic format it says what waits
for what as one thread does, carries the true splits of an all_to_allv and no padding, and here also no times.
Steps are the numbers of `ProfilerStep#N` around; what no such node is around, as in backward threads, is of the step of
what stands before it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.fields import Fields, is_whole, parse, parse_file, shown
from recjax.lab.formats.issued import Waited, with_waits
from recjax.lab.formats.names import dtype_of, kind_of, written_dtype
from recjax.lab.formats.process_groups import AllRanks, process_groups, world_of
from recjax.lab.formats.trace import JOINED, MAX_EVENTS, Event, Trace
from recjax.utils.phases import PHASES

OLD = "1.0.1"
SCHEMAS = (
    OLD,
    "1.0.2-chakra.0.0.4",
    "1.0.3-chakra.0.0.4",
    "1.0.4-chakra.0.0.4",
    "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4",
)
# Parts of the names that TorchRec and PyTorch give to what is around a collective.
_AROUND = {
    "all2all_data": "id_exchange",
    "alltoall_fwd": "row_exchange",
    "reduce_scatter_fwd": "row_exchange",
    "alltoall_bwd": "grad_exchange",
    "reduce_scatter_bwd": "grad_exchange",
    "AccumulateGrad": "dense_grads",
}
_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")  # as PyTorch's profiler calls what is around a step
_PHASE = f"(?:{'|'.join(PHASES)})"
_OWN = re.compile(rf"## ({_PHASE}(?:{re.escape(JOINED)}{_PHASE})*)(?:: (.*))? ##$")


def read(files: Mapping[int, Path], parse_one: Callable[[Path], Any] = parse_file) -> Trace:
    """The trace of some ranks' files.

    Raises:
      DataError: a file is damaged, or of a schema that this version does not know.
    """
    world, ranks, schemas = max(files) + 1, {}, set()
    for rank, path in files.items():
        whole = Fields(parse_one(path), str(path))
        if (schema := whole.text("schema")) not in SCHEMAS:
            raise DataError(f"{path}: schema {schema[:60]!r} is not known; this recjax reads {', '.join(SCHEMAS)}.")
        schemas.add(schema)
        nodes = whole.items("nodes")
        if len(nodes) > MAX_EVENTS:
            raise DataError(f"{path}: {len(nodes):,} nodes, more than the {MAX_EVENTS:,} that a trace may have.")
        read_one = [_node(n, i, schema, str(path)) for i, n in enumerate(nodes)]
        ranks[rank] = _events(sorted(read_one, key=lambda n: n.whole("id")), world, rank)
        world = world_of(ranks[rank], world)
    return Trace(world, ranks, {"source": f"Chakra host execution trace {', '.join(sorted(schemas))}"})


def _node(values: Any, index: int, schema: str, path: str) -> Fields:
    """A node with the keys of schema 1.0.1, whichever it has."""
    node = Fields(values, f"{path}, node {index}")
    flat: dict[str, Any] = {"id": node.whole("id"), "name": node.text("name")}
    node.place = f"{path}, node {flat['id']}"
    if schema == OLD:
        flat |= {key: values.get(key) for key in ("inputs", "input_types", "outputs", "output_types", "parent")}
    else:
        flat["parent"] = values.get("ctrl_deps")
        for side in ("input", "output"):
            part = node.fields(f"{side}s").values
            flat |= {f"{side}s": part.get("values"), f"{side}_types": part.get("types")}
    return Fields(flat, node.place)


def _events(nodes: list[Fields], world: int, rank: int) -> tuple[Event, ...]:
    by_id = {node.values["id"]: node for node in nodes}
    groups: dict[Any, tuple[int, ...]] = {}
    all_ranks, waited = AllRanks(), Waited()
    events: list[Event] = []
    steps: list[int | None] = []
    meanings: dict[int, _Meaning] = {}
    for node in nodes:
        if "process_group:init" in node.text("name"):
            groups |= _groups(node, all_ranks)
        if node.text("name") != "record_param_comms":
            continue
        values = node.items("inputs")
        # Operations without a tensor (wait, barrier) lack it in front.
        shift = 0 if len(values) > 4 and isinstance(values[4], str) else 1
        if len(values) < 5 - shift or not isinstance(values[4 - shift], str):
            raise DataError(f"{node.place}: its inputs hold no collective's name where one should be.")
        kind = kind_of(values[4 - shift], node.place)
        request, pg = _key(values[1 - shift], node), _key(values[2 - shift], node)
        if kind == "init":
            continue
        if kind == "wait":
            waited.wait(request, node.place)
            continue
        group = groups.get(pg[0] if isinstance(pg, tuple) and pg else pg) or all_ranks.first(world, node.place)
        phase, scope, found_step = _around(node, by_id, meanings)
        steps.append(found_step)
        head = Event(len(events), kind, phase, scope, str(values[4 - shift]), group=group)
        if kind in ("send", "recv"):
            head = dataclasses.replace(head, group=_pair(values[3 - shift], group, rank, node))
        sizes = {} if kind == "barrier" else _sizes(node, values, kind, len(group))
        deps = waited.issue(head.id, request, node.place)
        events.append(dataclasses.replace(head, deps=deps, **sizes))
    step = next((number for number in steps if number is not None), 0)
    for place, number in enumerate(steps):
        step = step if number is None else number
        events[place] = dataclasses.replace(events[place], step=step)
    return tuple(events)


def _key(value: Any, node: Fields) -> Any:
    if isinstance(value, list) and len(value) < 8 and all(isinstance(v, (int, str)) for v in value):
        return tuple(value)
    if isinstance(value, (int, str)):
        return value
    raise DataError(f"{node.place}: {shown(value)} should be the number of a request or of a process group.")


def _pair(peer: Any, group: tuple[int, ...], rank: int, node: Fields) -> tuple[int, ...]:
    if not is_whole(peer) or peer >= len(group):
        raise DataError(f"{node.place}: its peer is {shown(peer)}, which is no rank of its group.")
    return rank, group[peer]


def _groups(node: Fields, all_ranks: AllRanks) -> dict[Any, tuple[int, ...]]:
    """Process groups by their names and numbers."""
    values = node.items("inputs")
    if not values or not isinstance(values[0], str):
        return {}
    try:
        described = parse(values[0].encode(), node.place)
    except DataError:  # PyTorch cuts long descriptions off
        return {}
    found: dict[Any, tuple[int, ...]] = {}
    for one in described if isinstance(described, list) else ():
        group = Fields(one, f"{node.place}, process groups")
        ranks = group.wholes("ranks", ())
        if not ranks and (size := group.whole("group_size", 0)) <= 2**16:
            ranks = all_ranks.first(size, node.place)
        for key in ("pg_name", "uid", "backend_id"):
            if isinstance(group.values.get(key), (int, str)):
                found[group.values[key]] = ranks
    return found


def _sizes(node: Fields, values: list[Any], kind: str, members: int) -> dict[str, Any]:
    dtype, in_bytes, item = _tensors(node, "input")
    _, out_bytes, _ = _tensors(node, "output")
    found: dict[str, Any] = {"dtype": dtype, "in_bytes": in_bytes, "out_bytes": out_bytes}
    if kind == "all_to_all" and len(values) > 6 and (values[5] or values[6]):
        lists = Fields({"in_split": values[5], "out_split": values[6]}, node.place)
        for name, key, total in (("sends", "in_split", in_bytes), ("receives", "out_split", out_bytes)):
            elements = lists.wholes(key)
            if len(elements) not in (0, members):
                lists.refuse(key, elements, f"a list of {members} numbers, one for each rank of the group")
            elements = elements or (total // item // members,) * members
            found[name] = tuple(n * item for n in elements)
    return found


def _tensors(node: Fields, side: str) -> tuple[str, int, int]:
    """(element type, bytes, bytes of an element) of the tensors that go in or come out: one, a list, or lists."""
    types, values = node.items(f"{side}_types"), node.items(f"{side}s")
    if not types or not values or not isinstance(types[0], str):
        raise DataError(f"{node.place}: a collective without {side} tensors.")
    found = re.search(r"Tensor\(([\w: ]+)\)", types[0])
    if not found:
        raise DataError(f"{node.place}: its {side} is a {types[0][:60]}, and should be a tensor.")
    tensors = values[0]
    for _ in range(types[0].count("GenericList")):
        tensors = tensors[0] if isinstance(tensors, list) and len(tensors) == 1 and _nested(tensors[0]) else tensors
    tensors = tensors if isinstance(tensors, list) and tensors and isinstance(tensors[0], list) else [tensors]
    total, item = 0, 1
    for tensor in tensors:
        if not isinstance(tensor, list) or len(tensor) < 5 or not is_whole(tensor[3]) or not is_whole(tensor[4]):
            raise DataError(
                f"{node.place}: {shown(tensor)} should be a tensor: [id, storage, offset, elements, bytes]."
            )
        total, item = total + tensor[3] * tensor[4], tensor[4] or 1
    return dtype_of(found.group(1), node.place), total, item


def _nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


@dataclasses.dataclass(frozen=True)
class _Meaning:
    """Step, phase and scope that the name of a node gives to the collectives in it.

    Attributes:
      step: number of the step that it is; None if it is none.
      label: the text of `## text ##`, or "".
      phase: or "".
      scope: of a node that is a phase of recjax's; None if it is none.
    """

    step: int | None
    label: str
    phase: str
    scope: str | None


def _meaning(name: str) -> _Meaning:
    step = _STEP.search(name.strip("# "))
    label = name.strip("# ") if name.startswith("##") else ""
    if own := _OWN.match(name):
        phase, scope = own.group(1), own.group(2) or ""
    else:
        phase, scope = next((of for part, of in _AROUND.items() if part in name), ""), None
    return _Meaning(int(step.group(1)) if step else None, label, phase, scope)


def _around(node: Fields, by_id: Mapping[int, Fields], meanings: dict[int, _Meaning]) -> tuple[str, str, int | None]:
    """(phase, scope, step) from the names around a node; the scope is the innermost `## label ##`.

    `meanings` are those of the nodes seen so far, by their ids: a long name is read once, however much is in it.
    """
    label = phase = ""
    scope: str | None = None
    for _ in range(64):  # what is around a collective; parents may also go in a circle
        parent = node.values["parent"]
        if not is_whole(parent) or parent == node.values["id"] or parent not in by_id:
            break
        node = by_id[parent]
        if parent not in meanings:
            meanings[parent] = _meaning(node.text("name"))
        meaning = meanings[parent]
        if meaning.step is not None:
            return phase, label if scope is None else scope, meaning.step
        if phase:
            continue
        phase = meaning.phase
        if meaning.scope is not None:
            scope = meaning.scope
            continue
        label = label or meaning.label
        scope = label if phase else None
    return phase, label if scope is None else scope, None


# What schema 1.1.1 calls our element types, and a collective of whole tensors.
_TENSORS = {
    "Float": "float",
    "Double": "double",
    "Half": "c10::Half",
    "BFloat16": "c10::BFloat16",
    "Int": "int",
    "Long": "long int",
    "Byte": "unsigned char",
    "Char": "signed char",
    "Bool": "bool",
}
_NAMES = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}
_ROOT, _THREAD = 1, 2


def write(trace: Trace) -> dict[str, bytes]:
    """File name -> content."""
    numbers = process_groups([event.group for _, event in trace.collectives()], trace.world)
    described = [
        {
            "pg_name": str(number),
            "pg_desc": "recjax" if number else "default_pg",
            "ranks": list(group),
            "group_size": len(group),
            "group_count": len(numbers),
        }
        for group, number in numbers.items()
    ]
    files = {}
    for rank, events in trace.ranks.items():
        nodes = [
            _written(_ROOT, _ROOT, "[pytorch|profiler|execution_trace|process]"),
            _written(_THREAD, _ROOT, "[pytorch|profiler|execution_trace|thread]"),
            _written(3, _THREAD, "## process_group:init ##", [(json.dumps(described), [], "String")]),
        ]
        in_step, step = _THREAD, -1 if any(event.step for event in events) else 0
        for event, waits in with_waits(events):
            if not waits and event.step != step:
                in_step, step = len(nodes) + 1, event.step
                nodes.append(_written(in_step, _THREAD, f"ProfilerStep#{step}"))
            parent = in_step
            if not waits and event.phase:
                parent = len(nodes) + 1
                label = f"{event.phase}: {event.scope}" if event.scope else event.phase
                nodes.append(_written(parent, in_step, f"## {label} ##"))
            pg = described[numbers[event.group]]
            nodes.append(_communication(len(nodes) + 1, parent, event, pg, rank, waits))
        whole = {"schema": SCHEMAS[-1], "pid": rank + 1, "time": "", "start_ts": 0, "nodes": nodes}
        files[f"rank-{rank}.json"] = json.dumps(whole).encode()
    return files


def _communication(id: int, parent: int, event: Event, pg: Mapping[str, Any], rank: int, wait: bool) -> dict[str, Any]:
    """The node of a collective, or of the wait for it."""
    ragged = event.kind == "all_to_all" and bool(event.sends) and not wait
    name = "wait" if wait else "all_to_allv" if ragged else _NAMES.get(event.kind, event.kind)
    item = event.item_bytes
    splits: tuple[tuple[int, ...], ...] = (event.sends, event.receives) if ragged else ((), ())
    lists = [[n // item for n in split] for split in splits]
    sizes = [sum(split) for split in splits] if ragged else [event.in_bytes, event.out_bytes]
    inputs: list[Any] = [
        ([event.id, False], [[], []], "GenericList[Int,Bool]"),
        ([pg["pg_name"], pg["pg_desc"]], [[], []], "GenericList[String,String]"),
        (event.group.index(rank), [], "Int"),
        (name, [], "String"),
    ]
    inputs += [(split, [[] for _ in split], f"GenericList[{','.join(['Int'] * len(split))}]") for split in lists]
    outputs: list[Any] = []
    dtype = written_dtype(event.dtype)
    if not wait and event.kind != "barrier":
        tensors: list[Any] = []
        for number, size in enumerate(sizes):
            tensor = [2 * id + number, 2 * id + number, 0, size // item, item, "cuda:0"]
            shape, kind = [size // item], f"Tensor({_TENSORS[dtype]})"
            listed = event.kind == "all_reduce"
            tensors.append(([tensor], [shape], f"GenericList[{kind}]") if listed else (tensor, shape, kind))
        inputs, outputs = [tensors[0], *inputs], [tensors[1]]
    about = {
        "collective_name": name,
        "dtype": dtype,
        "in_msg_nelems": sizes[0] // item,
        "out_msg_nelems": sizes[1] // item,
        "in_split_size": json.dumps(lists[0]),
        "out_split_size": json.dumps(lists[1]),
        "global_rank_start": -1,
        "global_rank_stride": -1,
        "pg_name": pg["pg_name"],
        "pg_desc": pg["pg_desc"],
        "pg_size": len(event.group),
    }
    return _written(id, parent, "record_param_comms", inputs, outputs, about)


_PLAIN: dict[str, Any] = {  # attributes that every node has
    "rf_id": 0,
    "fw_parent": 0,
    "seq_id": -1,
    "scope": 7,
    "tid": 1,
    "fw_tid": 0,
    "op_schema": "",
    "kernel_backend": "",
    "kernel_file": "",
}


def _written(
    id: int,
    parent: int,
    name: str,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A node of schema 1.1.1; inputs and outputs are (value, shape, type)."""
    sides: dict[str, Any] = {}
    for side, given in (("inputs", inputs), ("outputs", outputs)):
        strides = [[1] if kind.startswith("Tensor") else [[1]] if "Tensor" in kind else [] for _, _, kind in given]
        values, shapes, types = ([one[i] for one in given] for i in range(3))
        sides[side] = {"values": values, "shapes": shapes, "types": types, "strides": strides}
    attrs = []
    for key, value in (_PLAIN | {"rf_id": id} | dict(about or {})).items():
        kind = "string" if isinstance(value, str) else "uint64" if value >= 0 else "int64"
        attrs.append({"name": key, "type": kind, "value": value})
    return {"id": id, "name": name, "ctrl_deps": parent, **sides, "attrs": attrs}
