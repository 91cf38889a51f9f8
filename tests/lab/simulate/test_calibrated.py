"""Simulating a trace with times that a sweep measured: worked by hand, and what is refused."""

import dataclasses
import json

import pytest
from support.commands import assert_refused, inside
from support.simulating import topology

from recjax.lab.formats import recjax_json
from recjax.lab.formats.trace import Event, Trace
from recjax.lab.simulate.calibrated import play, read_sweep
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import System
from recjax.lab.simulate.workload import Operation, Workload, without_lateness
from recjax.lab.trace.workload import read_workload

# At 2000 bytes an all-to-all takes 20 us: as far from 10 as from 40 in logarithms. At 1000 an all-reduce takes 8.
POINTS = {"all_to_all": [(1000, 10), (4000, 40)], "all_reduce": [(100, 4), (10_000, 16)]}


def write_sweep(path, points=POINTS, devices=2, device="cpu"):
    kinds = {
        kind: {"points": [{"bytes": size, "last_us": us, "p50_us": 3 * us} for size, us in of_kind]}
        for kind, of_kind in points.items()
    }
    path.write_text(json.dumps({"devices": devices, "device": device, "collectives": kinds}))
    return path


def events(rank, group=(0, 1), parts=()):
    """Computes 3 or 5 us; exchanges beside 30 us of computing; reduces after both."""
    exchange = Event(1, "all_to_all", phase="row_exchange", group=group, in_bytes=2000, out_bytes=2000, deps=(0,))
    reduce = Event(3, "all_reduce", phase="dense_grads", group=group, in_bytes=1000, out_bytes=1000, deps=(1, 2))
    return (
        Event(0, "compute", start_ns=0, duration_ns=(3000, 5000)[rank % 2]),
        exchange,
        Event(2, "compute", start_ns=(3000, 5000)[rank % 2], duration_ns=30_000, deps=(0,)),
        dataclasses.replace(reduce, parts=parts),
    )


def write_trace(folder, ranks):
    folder.mkdir()
    for name, content in recjax_json.write(Trace(len(ranks), dict(enumerate(ranks)))).items():
        (folder / name).write_bytes(content)
    return folder


def test_ranks_that_come_unevenly_are_woken_as_the_sweep_has_it(tmp_path):
    """By hand: rank 1 comes 2 us after rank 0, and 4 us of skew cost 6 us more, 1 us none; half of that in logarithms.

    At 4000 bytes they cost 10 us more: half way there, at 2000, between 3 and 5 us.
    """
    sweep = json.loads(write_sweep(tmp_path / "sweep.json").read_text())
    sweep["collectives"]["all_to_all"]["uneven"] = [
        {"arrays": 1, "followed": False, "between_bytes": 9, "bytes": 1000, "skew_us": 4, "last_us": 16},
        {"arrays": 1, "followed": False, "between_bytes": 9, "bytes": 4000, "skew_us": 4, "last_us": 50},
        # less than even ones took: no gain from coming late
        {"arrays": 1, "followed": False, "between_bytes": 99, "bytes": 4000, "skew_us": 40, "last_us": 30},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    workload = read_workload(write_trace(tmp_path / "trace", [events(0), events(1)]), None)
    played = play(workload, [read_sweep(tmp_path / "sweep.json")])
    exchange = next(i for i, o in enumerate(played.workload.operations) if o.collective == "all_to_all")
    assert played.started[exchange].tolist() == [3000, 5000]
    assert played.finished[exchange].tolist() == pytest.approx([29_000, 29_000])  # 5 + 20 + 4 us


def test_further_arrays_take_what_the_sweep_of_several_has(tmp_path):
    """By hand: 5 arrays of 100 bytes took 40 us, one 8: each further one 8, twice as long as one where all come evenly.

    At 10,000 bytes a further one takes 28 us, 7/4 as long; half way between, at 1000 bytes, 8 us times the root of 7/2.
    """
    sweep = json.loads(write_sweep(tmp_path / "sweep.json").read_text())
    sweep["collectives"]["all_reduce"]["uneven"] = [
        {"arrays": arrays, "followed": False, "between_bytes": 9, "bytes": size, "skew_us": 0, "last_us": us}
        for arrays, size, us in ((1, 100, 8), (5, 500, 40), (1, 10_000, 44), (2, 20_000, 72))
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    read = read_sweep(tmp_path / "sweep.json")
    even = Operation("a", "collective", collective="all_reduce", bytes=2000, parts=(1000, 1000))
    first, _ = read.time_ns(dataclasses.replace(even, parts=(1000,)))
    assert read.time_ns(even)[0] == pytest.approx(first + 8000 * 3.5**0.5)


def test_where_computing_follows_those_that_waited_are_done_later(tmp_path):
    """By hand, at 1000 bytes: 10 us if all come evenly; the last 16 and the others 18 if it comes 4 us after them.

    If 20 us of computing follow, the last takes 3 more and the others 12 more than that, of 40 us of computing: 0.3 of
    what follows, up to those 40.
    """
    sweep = json.loads(write_sweep(tmp_path / "sweep.json").read_text())
    point = {"arrays": 1, "bytes": 1000, "between_bytes": 9, "skew_us": 4}
    sweep["collectives"]["all_to_all"]["uneven"] = [
        {**point, "followed": False, "last_us": 16, "done_us": 18},
        {**point, "followed": True, "last_us": 19, "done_us": 31, "between_us": 40},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    read = read_sweep(tmp_path / "sweep.json")
    exchange = Operation("a", "collective", collective="all_to_all", bytes=1000)
    assert read.time_ns(exchange, 4000) == pytest.approx((16_000, 18_000))
    assert read.time_ns(exchange, 4000, 20_000) == pytest.approx((19_000, 19_000 + 2000 + 6000))
    assert read.time_ns(exchange, 4000, 1e6) == pytest.approx((19_000, 19_000 + 2000 + 12_000))
    assert read.time_ns(exchange, 4000, 1000) == pytest.approx((17_000, 17_000 + 2000 + 300))

    # Both ranks come at 0 and 4 us and compute 20 us before the next collective, which waits for no computing.
    went = [Operation("c", "compute", (0.0, 4000.0)), dataclasses.replace(exchange, depends_on=("c",))]
    went += [Operation("d", "compute", 20_000, depends_on=("a",)), dataclasses.replace(exchange, name="b")]
    played = play(Workload("two", tuple(went), 2), [read])
    assert played.finished[1].tolist() == pytest.approx([4000 + 27_000, 4000 + 19_000])


def test_a_rank_is_as_late_as_it_was(sweep, tmp_path):
    """By hand: 5 us pass on rank 0 between its 3 us of computing and the exchange that waits for them.

    The exchange then begins at 8 us on rank 0 and at 5 on rank 1, and takes 20 from there on; rank 0 computes from the
    end of what it waits for, and 2 us after that. Its clock shows some other time.
    """
    zero = 10**18
    exchange = Event(1, "all_to_all", group=(0, 1), in_bytes=2000, out_bytes=2000, deps=(0,))
    first = [
        Event(0, "compute", start_ns=zero, duration_ns=3000),
        dataclasses.replace(exchange, start_ns=zero + 8000, duration_ns=9000),
        Event(2, "compute", start_ns=zero + 19_000, duration_ns=5000, deps=(1,)),
    ]
    second = [
        Event(0, "compute", start_ns=0, duration_ns=5000),
        dataclasses.replace(exchange, start_ns=5000, duration_ns=12_000),
        Event(2, "compute", start_ns=17_000, duration_ns=6000, deps=(1,)),
    ]
    workload = read_workload(write_trace(tmp_path / "trace", [first, second]), None)
    played = play(workload, [read_sweep(sweep)])
    assert played.started[1].tolist() == [8000, 5000]
    assert played.finished[1].tolist() == pytest.approx([28_000, 28_000])
    assert played.finished[2].tolist() == pytest.approx([28_000 + 7000, 28_000 + 6000])  # 2 us late, 5 of computing
    assert played.started[2].tolist() == pytest.approx([28_000 + 2000, 28_000])
    where = topology("fully_connected:2")
    result = simulate(workload, where, System())
    assert result.started[1].tolist() == [8000, 5000]
    assert (result.finished - result.started)[2].tolist() == [5000, 6000]
    assert simulate(without_lateness(workload), where, System()).started[1].tolist() == [3000, 5000]


def test_lateness_to_a_collective_is_told_from_communication(sweep, tmp_path):
    """Both compute 3 us, come 5 late to the exchange of 20 and 1 late to the 4 us of computing behind it."""
    went = [
        Event(0, "compute", start_ns=0, duration_ns=3000),
        Event(1, "all_to_all", group=(0, 1), in_bytes=2000, out_bytes=2000, deps=(0,), start_ns=8000, duration_ns=9000),
        Event(2, "compute", start_ns=18_000, duration_ns=4000, deps=(1,)),
    ]
    folder = write_trace(tmp_path / "trace", [went, went])
    found = inside("simulate", "workload", folder, "--calibration", sweep, "--json").result
    parts = [found[key] for key in ("time_ns", "compute_ns", "late_ns", "exposed_communication_ns")]
    assert parts == [pytest.approx(ns) for ns in (33_000, 7000, 6000, 20_000)]
    assert [layer["late_ns"] for layer in found["layers"]] == [pytest.approx(1000), pytest.approx(5000)]


def test_lateness_is_told_from_computing_and_may_be_left_out(tmp_path):
    """A rank computes 3 us, exchanges 2000 bytes (1 us each way), comes 2 us late to 5 us of computing."""
    exchange = Event(
        1, "all_to_all", group=(0, 1), in_bytes=2000, out_bytes=2000, deps=(0,), start_ns=3000, duration_ns=9000
    )
    went = [
        Event(0, "compute", start_ns=0, duration_ns=3000),
        exchange,
        Event(2, "compute", start_ns=14_000, duration_ns=5000, deps=(1,)),
    ]
    folder = write_trace(tmp_path / "trace", [went, went])
    how = ("simulate", "workload", folder, "--topology", "fully_connected:2", "--bandwidth", "1GB/s")
    found = inside(*how, "--json").result
    parts = [found[key] for key in ("time_ns", "compute_ns", "late_ns", "exposed_communication_ns")]
    assert parts == [11_000, 8000, 2000, 1000]
    assert "lateness 2.00 us (18%)" in inside(*how).out
    found = inside(*how, "--no-lateness", "--json").result
    assert [found[key] for key in ("time_ns", "compute_ns", "late_ns")] == [9000, 8000, 0]
    assert "lateness" not in inside(*how, "--no-lateness").out
    sweep = write_sweep(tmp_path / "sweep.json")
    late, prompt = (
        inside("simulate", "workload", folder, "--calibration", sweep, *more, "--json").result
        for more in ((), ("--no-lateness",))
    )
    assert (late["late_ns"], late["time_ns"] - prompt["time_ns"]) == (2000, 2000)
    refused = inside(
        "simulate", "workload", "hoti2020", "--topology", "switch:2", "--bandwidth", "1GB/s", "--no-lateness"
    )
    assert_refused(refused, 2, "--no-lateness is about the times of a trace")


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "trace", [events(0), events(1)])


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "sweep.json")


def test_a_worked_prediction(trace, sweep, tmp_path):
    """Rank 1 comes to the exchange at 5 us and to the all-reduce at 35; these take 20 and 8 us from there on."""
    done = inside("simulate", "workload", trace, "--calibration", sweep, "--json", "--out", tmp_path / "out").result
    assert (done["time_ns"], done["compute_ns"], done["exposed_communication_ns"]) == (43_000, 33_000, 10_000)
    assert done["last_communication_ns"] == 28_000 and done["ranks"] == 2
    exchange, reduce = done["layers"][1]["collectives"][0], done["layers"][2]["collectives"][0]
    assert (exchange["last_ns"], exchange["raw_latency_ns"]) == (20_000, 22_000)  # rank 0 waits 2 us for rank 1
    assert (reduce["last_ns"], reduce["raw_latency_ns"], reduce["exposed_ns"]) == (8000, 10_000, 10_000)
    assert (tmp_path / "out" / "simulation.png").stat().st_size > 0
    shown = inside("simulate", "workload", trace, "--calibration", sweep)
    assert "28.00 us together" in shown.out and "sweep.json (2 ranks)" in shown.out


def test_a_rank_does_one_collective_at_a_time(sweep):
    twice = tuple(Operation(name, "collective", collective="all_to_all", bytes=2000.0) for name in "ab")
    played = play(Workload("two", twice, 2), [read_sweep(sweep)])
    assert played.finished.ravel().tolist() == pytest.approx([20_000, 20_000, 40_000, 40_000])


@pytest.mark.parametrize("device, us", [("cpu", 4 + 8), ("NVIDIA H100", 8)])
def test_arrays_of_one_all_reduce_go_one_after_the_other_on_cpu_alone(tmp_path, device, us):
    operation = Operation("a", "collective", collective="all_reduce", bytes=1000.0, parts=(50.0, 1000.0))
    sweep = read_sweep(write_sweep(tmp_path / "sweep.json", device=device))
    assert sweep.time_ns(operation) == pytest.approx((us * 1000, us * 1000))


def test_groups_take_the_sweep_of_as_many_ranks(tmp_path):
    """Ranks 0, 2 are done with all after 41 us, and 1, 3 after 43; then all four meet for 100 us."""
    ranks = []
    for rank in range(4):
        first = events(rank, group=(rank % 2, rank % 2 + 2))
        ranks.append((*first, Event(4, "all_reduce", group=(0, 1, 2, 3), in_bytes=1000, out_bytes=1000, deps=(3,))))
    trace = write_trace(tmp_path / "trace", ranks)
    two = read_sweep(write_sweep(tmp_path / "two.json"))
    four = read_sweep(write_sweep(tmp_path / "four.json", {"all_reduce": [(1000, 100)]}, devices=4))
    played = play(read_workload(trace, None), [two, four])
    assert played.finished[3].tolist() == [41_000, 43_000] * 2 and played.time_ns == 143_000


def test_computing_that_is_cut_unlike_stays_with_its_rank(tmp_path, sweep):
    """Rank 0 computes on from 33 us for 9 more: it comes last to the all-reduce, at 42, and 8 us later it is done."""
    more = Event(3, "compute", start_ns=33_000, duration_ns=9000, deps=(2,))
    first = (*events(0)[:3], more, dataclasses.replace(events(0)[3], id=4, deps=(1, 3)))
    played = play(read_workload(write_trace(tmp_path / "trace", [first, events(1)]), None), [read_sweep(sweep)])
    assert played.time_ns == 50_000 and played.finished.max(axis=0).tolist() == [50_000, 50_000]


def test_small_messages_take_as_long_as_the_least_and_equal_sizes_their_mean(tmp_path):
    points = {"all_reduce": [(16, 4), (16, 6), (64, 20)]}
    sweep = read_sweep(write_sweep(tmp_path / "sweep.json", points))
    for size in (0.0, 4.0, 16.0):
        operation = Operation("a", "collective", collective="all_reduce", bytes=size)
        assert sweep.time_ns(operation) == pytest.approx((5000, 5000))


@pytest.mark.parametrize(
    "change, patterns",
    [
        ({"devices": 4}, ("of 2 ranks", "sweep.json 4", "recjax replay --sweep --devices 2")),
        ({"points": {"all_to_all": POINTS["all_to_all"]}}, ("no all_reduce", "--sweep --devices 2")),
        ({"points": POINTS | {"all_to_all": [(1000, 10)]}}, ("ends at 1,000 B", "2.0 KiB", "--max")),
    ],
)
def test_a_sweep_that_does_not_hold_the_trace_is_refused(trace, tmp_path, change, patterns):
    sweep = write_sweep(tmp_path / "sweep.json", **change)
    assert_refused(inside("simulate", "workload", trace, "--calibration", sweep), 2, *patterns)


def test_other_mistakes_are_refused(trace, sweep, tmp_path):
    how = ("simulate", "workload", trace, "--calibration")
    assert_refused(inside(*how, tmp_path / "none.json"), 2, "none.json: No such file", "replay --sweep")
    assert_refused(inside(*how, sweep, "--calibration", sweep), 2, "two sweeps of as many ranks")
    assert_refused(inside(*how, sweep, "--latency", "1us"), 2, "--latency is of a network")
    assert_refused(inside("simulate", "workload", "hoti2020", "--calibration", sweep), 2, "trace alone")
    assert_refused(inside("simulate", "workload", trace), 2, "--topology and --bandwidth", "--calibration")
    for wrong in ("{", "[]", "{}", '{"devices": 2, "device": "cpu", "collectives": {}}'):
        sweep.write_text(wrong)
        assert_refused(inside(*how, sweep), 3, "sweep.json", "replay --sweep --out")
    earlier = json.loads(write_sweep(sweep).read_text())
    earlier["collectives"]["all_to_all"]["uneven"] = [{"arrays": 1, "bytes": 8, "skew_us": 4, "last_us": 9}]
    sweep.write_text(json.dumps(earlier))
    assert_refused(inside(*how, sweep), 3, "writes now", "Measure again: recjax replay --sweep --devices N")
    write_sweep(sweep, {"all_reduce": [(100, 0)]})
    assert_refused(inside(*how, sweep), 3, "all_reduce of 100.0 bytes in 0.0 us")
