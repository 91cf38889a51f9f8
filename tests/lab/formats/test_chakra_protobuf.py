"""Chakra's protobuf files, written and read, with Google's protobuf and the published schema as another reader."""

import json

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from support.traces import ALL, by_hand, save

from recjax.lab.formats import read_trace
from recjax.lab.formats.trace import COMPUTE, Event
from recjax.lab.trace.statistics import figures


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
