"""Chakra's JSON of ASTRA-sim's feeder, written by hand: what is read, converted and simulated of it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import proto
from support.commands import assert_refused, inside
from support.traces import chakra_graph

from recjax.lab import formats
from recjax.lab.formats import read_trace
from recjax.lab.formats.chakra_protobuf import _CLASSES, new_node
from recjax.lab.formats.trace import COMPUTE, Event
from recjax.lab.trace import verbs

BOTH = (0, 1)


def save(folder: Path, change: Any = lambda nodes: None) -> Path:
    for rank in BOTH:
        whole = chakra_graph(rank)
        change(whole["workload_graph"])
        (folder / f"llm.{rank}.json").write_text(json.dumps(whole))
    return folder


def test_nodes_are_events_after_those_that_they_wait_for(tmp_path):
    found = read_trace(save(tmp_path))
    assert (found.world, found.about["format"]) == (2, "chakra-graph")
    for rank in BOTH:
        kind, group = ("recv", (1, 0)) if rank else ("send", (0, 1))
        assert found.ranks[rank] == (
            Event(3, COMPUTE, name="layer", duration_ns=3000),
            Event(7, "all_reduce", name="sum", group=BOTH, in_bytes=8000, out_bytes=8000, deps=(3,)),
            Event(9, kind, name="hand over", group=group, in_bytes=500, out_bytes=500, deps=(7,)),
        )


def test_it_is_converted_and_simulated(tmp_path):
    """On a ring of 1 GB/s and 1 us: 3 us, 2 (N - 1) (latency + 8,000 / N bytes) for the sum, then 500 bytes."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    done = inside("trace", "convert", save(folder), "--format", "chakra-et", "--out", tmp_path / "et")
    assert done.status == 0, done.err
    for at in (folder, tmp_path / "et"):
        simulated = inside(
            "simulate", "workload", at, "--topology", "ring:2", "--bandwidth", "1GB/s", "--latency", "1us", "--json"
        )
        assert simulated.status == 0, simulated.err
        assert simulated.result["time_ns"] == 3000 + 2 * (1000 + 4000) + 1000 + 500


# Of tests/data of mlcommons/chakra, which holds one trace as chakra.0.et and as chakra.0.json: for all 3,664 nodes
# `duration_micros` of the one is `runtime` of the other. These are three of them.
PYTORCH = [
    (216, "aten::flatten_dense_tensors(0)", 318, [], True),
    (217, "aten::flatten_dense_tensors(1)", 28, [216], True),
    (430, "CatArrayBatchedCopy_aligned16_contig", 4, [216], False),
]


def test_runtime_is_in_microseconds_as_in_the_same_trace_in_protobuf(tmp_path):
    graph = [
        {"Id": id, "Name": name, "NodeType": 4, "data_deps": deps, "runtime": runtime, "is_cpu_op": on_cpu}
        for id, name, runtime, deps, on_cpu in PYTORCH
    ]
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "chakra.0.json").write_text(json.dumps({"workload_graph": graph}))
    content = io.BytesIO()
    proto.serialize_length_prefixed(_CLASSES["metadata"](), content)
    for id, name, runtime, deps, on_cpu in PYTORCH:
        node = new_node({"is_cpu_op": on_cpu}, id=id, name=name, type=4, data_deps=deps, duration_micros=runtime)
        proto.serialize_length_prefixed(node, content)
    (tmp_path / "et").mkdir()
    (tmp_path / "et" / "chakra.0.et").write_bytes(content.getvalue())
    found = read_trace(tmp_path / "json").ranks[0]
    assert found == read_trace(tmp_path / "et").ranks[0]
    assert [event.duration_ns for event in found] == [318_000, 28_000, 4_000]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda graph: graph[1].update(NodeType=9), "node 1 of workload_graph: NodeType is 9, and should be a whole"),
        (lambda graph: graph[0].pop("Id"), "node 0 of workload_graph: there is no 'Id'"),
        (lambda graph: graph[0].pop("comm_type"), "node 7: there is no 'comm_type'"),
        (lambda graph: graph[1].update(data_deps=[9]), "waits for itself"),
        (lambda graph: graph[1].update(runtime=-1), "runtime is -1"),
        (lambda graph: graph[2].update(Id=7), "two nodes have the same id"),
    ],
)
def test_damage_is_named(tmp_path, change, says):
    assert_refused(inside("trace", "report", save(tmp_path, change)), 3, says)


def test_the_verbs_offer_every_format_that_can_be_written_or_read():
    """They name them by themselves, so that `--help` imports no format."""
    assert (verbs.FORMATS, verbs._READ) == (tuple(formats.FORMATS), tuple(formats.READ))
