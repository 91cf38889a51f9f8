"""Formats of communication traces: round trips, hand-made foreign files, and Google's protobuf as another reader."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_support import ALL, HALVES, by_hand, save

from recjax.comms.formats import FORMATS, read_trace
from recjax.comms.formats.issued import with_waits
from recjax.comms.trace import COMPUTE, ITEM_BYTES, Event, Trace
from recjax.errors import ConfigError, DataError

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def back(trace: Trace, folder: Path, format: str) -> Trace:
    return read_trace(save(trace, folder, format), format)


def test_recjax_json_carries_everything(tmp_path):
    trace = by_hand()
    read = back(trace, tmp_path / "t", "recjax")
    assert (read.world, read.ranks) == (4, trace.ranks)
    assert read.about == {**trace.about, "label": "t", "format": "recjax"}


@st.composite
def traces(draw) -> Trace:
    world = draw(st.integers(1, 4))
    times = st.none() | st.integers(1, 10**12)
    ranks = {}
    for rank in range(world):
        events: list[Event] = []
        for id in sorted(draw(st.sets(st.integers(0, 2**40), max_size=5))):
            others = draw(st.permutations(range(world)))
            group = (rank, *(r for r in others[: draw(st.integers(0, world))] if r != rank))
            sizes = st.integers(0, 2**40)
            splits = st.just(()) | st.tuples(*[sizes] * len(group))
            deps = tuple(sorted(draw(st.sets(st.sampled_from([e.id for e in events]), max_size=3)) if events else ()))
            kind = draw(st.sampled_from(["all_to_all", "all_reduce", "all_gather", "reduce_scatter", "barrier"]))
            text = st.text(st.characters(codec="utf-8"), max_size=6)
            duration = draw(times)
            start = None if duration is None else draw(st.integers(0, 10**12))
            events.append(
                Event(id, kind, draw(text), draw(text), draw(text), draw(st.integers(0, 3)),
                      draw(st.sampled_from(sorted(ITEM_BYTES))), group, draw(sizes), draw(sizes), draw(splits),
                      draw(splits), deps, start, duration, draw(st.lists(sizes, max_size=3).map(tuple)))
            )  # fmt: skip
        ranks[rank] = tuple(events)
    return Trace(world, ranks)


@QUICK
@given(traces())
def test_any_trace_comes_back_in_recjax_json(tmp_path_factory, trace):
    assert back(trace, tmp_path_factory.mktemp("t"), "recjax").ranks == trace.ranks


@QUICK
@given(traces())
def test_any_trace_comes_back_in_chakra_protobuf_in_microseconds(tmp_path_factory, trace):
    def rounded(event: Event) -> Event:
        if event.duration_ns is None or event.start_ns is None:
            return event
        micros = max(1, round(event.duration_ns / 1000))
        return dataclasses.replace(event, start_ns=event.start_ns // 1000 * 1000, duration_ns=micros * 1000)

    expected = {rank: tuple(map(rounded, events)) for rank, events in trace.ranks.items()}
    assert back(trace, tmp_path_factory.mktemp("t"), "chakra-et").ranks == expected


@pytest.mark.parametrize("format", ["param", "chakra-json"])
def test_what_formats_with_waits_carry(tmp_path, format):
    """Kinds, groups, types and true splits, renumbered from 0; no computing, padding, steps, or (Chakra) times."""
    read = back(by_hand(), tmp_path, format)
    for rank, events in read.ranks.items():
        sends = tuple(8 * (rank + peer) for peer in ALL)
        half = HALVES[rank // 2]
        found = [(e.kind, e.phase, e.scope, e.dtype, e.group, e.in_bytes, e.out_bytes, e.sends) for e in events]
        assert found == [
            ("all_to_all", "row_exchange", "tables", "float32", ALL, sum(sends), sum(sends), sends),
            ("all_reduce", "dense_grads", "", "float32", half, 400, 400, ()),
            ("all_gather", "id_exchange", "", "int32", ALL, 16, 64, ()),
            ("reduce_scatter", "dense_grads", "", "bfloat16", half, 64, 32, ()),
            ("all_reduce", "finite_check", "", "int32", ALL, 4, 4, ()),
        ]
        # the last waits for the all-gather and, over the computing, for the reduce-scatter
        assert [e.deps for e in events] == [(), (), (), (0,), (2, 3)]
        assert [e.start_ns for e in events] == ([5000, None, None, None, 16000] if format == "param" else [None] * 5)
    again = back(read, tmp_path / "again", format)
    assert again.ranks == read.ranks


def test_waits_stand_before_what_needs_them_and_come_once():
    events = by_hand().ranks[0]
    order = [what if isinstance(what, int) else what.kind for what in with_waits(events)]
    assert order == ["all_to_all", "all_reduce", "all_gather", 2, "reduce_scatter", 4, 5, "all_reduce", 3, 7]


def test_param_lines_by_hand(tmp_path):
    group = (0, 1)
    event = Event(5, "all_to_all", "row_exchange", "x", "", 0, "float32", group, 64, 64, (8, 16), (8, 4), start_ns=7)
    other = dataclasses.replace(event, sends=(4, 8), receives=(16, 8))
    folder = save(Trace(2, {0: (event,), 1: (other,)}), tmp_path, "param")
    assert sorted(p.name for p in folder.iterdir()) == ["0.json", "1.json"]
    assert json.loads((folder / "0.json").read_text()) == [
        {"comms": "init", "req": -1, "pg_id": 0, "global_ranks": [0, 1], "world_size": 2},
        {"comms": "all_to_allv", "markers": ["row_exchange", "x"], "in_msg_size": 6, "out_msg_size": 3,
         "dtype": "Float", "in_split": [2, 4], "out_split": [2, 1], "startTime_ns": 7, "req": 5, "pg_id": 0,
         "world_size": 2},
        {"comms": "wait", "req": 5, "pg_id": 0, "world_size": 2},
    ]  # fmt: skip


def test_a_foreign_param_trace(tmp_path):
    lines = [
        {"comms": "init", "pg_id": 0, "global_ranks": [0, 1, 2], "world_size": 3, "req": -1},
        {"comms": "init", "pg_id": 7, "global_ranks": [0, 2], "world_size": 2, "req": -1},
        {"compute": "gemm", "mm_dim": 100, "count": 3},
        {"comms": "AllReduce", "req": 0, "in_msg_size": 10, "out_msg_size": 10, "dtype": "half", "pg_id": 7},
        {"comms": "alltoall", "req": 1, "in_msg_size": 6, "out_msg_size": 6, "dtype": "Long", "pg_id": 0},
        {"comms": "wait", "req": 1},
        {"comms": "barrier", "req": 2, "pg_id": 0},
        {"comms": "wait", "req": 99},
    ]
    (tmp_path / "0.json").write_text(json.dumps(lines))
    trace = read_trace(tmp_path)
    assert (trace.world, trace.about["format"]) == (3, "param")
    assert trace.ranks == {
        0: (
            Event(0, COMPUTE, name="gemm"),
            Event(1, "all_reduce", dtype="float16", group=(0, 2), in_bytes=20, out_bytes=20),
            Event(2, "all_to_all", dtype="int64", group=(0, 1, 2), in_bytes=48, out_bytes=48),
            Event(3, "barrier", group=(0, 1, 2), deps=(2,)),
        )
    }


def node(id: int, parent: int, name: str, inputs=(), types=(), outputs=(), output_types=()) -> dict[str, Any]:
    """A node as PyTorch's own schema 1.0.1 has them."""
    return {"name": name, "id": id, "rf_id": id, "parent": parent, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1,
            "fw_tid": 0, "op_schema": "", "inputs": list(inputs), "input_types": list(types),
            "input_shapes": [[] for _ in inputs], "outputs": list(outputs), "output_types": list(output_types),
            "output_shapes": [[] for _ in outputs]}  # fmt: skip


def pytorch(rank: int) -> dict[str, Any]:
    """What a DLRM of TorchRec records in one step on two GPUs, cut down to what matters: ids, rows, gradients."""
    ints = "GenericList[Int,Int]"
    ids, rows = [[9, 9, 0, 10, 8, "cuda:0"]], [4, 6] if rank == 0 else [3, 5]
    got = [4, 3] if rank == 0 else [6, 5]
    nodes = [
        node(2, 1, "[pytorch|profiler|execution_graph|thread]"),
        node(3, 2, "## sparse_data_dist ##"),
        node(4, 3, "## all2all_data:kjt values ##"),
        # the operation around it is written behind it, as PyTorch does
        node(6, 5, "record_param_comms", [[9, 9, 0, sum(rows), 8, "cuda:0"], 70, 940, rank, "all_to_allv", rows, got],
             ["Tensor(long int)", "Int", "Int", "Int", "String", ints, ints],
             [[10, 10, 0, sum(got), 8, "cuda:0"]], ["Tensor(long int)"]),
        node(5, 4, "c10d::alltoall_base_"),
        node(8, 2, "record_param_comms", [70, 0, rank, "wait", [], []], ["Int", "Int", "Int", "String"]),
        node(9, 2, "All2All_Pooled_Req"),
        node(10, 9, "## alltoall_fwd_single ##"),
        node(11, 10, "record_param_comms", [[1, 1, 0, 64, 4, "cuda:0"], 71, 940, rank, "all_to_allv", [], [32, 32]],
             ["Tensor(float)", "Int", "Int", "Int", "String", "GenericList[]", ints],
             [[2, 2, 0, 64, 4, "cuda:0"]], ["Tensor(float)"]),
        node(12, 2, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
        node(13, 12, "record_param_comms", [[[3, 3, 0, 100, 4, "cuda:0"]], 72, 940, rank, "allreduce", [], []],
             ["GenericList[Tensor(float)]", "Int", "Int", "Int", "String", "GenericList[]", "GenericList[]"],
             [[[3, 3, 0, 100, 4, "cuda:0"]]], ["GenericList[Tensor(float)]"]),
    ]  # fmt: skip
    del ids
    return {"schema": "1.0.1", "pid": 1, "time": "", "start_ts": 1, "nodes": nodes, "finish_ts": 2}


def test_a_foreign_execution_trace_of_pytorch(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"dlrm_eg_{rank}.json").write_text(json.dumps(pytorch(rank)))
    trace = read_trace(tmp_path)
    assert (trace.world, trace.about["format"]) == (2, "chakra-json")
    assert trace.ranks[0] == (
        Event(0, "all_to_all", "id_exchange", "all2all_data:kjt values", "all_to_allv", 0, "int64", (0, 1), 80, 56,
              (32, 48), (32, 24)),
        Event(1, "all_to_all", "row_exchange", "alltoall_fwd_single", "all_to_allv", 0, "float32", (0, 1), 256, 256,
              (128, 128), (128, 128), deps=(0,)),
        Event(2, "all_reduce", "dense_grads", "", "allreduce", 0, "float32", (0, 1), 400, 400, deps=(0,)),
    )  # fmt: skip
    assert trace.ranks[1][0].sends == (24, 40) and trace.ranks[1][0].receives == (48, 40)


def test_a_written_execution_trace_reads_as_param_reads_it(tmp_path):
    """Positions and keys in which PARAM's comm_replay finds things in schema 1.1.1, restated here."""
    folder = save(by_hand(), tmp_path, "chakra-json")
    whole = json.loads((folder / "rank-2.json").read_text())
    assert whole["schema"] == "1.1.1-chakra.0.0.4" and isinstance(whole["pid"], int)
    by_id = {n["id"]: n for n in whole["nodes"]}
    for n in whole["nodes"]:
        assert n.keys() == {"id", "name", "ctrl_deps", "inputs", "outputs", "attrs"}
        assert n["ctrl_deps"] in by_id
        for side in (n["inputs"], n["outputs"]):
            assert len(side["values"]) == len(side["shapes"]) == len(side["types"]) == len(side["strides"])
        assert {"rf_id", "tid", "op_schema", "scope", "seq_id"} <= {a["name"] for a in n["attrs"]}
    (init,) = (n for n in whole["nodes"] if n["name"] == "## process_group:init ##")
    groups = {pg["pg_name"]: pg for pg in json.loads(init["inputs"]["values"][0])}
    assert [pg["ranks"] for pg in groups.values()] == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert {pg["group_count"] for pg in groups.values()} == {3}
    comms = [n for n in whole["nodes"] if n["name"] == "record_param_comms"]
    first = comms[0]["inputs"]
    assert first["types"][0] == "Tensor(float)" and first["values"][0][3] == (16 + 24 + 32 + 40) // 4
    assert first["values"][1:] == [[2, False], ["0", "default_pg"], 2, "all_to_allv", [4, 6, 8, 10], [4, 6, 8, 10]]
    reduce = comms[1]["inputs"]
    assert reduce["types"][0] == "GenericList[Tensor(float)]" and reduce["values"][0][0][3] == 100
    assert reduce["values"][1:5] == [[3, False], ["2", "recjax"], 0, "allreduce"]
    wait = next(n for n in comms if n["inputs"]["values"][3] == "wait")
    assert wait["inputs"]["values"][:2] == [[2, False], ["0", "default_pg"]]
    attrs = {a["name"]: a["value"] for a in comms[0]["attrs"]}
    assert attrs["collective_name"] == "all_to_allv" and attrs["in_split_size"] == "[4, 6, 8, 10]"
    assert (attrs["dtype"], attrs["in_msg_nelems"], attrs["pg_name"], attrs["pg_size"]) == ("Float", 28, "0", 4)


def published():
    """Classes for the messages of Chakra's published schema (et_def.proto), made by protobuf."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for number, field, type, *more in fields:
            one = made.field.add(name=field, number=number, label=kind.LABEL_OPTIONAL)
            if isinstance(type, str):
                one.type, one.type_name = kind.TYPE_MESSAGE, f".ChakraProtoMsg.{type}"
            else:
                one.type = type
            if "repeated" in more:
                one.label = kind.LABEL_REPEATED
        return made

    message("Int64List", (1, "values", kind.TYPE_INT64, "repeated"))
    attribute = message(
        "AttributeProto", (1, "name", kind.TYPE_STRING), (2, "doc_string", kind.TYPE_STRING),
        (3, "double_val", kind.TYPE_DOUBLE), (7, "int32_val", kind.TYPE_INT32), (9, "int64_val", kind.TYPE_INT64),
        (10, "int64_list", "Int64List"), (11, "uint32_val", kind.TYPE_UINT32), (13, "uint64_val", kind.TYPE_UINT64),
        (17, "sint64_val", kind.TYPE_SINT64), (21, "fixed64_val", kind.TYPE_FIXED64), (27, "bool_val", kind.TYPE_BOOL),
        (29, "string_val", kind.TYPE_STRING),
    )  # fmt: skip
    attribute.oneof_decl.add(name="value")
    for field in attribute.field[2:]:
        field.oneof_index = 0
    message("GlobalMetadata", (1, "version", kind.TYPE_STRING), (2, "attr", "AttributeProto", "repeated"))
    message(
        "Node", (1, "id", kind.TYPE_UINT64), (2, "name", kind.TYPE_STRING), (3, "type", kind.TYPE_INT32),
        (4, "ctrl_deps", kind.TYPE_UINT64, "repeated"), (5, "data_deps", kind.TYPE_UINT64, "repeated"),
        (6, "start_time_micros", kind.TYPE_UINT64), (7, "duration_micros", kind.TYPE_UINT64),
        (10, "attr", "AttributeProto", "repeated"),
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    )


def delimited(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found.append(data[at : at + size])
        at += size
    return found


def test_protobuf_files_follow_the_published_schema(tmp_path):
    metadata, node_class = published()
    folder = save(by_hand(), tmp_path, "chakra-et")
    assert sorted(p.name for p in folder.iterdir()) == ["comm_groups.json", *(f"trace.{r}.et" for r in ALL)]
    assert json.loads((folder / "comm_groups.json").read_text()) == {"1": [0, 1], "2": [2, 3]}
    head, *messages = delimited((folder / "trace.3.et").read_bytes())
    assert metadata.FromString(head).version == "0.0.4"
    nodes = [node_class.FromString(m) for m in messages]
    for node, message in zip(nodes, messages, strict=True):
        node.DiscardUnknownFields()  # nothing that the schema lacks
        assert len(node.SerializeToString()) == len(message)
    assert [(n.id, n.type, list(n.data_deps)) for n in nodes] == [
        (0, 4, []), (2, 7, [0]), (3, 7, []), (4, 7, []), (5, 7, [2]), (6, 4, [5]), (7, 7, [4, 6])]  # fmt: skip
    assert [(n.start_time_micros, n.duration_micros) for n in nodes[:3]] == [(0, 4), (5, 7), (0, 0)]
    values = [{a.name: getattr(a, a.WhichOneof("value")) for a in n.attr} for n in nodes]
    assert values[0]["is_cpu_op"] is False and values[0]["num_ops"] == 0
    expected = [(6, 256, None), (0, 400, "2"), (2, 16, None), (7, 64, "2")]
    assert [(v["comm_type"], v["comm_size"], v.get("pg_name")) for v in values[1:5]] == expected
    assert list(values[1]["sends"].values) == [24, 32, 40, 48]


def test_a_foreign_protobuf_trace(tmp_path):
    """Written with Google's protobuf: nodes out of order, an enum as int32, fields and attributes not ours."""
    metadata, node_class = published()
    coll = node_class(id=10, name="AR", type=7, ctrl_deps=[40], duration_micros=3)
    for name, field, value in (("comm_type", "int32_val", 0), ("comm_size", "uint64_val", 1000),
                               ("is_cpu_op", "bool_val", False), ("other", "double_val", 0.5),
                               ("negative", "int64_val", -1)):  # fmt: skip
        coll.attr.add(name=name, **{field: value})
    gather = node_class(id=11, name="AG", type=7, data_deps=[10])
    gather.attr.add(name="comm_type", int64_val=2)
    gather.attr.add(name="comm_size", int64_val=6)
    nodes = [coll, node_class(id=40, name="gemm", type=4, duration_micros=9), gather]
    content = b""
    for message in (metadata(version="0.0.4"), *nodes):
        data = message.SerializeToString()
        content += bytes([len(data)]) + data
    for rank in range(2):
        (tmp_path / f"llm.{rank}.et").write_bytes(content)
    trace = read_trace(tmp_path)
    assert trace.ranks[1] == (
        Event(0, COMPUTE, name="gemm", start_ns=0, duration_ns=9000),
        Event(1, "all_reduce", name="AR", group=(0, 1), in_bytes=1000, out_bytes=1000, deps=(0,), start_ns=0,
              duration_ns=3000),
        Event(2, "all_gather", name="AG", group=(0, 1), in_bytes=6, out_bytes=12, deps=(1,)),
    )  # fmt: skip


GOOD = {"format": "recjax-trace", "version": 1, "rank": 0, "world": 1, "about": {}, "events": []}
EVENT = {"id": 0, "kind": "all_reduce", "group": [0]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("0.json", b"", "not valid JSON"),
        ("0.json", b"[" * 200_000, "nested too deeply"),
        ("0.json", b"\xff\xfe\x00", "not text"),
        ("0.json", b"[" + b"9" * 5000 + b"]", "not readable"),
        ("0.json", b"17", "no trace that recjax knows"),
        ("0.json", b"[17]", "should be an object"),
        ("0.json", b'[{"comms": "fly"}]', "no collective that recjax knows"),
        ("0.json", b'[{"comms": "all_reduce", "req": {}, "pg_id": 0}]', "req is"),
        ("0.json", b'[{"comms": "all_reduce", "in_msg_size": -1, "out_msg_size": 1, "dtype": "Int"}]', "in_msg_size"),
        ("0.json", b'[{"comms": "all_reduce", "in_msg_size": 1, "out_msg_size": 1, "dtype": "Word"}]', "'Word'"),
        ("0.json", b'[{"comms": "all_reduce", "in_msg_size": 1, "out_msg_size": 1, "dtype": "Int", "world_size": 3,'
         b'"pg_id": {}}]', "pg_id"),
        ("0.json", b'{"schema": "9.9", "nodes": []}', "schema '9.9' is not known"),
        ("0.json", b'{"schema": "1.0.1", "nodes": [{}]}', "there is no 'id'"),
        ("0.json", b'{"schema": "1.0.1", "nodes": [{"id": 1, "name": "record_param_comms", "inputs": [1]}]}',
         "no collective's name"),
        ("0.json", json.dumps(GOOD | {"version": 2}).encode(), "version 2 of the format.*reads version 1"),
        ("0.json", json.dumps(GOOD | {"format": "x"}).encode(), "the format is 'x'"),
        ("0.json", json.dumps(GOOD | {"world": 10**9}).encode(), "1 to 65,536 ranks"),
        ("0.json", json.dumps(GOOD | {"rank": 5}).encode(), "only 1 ranks"),
        ("0.json", json.dumps(GOOD | {"events": {}}).encode(), "events is a dict"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"danger": 1}]}).encode(), "unknown field 'danger'"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"kind": "fly"}]}).encode(), "the kind is none of"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"deps": [3]}]}).encode(), "waits for 3"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"group": [1]}]}).encode(), "not in its group"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"group": [0, 0]}]}).encode(), "twice"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"sends": [1, 2]}]}).encode(), "splits for 2 ranks"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"in_bytes": 1e30}]}).encode(), "in_bytes is 1e"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT, EVENT]}).encode(), "not above 0"),
        ("0.et", b"", "version ''"),
        ("0.et", b"\x07\x0a\x059.9.9", "version '9.9.9'"),
        ("0.et", b"\xff" * 30, "number too long"),
        ("0.et", b"\x07\x0a\x050.0.4\x05\x08", "cut off"),
        ("0.et", b"\x07\x0a\x050.0.4\x02\x0b\x01", "wire type 3"),
        ("0.et", b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x07\x20\x01", "cut off|waits for itself"),
        ("0.et", b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x04\x20\x01\x06\x08\x01\x18\x04\x20\x01", "same id"),
        ("0.et", b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x04\x20\x02\x06\x08\x02\x18\x04\x20\x01", "waits for itself"),
        ("0.et", b"\x07\x0a\x050.0.4\x04\x08\x01\x18\x07", "there is no 'comm_type'"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_trace(tmp_path)


def test_a_node_that_waits_for_itself(tmp_path):
    (tmp_path / "0.et").write_bytes(b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x04\x20\x01")
    with pytest.raises(DataError, match="waits for itself"):
        read_trace(tmp_path)


def test_folders_that_hold_no_trace(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        read_trace(tmp_path / "absent")
    with pytest.raises(DataError, match="there is no trace in it"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="--format kineto is not known"):
        read_trace(tmp_path, "kineto")
    save(by_hand(), tmp_path)
    (tmp_path / "other.0.json").write_text("[]")
    with pytest.raises(DataError, match="both of rank 0"):
        read_trace(tmp_path)


def test_only_plain_files_of_the_folder_are_opened(tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps(GOOD))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "0.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(DataError, match="not a plain file"):
        read_trace(inside)
    import os

    (inside / "0.json").unlink()
    os.mkfifo(inside / "0.json")  # reading this would wait for ever
    with pytest.raises(DataError, match="not a plain file"):
        read_trace(inside)


def test_two_traces_in_one_folder(tmp_path):
    save(by_hand(), tmp_path)
    other = dataclasses.replace(by_hand(), world=5)
    (tmp_path / "trace.1.json").write_bytes(FORMATS["recjax"].write(other)["trace.1.json"])
    with pytest.raises(DataError, match="two traces are mixed"):
        read_trace(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(QUICK, max_examples=300)
@given(st.data())
def test_a_changed_value_is_an_error_or_a_trace(tmp_path_factory, data):
    """One value anywhere in a good file becomes another: never anything but a DataError."""
    format = data.draw(st.sampled_from(["recjax", "param", "chakra-json", "pytorch"]))
    whole = pytorch(0) if format == "pytorch" else json.loads(FORMATS[format].write(by_hand()).popitem()[1])
    at, key = [whole], 0
    while True:
        inner = at[key]
        if not isinstance(inner, (list, dict)) or not inner or data.draw(st.integers(0, 5)) == 0:
            break
        at, key = inner, data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
    at[key] = data.draw(JSON)
    folder = tmp_path_factory.mktemp("t")
    (folder / "0.json").write_text(json.dumps(whole))
    try:
        read_trace(folder)
    except DataError:
        pass


@settings(QUICK, max_examples=300)
@given(st.data())
def test_changed_bytes_of_protobuf_are_an_error_or_a_trace(tmp_path_factory, data):
    content = bytearray(FORMATS["chakra-et"].write(by_hand())["trace.0.et"])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("t")
    (folder / "0.et").write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        read_trace(folder)
    except DataError:
        pass
