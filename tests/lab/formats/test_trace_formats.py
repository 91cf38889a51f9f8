"""Formats of communication traces: round trips, and hand-made foreign files; protobuf's: test_chakra_protobuf.py."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.traces import ALL, HALVES, by_hand, pytorch, save
from support.traces import node as trace_node

from recjax.lab.formats import read_trace
from recjax.lab.formats.issued import with_waits
from recjax.lab.formats.trace import COMPUTE, ITEM_BYTES, Event, Trace

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
