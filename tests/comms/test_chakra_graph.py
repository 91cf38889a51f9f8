"""Chakra's JSON of ASTRA-sim's feeder, written by hand: what is read, converted and simulated of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import assert_refused, inside

from recjax.comms import formats
from recjax.comms.formats import read_trace
from recjax.comms.trace import COMPUTE, Event
from recjax.tracing import verbs

BOTH = (0, 1)


def nodes(rank: int) -> list[dict[str, Any]]:
    """Two ranks compute 3 us, sum 8,000 bytes, and then the first one sends the other 500; not in that order."""
    ends = {"comm_size": 500, "comm_src": 0, "comm_dst": 1, "comm_tag": 4}
    return [
        {"Id": 7, "Name": "sum", "NodeType": 7, "is_cpu_op": False, "data_deps": [3], "comm_type": 0,
         "comm_size": 8000, "comm_priority": 0, "tensor_size": 8000},
        {"Id": 3, "Name": "layer", "NodeType": 4, "is_cpu_op": False, "runtime": 3, "data_deps": []},
        {"Id": 9, "Name": "hand over", "NodeType": 6 if rank else 5, "is_cpu_op": False, "data_deps": [7], **ends},
    ]  # fmt: skip


def save(folder: Path, change: Any = lambda nodes: None) -> Path:
    for rank in BOTH:
        graph = nodes(rank)
        change(graph)
        (folder / f"llm.{rank}.json").write_text(json.dumps({"workload_graph": graph}))
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
        simulated = inside("simulate", "workload", at, "--topology", "ring:2", "--bandwidth", "1GB/s", "--latency",
                           "1us", "--json")  # fmt: skip
        assert simulated.status == 0, simulated.err
        assert simulated.result["time_ns"] == 3000 + 2 * (1000 + 4000) + 1000 + 500


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
