"""Formats of communication traces: round trips, hand-made foreign files, and Google's protobuf as another reader."""

import dataclasses
import json
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.traces import ALL, HALVES, by_hand, pytorch, save
from support.traces import node as trace_node

from recjax.comms.formats import read_trace
from recjax.comms.formats.issued import with_waits
from recjax.comms.statistics import figures
from recjax.comms.trace import COMPUTE, ITEM_BYTES, Event, Trace

QUICK = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
                Event(
                    id,
                    kind,
                    draw(text),
                    draw(text),
                    draw(text),
                    draw(st.integers(0, 3)),
                    draw(st.sampled_from(sorted(ITEM_BYTES))),
                    group,
                    draw(sizes),
                    draw(sizes),
                    draw(splits),
                    draw(splits),
                    deps,
                    start,
                    duration,
                    draw(st.lists(sizes, max_size=3).map(tuple)),
                )
            )
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
    """Kinds, groups, types, true splits and steps, renumbered from 0; no computing, padding, or (Chakra) times."""
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
        assert [e.step for e in events] == [0, 0, 0, 1, 1] and read.steps == 2
        # the last waits for the all-gather and, over the computing, for the reduce-scatter
        assert [e.deps for e in events] == [(), (), (), (0,), (2, 3)]
        assert [e.start_ns for e in events] == ([5000, None, None, None, 16000] if format == "param" else [None] * 5)
    again = back(read, tmp_path / "again", format)
    assert again.ranks == read.ranks


def test_steps_of_an_execution_trace_go_on_where_no_step_is_around(tmp_path):
    """PyTorch's profiler marks steps in the main thread alone; gradients are reduced in another one."""
    for rank in (0, 1):
        whole = pytorch(rank)
        for n, parent in ((3, 30), (9, 31)):  # ids in step 7, rows in step 8; the reduction stands in no step
            next(one for one in whole["nodes"] if one["id"] == n)["parent"] = parent
        whole["nodes"] += [trace_node(30, 2, "ProfilerStep#7"), trace_node(31, 2, "ProfilerStep#8")]
        (tmp_path / f"{rank}.json").write_text(json.dumps(whole))
    found = read_trace(tmp_path).ranks[0]
    assert [(e.phase, e.step) for e in found] == [("id_exchange", 7), ("row_exchange", 8), ("dense_grads", 8)]


@pytest.mark.parametrize("format", ["param", "chakra-json", "chakra-et"])
def test_phases_of_a_joined_collective_are_kept(tmp_path, format):
    event = Event(0, "all_reduce", "dense_grads+grad_exchange", "", "", 0, "float32", (0,), 8, 8)
    assert back(Trace(1, {0: (event,)}), tmp_path, format).ranks[0][0].phase == "dense_grads+grad_exchange"


def test_waits_stand_before_what_needs_them_and_come_once():
    events = by_hand().ranks[0]
    order = [event.id if waits else event.kind for event, waits in with_waits(events)]
    assert order == ["all_to_all", "all_reduce", "all_gather", 2, "reduce_scatter", 4, 5, "all_reduce", 3, 7]


def test_param_lines_by_hand(tmp_path):
    group = (0, 1)
    event = Event(5, "all_to_all", "row_exchange", "x", "", 0, "float32", group, 64, 64, (8, 16), (8, 4), start_ns=7)
    other = dataclasses.replace(event, sends=(4, 8), receives=(16, 8))
    folder = save(Trace(2, {0: (event,), 1: (other,)}), tmp_path, "param")
    assert sorted(p.name for p in folder.iterdir()) == ["0.json", "1.json"]
    assert json.loads((folder / "0.json").read_text()) == [
        {"comms": "init", "req": -1, "pg_id": 0, "global_ranks": [0, 1], "world_size": 2},
        {
            "comms": "all_to_allv",
            "markers": ["row_exchange", "x"],
            "in_msg_size": 6,
            "out_msg_size": 3,
            "dtype": "Float",
            "in_split": [2, 4],
            "out_split": [2, 1],
            "startTime_ns": 7,
            "req": 5,
            "pg_id": 0,
            "world_size": 2,
        },
        {"comms": "wait", "req": 5, "pg_id": 0, "world_size": 2},
    ]


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


def test_a_foreign_execution_trace_of_pytorch(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"dlrm_eg_{rank}.json").write_text(json.dumps(pytorch(rank)))
    trace = read_trace(tmp_path)
    assert (trace.world, trace.about["format"]) == (2, "chakra-json")
    assert trace.ranks[0] == (
        Event(
            0,
            "all_to_all",
            "id_exchange",
            "all2all_data:kjt values",
            "all_to_allv",
            0,
            "int64",
            (0, 1),
            80,
            56,
            (32, 48),
            (32, 24),
        ),
        Event(
            1,
            "all_to_all",
            "row_exchange",
            "alltoall_fwd_single",
            "all_to_allv",
            0,
            "float32",
            (0, 1),
            256,
            256,
            (128, 128),
            (128, 128),
            deps=(0,),
        ),
        Event(2, "all_reduce", "dense_grads", "", "allreduce", 0, "float32", (0, 1), 400, 400, deps=(0,)),
    )
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
        "AttributeProto",
        (1, "name", kind.TYPE_STRING),
        (2, "doc_string", kind.TYPE_STRING),
        (3, "double_val", kind.TYPE_DOUBLE),
        (7, "int32_val", kind.TYPE_INT32),
        (9, "int64_val", kind.TYPE_INT64),
        (10, "int64_list", "Int64List"),
        (11, "uint32_val", kind.TYPE_UINT32),
        (13, "uint64_val", kind.TYPE_UINT64),
        (17, "sint64_val", kind.TYPE_SINT64),
        (21, "fixed64_val", kind.TYPE_FIXED64),
        (27, "bool_val", kind.TYPE_BOOL),
        (29, "string_val", kind.TYPE_STRING),
    )
    attribute.oneof_decl.add(name="value")
    for field in attribute.field[2:]:
        field.oneof_index = 0
    message("GlobalMetadata", (1, "version", kind.TYPE_STRING), (2, "attr", "AttributeProto", "repeated"))
    message(
        "Node",
        (1, "id", kind.TYPE_UINT64),
        (2, "name", kind.TYPE_STRING),
        (3, "type", kind.TYPE_INT32),
        (4, "ctrl_deps", kind.TYPE_UINT64, "repeated"),
        (5, "data_deps", kind.TYPE_UINT64, "repeated"),
        (6, "start_time_micros", kind.TYPE_UINT64),
        (7, "duration_micros", kind.TYPE_UINT64),
        (10, "attr", "AttributeProto", "repeated"),
    )
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
        (0, 4, []),
        (2, 7, [0]),
        (3, 7, []),
        (4, 7, []),
        (5, 7, [2]),
        (6, 4, [5]),
        (7, 7, [4, 6]),
    ]
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
    for name, field, value in (
        ("comm_type", "int32_val", 0),
        ("comm_size", "uint64_val", 1000),
        ("is_cpu_op", "bool_val", False),
        ("other", "double_val", 0.5),
        ("negative", "int64_val", -1),
    ):
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
        Event(
            1,
            "all_reduce",
            name="AR",
            group=(0, 1),
            in_bytes=1000,
            out_bytes=1000,
            deps=(0,),
            start_ns=0,
            duration_ns=3000,
        ),
        Event(2, "all_gather", name="AG", group=(0, 1), in_bytes=6, out_bytes=12, deps=(1,)),
    )


@pytest.mark.parametrize("version", [None, "1.0.0"])
def test_a_protobuf_trace_of_chakras_own_converters(tmp_path, version):
    """Their metadata has attributes, and a version or none. Of PyTorch's, control dependencies name the caller.

    Here an operation (10) launches an all-reduce (11), whose kernel (12) waits for what launches it, and the operation
    for the kernel: a circle, but for the caller.
    """
    metadata, node_class = published()
    head = metadata(version=version or "")
    head.attr.add(name="schema", string_val="1.1.1-chakra.0.0.4")
    outer = node_class(id=10, name="DDP", type=4, data_deps=[12])
    launch = node_class(id=11, name="c10d::allreduce_", type=7, ctrl_deps=[10])
    launch.attr.add(name="is_cpu_op", bool_val=True)
    launch.attr.add(name="scope", int64_val=7)
    kernel = node_class(id=12, name="ncclKernel", type=7, ctrl_deps=[11], data_deps=[11], duration_micros=5)
    for name, value in (("comm_type", 0), ("comm_size", 400)):
        kernel.attr.add(name=name, int64_val=value)
    content = b""
    for message in (head, outer, launch, kernel):
        data = message.SerializeToString()
        content += bytes([len(data)]) + data
    (tmp_path / "pytorch.0.et").write_bytes(content)
    found = read_trace(tmp_path).ranks[0]
    assert [(e.start_ns, e.duration_ns) for e in found] == [(None, None), (None, 5000), (None, None)]
    assert figures(read_trace(tmp_path))["time"] is None  # what began when is not known
    assert [(e.name, e.kind, e.deps, e.in_bytes) for e in found] == [
        ("c10d::allreduce_", COMPUTE, (), 0),
        ("ncclKernel", "all_reduce", (0,), 400),
        ("DDP", COMPUTE, (1,), 0),
    ]
