"""Execution traces with the times of PyTorch's profiler, by hand: two ranks, three collectives."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import assert_refused, inside
from support.traces import REDUCE, profile, pytorch

from recjax.errors import DataError
from recjax.lab.formats import kineto, read_trace
from recjax.lab.formats.trace import COMPUTE
from recjax.lab.trace.kineto import timed


@pytest.fixture
def folders(tmp_path):
    """Those of execution traces, and of profiles."""
    for name, of in (("et", lambda rank: pytorch(rank)), ("kineto", profile)):
        (tmp_path / name).mkdir()
        for rank in (0, 1):
            file = f"{rank}.json" if name == "et" else f"worker{rank}_step_12.1694128201.pt.trace.json"
            (tmp_path / name / file).write_text(json.dumps(of(rank)))
    return tmp_path / "et", tmp_path / "kineto"


def test_collectives_have_the_times_of_their_kernels(folders):
    found = timed(read_trace(folders[0]), kineto.read(folders[1]))
    ids, rows, grads = [e for e in found.ranks[0] if e.kind != COMPUTE]
    assert [e.phase for e in (ids, rows, grads)] == ["id_exchange", "row_exchange", "dense_grads"]
    assert [(e.start_ns, e.duration_ns) for e in (ids, rows, grads)] == [
        (0, 20_000),
        (90_000, 60_000),
        (190_000, 15_000),
    ]
    assert (ids.sends, ids.in_bytes) == ((32, 48), 80)  # of the execution trace
    computing = [(e.start_ns, e.duration_ns) for e in found.ranks[0] if e.kind == COMPUTE]
    # adam runs from 140 to 240 us, cut where the rows end and the gradients begin and end
    assert computing == [(30_000, 30_000), (140_000, 10_000), (150_000, 40_000), (190_000, 15_000), (205_000, 35_000)]
    assert found.ranks[1][0].start_ns == 2000  # one clock for both ranks


def test_files_may_be_gzipped_as_the_profiler_writes_them(folders):
    et, profiles = folders
    plain = timed(read_trace(et), kineto.read(profiles)).ranks
    for path in [*et.iterdir(), *profiles.iterdir()]:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert timed(read_trace(et), kineto.read(profiles)).ranks == plain
    assert read_trace(et, "chakra-json").ranks == read_trace(et).ranks
    one = profiles / "worker0_step_12.1694128201.pt.trace.json.gz"
    whole = one.read_bytes()
    for damaged in (whole[:-9], whole[:20] + b"?" + whole[21:], b"{}"):
        one.write_bytes(damaged)
        with pytest.raises(DataError, match="no whole gzip file"):
            kineto.read(profiles)


def test_kernels_stand_in_the_order_of_their_launch(folders):
    """One that another stream ran first, though it was launched last, is still the last collective."""
    whole = profile(0)
    for event in whole["traceEvents"]:
        if event.get("cat") == "kernel" and event["name"] == REDUCE:
            event["ts"] = 1005
    (folders[1] / "worker0_step_12.1694128201.pt.trace.json").write_text(json.dumps(whole))
    assert [k.start_ns for k in kineto.read(folders[1])[0].collectives] == [1_010_000, 1_100_000, 1_005_000]


def test_the_report_of_both(folders):
    et, profiles = folders
    found = inside("trace", "report", et, "--kineto", profiles, "--json").result["traces"][0]
    assert found["calls"][1]["time"] == {"last_rank": 1, "late_us": 55, "waiting_us": 27.5, "transfer_us": 5}
    assert found["time"]["exposed_ms"] > 0
    assert_refused(inside("trace", "report", et, et, "--kineto", profiles), 2, "--kineto is of one trace")


def test_converted_once_it_needs_the_profile_no_more(folders, tmp_path):
    et, profiles = folders
    assert (
        inside("trace", "convert", et, "--kineto", profiles, "--format", "recjax", "--out", tmp_path / "both").status
        == 0
    )
    assert read_trace(tmp_path / "both").ranks == timed(read_trace(et), kineto.read(profiles)).ranks
    played = inside(
        "simulate", "workload", tmp_path / "both", "--topology", "switch:2", "--bandwidth", "1GB/s", "--json"
    )
    assert played.result["compute_ns"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update(name="gemm"), "2 kernels of NCCL, and the trace has 3 collectives"),
        (lambda e: e.update(name="ncclKernel_AllGather_x"), "AllGather_x, and the trace has all_to_all"),
        (lambda e: e.update(ts=-1), "event 1: ts is -1"),
        (lambda e: e.update(ts="soon"), "ts is 'soon'"),
        (lambda e: e.update(name=7), "name is 7"),
        (lambda e: e.update(name="ncclKernel_Fly_x"), "no collective that recjax knows"),
    ],
)
def test_profiles_of_something_else(folders, change, message):
    whole = profile(0)
    change(whole["traceEvents"][1])
    (folders[1] / "worker0_step_12.1694128201.pt.trace.json").write_text(json.dumps(whole))
    with pytest.raises(DataError, match=message):
        timed(read_trace(folders[0]), kineto.read(folders[1]))


def test_profiles_that_lack_a_rank_or_have_it_twice(folders):
    et, profiles = folders
    (profiles / "again.json").write_text(json.dumps(profile(1)))
    with pytest.raises(DataError, match="both of rank 1"):
        kineto.read(profiles)
    (profiles / "again.json").unlink()
    next(profiles.glob("worker1*")).unlink()
    with pytest.raises(DataError, match="lack rank 1"):
        timed(read_trace(et), kineto.read(profiles))
    next(profiles.glob("worker0*")).unlink()
    with pytest.raises(DataError, match="no .json file"):
        kineto.read(profiles)
    with pytest.raises(DataError, match="no such folder"):
        kineto.read(profiles / "absent")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_profile_is_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("kineto")
    plain = st.none() | st.booleans() | st.floats() | st.text(max_size=4)
    junk = plain | st.lists(plain, max_size=2) | st.dictionaries(st.text(max_size=3), plain, max_size=2)
    whole = profile(0)
    place = data.draw(st.sampled_from([whole, *whole["traceEvents"], whole["distributedInfo"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(junk)
    (folder / "0.json").write_text(json.dumps(whole))
    try:
        kineto.read(folder)
    except DataError:
        pass


@pytest.mark.parametrize("name", ["worker{}_step_12.1694128201.pt.trace.json", "{}.json"])
def test_a_folder_of_the_profiler_alone_is_told_apart(tmp_path, name):
    for rank in (0, 1):
        (tmp_path / name.format(rank)).write_text(json.dumps(profile(rank)))
    assert_refused(inside("trace", "report", tmp_path), 3, "files of PyTorch's profiler, which say when kernels ran")
