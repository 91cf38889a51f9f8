"""Replays of traces: order, sizes and dependencies of the program that runs; fits; shrinking by hand."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from support.traces import ALL, HALVES, by_hand

from recjax.errors import ConfigError, DataError
from recjax.lab.formats.trace import COMPUTE, Event, Trace
from recjax.lab.replay import replay as replays
from recjax.lab.replay.microbenchmark import chain, fit, sweep
from recjax.lab.replay.program import shrink, slots
from recjax.lab.replay.replay_report import figures
from recjax.lab.trace.record import dependencies
from recjax.planning.compiled_collectives import collectives, members

pytestmark = pytest.mark.light_compile(as_text=True)


def test_slots_by_hand():
    found = slots(by_hand())
    assert [(s.kind, s.groups, s.deps) for s in found] == [
        ("all_to_all", (ALL,), ()),
        ("all_reduce", HALVES, ()),
        ("all_gather", (ALL,), ()),
        ("reduce_scatter", HALVES, (0,)),
        ("all_reduce", (ALL,), (2, 3)),  # over the computing
    ]
    assert found[0].gap_ns == dict.fromkeys(ALL, 4000) and found[4].gap_ns == dict.fromkeys(ALL, 2000)
    assert found[0].padded_bytes == 256 and found[0].block_bytes == 64


def test_blocks_hold_the_largest_split_of_a_ragged_one():
    """Rank 0 sends 4 and 20 bytes, rank 1 sends 8 and 8: blocks of 20."""
    events = {
        0: Event(0, "all_to_all", group=(0, 1), in_bytes=24, out_bytes=12, sends=(4, 20), receives=(4, 8)),
        1: Event(0, "all_to_all", group=(0, 1), in_bytes=16, out_bytes=28, sends=(8, 8), receives=(20, 8)),
    }
    (slot,) = slots(Trace(2, {rank: (event,) for rank, event in events.items()}))
    assert slot.block_bytes == 20


def test_ranks_that_do_not_agree():
    one = Event(0, "all_reduce", group=(0, 1), in_bytes=8, out_bytes=8)
    other = dataclasses.replace(one, kind="all_to_all")
    with pytest.raises(DataError, match="do not agree: one does all_reduce.*all_to_all"):
        slots(Trace(2, {0: (one,), 1: (other,)}))
    half, rest = (Event(i, "all_reduce", group=g) for i, g in enumerate(((0, 1), (0, 1, 2))))
    crossed = (dataclasses.replace(rest, id=0), dataclasses.replace(half, id=1))
    with pytest.raises(DataError, match="orders do not fit together"):
        slots(Trace(3, {0: (half, rest), 1: crossed, 2: (dataclasses.replace(rest, id=0),)}))
    with pytest.raises(DataError, match="orders do not fit together"):
        slots(Trace(2, {0: (one,), 1: ()}))


def test_shrink_by_hand():
    small = shrink(by_hand(), 2)
    assert small.world == 2 and sorted(small.ranks) == [0, 1]
    events = {e.id: e for e in small.ranks[1]}
    assert (events[2].group, events[2].in_bytes, events[2].sends) == ((0, 1), 128, (8, 16))
    assert (events[3].group, events[3].in_bytes) == ((0, 1), 400)
    assert (events[4].in_bytes, events[4].out_bytes) == (16, 32)
    three = shrink(by_hand(), 3)
    gone = {e.id: e for e in three.ranks[2]}  # whose half had ranks 2 and 3
    assert sorted(gone) == [0, 2, 4, 6, 7]
    assert gone[6].deps == (2,) and gone[7].deps == (4, 6)  # 6 waited for 5, which waited for 2


def mesh(ranks: int):
    return replays.ranks_mesh(jax.devices()[:ranks])


def test_replay_measures_every_slot_on_every_rank():
    found = slots(by_hand())
    (times,) = replays.measure([replays.Prepared(found, mesh(4), gaps=True)], [3])
    assert len(times.wall_ns) == 3 and min(times.wall_ns) > 0
    assert [ns.shape for ns in times.slots] == [(3, 4)] * 5
    assert all((ns > 0).all() for ns in times.slots)
    shown = figures(found, times)
    lines = {(line["kind"], line["phase"]): line for line in shown["collectives"]}
    assert lines["all_to_all", "row_exchange"]["original_us"] == 7
    assert lines["all_to_all", "row_exchange"]["padded_bytes"] == 256
    assert shown["sum_us"]["original"] == 8 and shown["sum_us"]["replayed"] > 0
    assert lines["all_reduce", "dense_grads"]["original_us"] is None


def test_what_runs(monkeypatch):
    """Read from the compiled program: groups, element types, bytes and what waits for what are the trace's."""
    texts = []
    real = replays._instructions
    monkeypatch.setattr(replays, "_instructions", lambda hlo: texts.append(hlo) or real(hlo))
    call, names = replays._program(slots(by_hand()), mesh(4), "padded", 0.0, "it", 0, 1)
    call().block_until_ready()
    assert sorted(names) == [0, 1, 2, 3, 4]
    waits = {i: {j for j in names if names[j][0] in dependencies(texts[0])[name]} for i, (name,) in names.items()}
    # as in the trace, and the second all-reduce behind the first
    assert waits == {0: set(), 1: set(), 2: set(), 3: {0}, 4: {1, 2, 3}}
    found = {
        int(re.search(rf"%{re.escape(c.name)} = .*{replays.SCOPE}(\d+)/", texts[0]).group(1)): c
        for c in collectives(texts[0])
    }
    expected = [
        ("all-to-all", "f32", 256, [list(ALL)]),
        ("all-reduce", "f32", 400, [[0, 1], [2, 3]]),
        ("all-gather", "s32", 64, [list(ALL)]),
        ("reduce-scatter", "bf16", 32, [[0, 1], [2, 3]]),
        ("all-reduce", "s32", 4, [list(ALL)]),
    ]
    for i, (kind, dtype, size, groups) in enumerate(expected):
        assert (found[i].kind, members(found[i].groups, 4)) == (kind, groups)
        if dtype == "bf16":  # on CPU, XLA sends bfloat16 as float32
            assert found[i].result_bytes in (size, 2 * size)
        else:
            assert (found[i].result_bytes, found[i].shapes[0][0]) == (size, dtype)


def test_ragged_all_to_alls_compile_for_accelerators_and_not_here():
    found = slots(by_hand())
    with pytest.raises(ConfigError, match="no ragged all-to-all on CPU"):
        replays.Prepared(found, mesh(4), splits="ragged")
    shape = replays._Shape.of(found[0], 4, "ragged")
    # rank 2 sends 16, 24, 32, 40 bytes to the ranks, where ranks 0 and 1 sent 8 (0 + p) and 8 (1 + p) before it
    assert shape.sizes[2].tolist() == [[4, 6, 8, 10], [4, 6, 8, 10], [0, 4, 10, 18], [2, 6, 10, 14]]
    assert (shape.length, shape.ragged) == (36, 36)

    def body(sizes):
        return shape.run("all_to_all", jax.numpy.int32(0), sizes[0]).reshape(1)

    spec = jax.sharding.PartitionSpec("rank")
    mapped = jax.shard_map(body, mesh=mesh(4), in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(mapped).trace(shape.sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text


def test_an_all_reduce_of_several_arrays_stays_one(monkeypatch):
    """As the compiler made it: one collective of four arrays, two of one size among them."""
    texts = []
    monkeypatch.setattr(replays, "_instructions", lambda hlo: texts.append(hlo) or {})
    group = (0, 1)
    event = Event(0, "all_reduce", dtype="float32", group=group, in_bytes=72, out_bytes=72, parts=(4, 28, 28, 12))
    replays._program(slots(Trace(2, dict.fromkeys(group, (event,)))), mesh(2), "padded", 0.0, "it", 0, 1)
    (found,) = collectives(texts[0])
    assert found.result_bytes == 72 and sorted(dims for _, dims in found.shapes) == [(1,), (3,), (7,), (7,)]


def test_only_some_ranks():
    event = Event(0, "all_reduce", group=(0, 1), in_bytes=8, out_bytes=8, dtype="float32")
    two_of = {n: Trace(n, {0: (event,), 1: (event,)}) for n in (3, 4)}
    replays._program(slots(two_of[4]), mesh(4), "padded", 0.0, "it", 0, 1)
    with pytest.raises(DataError, match="other 1 of 3 do not form groups"):
        replays._program(slots(two_of[3]), mesh(3), "padded", 0.0, "it", 0, 1)


@pytest.mark.parametrize(("alpha", "rate"), [(20.0, 2e9), (0.0, 1e9), (5.0, None)])
def test_fit_of_an_exact_line(alpha, rate):
    points = [(size, alpha + (size / rate * 1e6 if rate else 0)) for size in (8, 512, 2**15, 2**21)]
    found = fit(points)
    assert found["alpha_us"] == pytest.approx(alpha, abs=1e-6) and found["fit_error"] < 1e-9
    assert found["bytes_per_s"] == (pytest.approx(rate) if rate else None) or found["bytes_per_s"] > 1e15


def test_a_chain_has_whole_equal_blocks():
    gather = chain("all_gather", 1001, 3)
    assert len(gather) == 6 and [s.deps for s in gather] == [(), (0,), (1,), (2,), (3,), (4,)]
    event = gather[0].events[0]
    assert event.out_bytes == 1008 and event.in_bytes == 336  # up to a multiple of 3 times 4 bytes


def test_a_chain_of_several_arrays():
    (slot, *_), events = chain("all_reduce", 64, 2, arrays=3), {0, 1}
    assert set(slot.events) == events and all(e.parts == (64,) * 3 and e.in_bytes == 192 for e in slot.events.values())


@pytest.mark.full
def test_sweep(capsys):
    found = sweep(mesh(2), ("all_to_all",), (64, 2**20, 2**40), 2, memory_bytes=2**30)
    assert found["left_out_bytes"] == [2**40]
    line = found["collectives"]["all_to_all"]
    assert [p["bytes"] for p in line["points"]] == [64, 2**20]
    for p in line["points"]:
        assert p["bus_bytes_per_s"] == pytest.approx(p["bytes"] / (p["p50_us"] / 1e6) / 2)
    assert line["points"][0]["p50_us"] < line["points"][1]["p50_us"]
    assert all(p["arrays"] == 1 for p in line["uneven"])  # only all-reduces have several
    cases = [(p["bytes"], p["between_bytes"], p["followed"]) for p in line["uneven"]]
    assert cases == [(2**20, 2**20, True)] + [(2**20, 2**k, False) for k in (16, 18, 20, 22, 24)]
    even, passing = line["points"][0], line["uneven"][-1]  # 16 MiB take longer than two ranks' starting one by one
    assert 0 < even["skew_us"] < passing["skew_us"] and passing["last_us"] > 0
    # Equal where the last rank is the quickest, as on a busy machine; but for the rounding of large numbers.
    assert all(p["done_us"] > p["last_us"] - 1e-3 for p in line["uneven"])
    assert line["uneven"][0]["between_us"] > 20  # 1 MiB at 50 GB/s
    with pytest.raises(ConfigError, match="at least 2 devices"):
        sweep(mesh(1), ("all_to_all",), (64,), 2)


@pytest.mark.full
def test_a_sweep_of_several_arrays():
    found = sweep(mesh(2), ("all_reduce",), (2**14, 2**20), 2)["collectives"]["all_reduce"]["uneven"]
    assert {(p["arrays"], p["bytes"]) for p in found if p["arrays"] > 1} == {(2, 2**21)}


def test_several_measured_together_are_as_they_are_alone():
    """Each sees its own runs: the large ones take longer than the small ones, whichever comes first in the profile."""
    small, large = (
        replays.Prepared(chain("all_reduce", size, 2), mesh(2), name=name)
        for size, name in ((8, "a_small"), (2**22, "a_large"))
    )
    for order in ((small, large), (large, small)):
        times = dict(zip(order, replays.measure(order, [3, 2]), strict=True))
        assert len(times[order[0]].wall_ns) == 3 and times[order[1]].slots[0].shape == (2, 2)
        assert np.median(times[small].slots) * 5 < np.median(times[large].slots)


def passing(monkeypatch, every):
    """Six all-reduces of which every so many-th waits for a pass over 32 MiB, and the program's instructions in order.

    An instruction is its name and whether it reads the memory, which is the one parameter of that size.
    """
    texts = []
    plain = replays._instructions
    monkeypatch.setattr(replays, "_instructions", lambda hlo: (texts.append(hlo), plain(hlo))[1])
    prepared = replays.Prepared(chain("all_reduce", 64, 2), mesh(2), between_bytes=2**25, every=every)
    entry = texts[0][texts[0].index("\nENTRY ") :]
    (memory,) = re.findall(r"(%\S+) = f32\[1,8388608\]\S* parameter\(", entry)
    lines = re.findall(r"^ +(?:ROOT )?%(\S+) = (.*)$", entry, re.MULTILINE)
    return prepared, [(name, bool(re.search(rf"{re.escape(memory)}[,)]", line))) for name, line in lines]


def test_computing_takes_its_time():
    """The gap before a collective is really waited for: 20 ms of it are seen on the host's clock."""
    group = (0, 1)
    events = (
        Event(0, COMPUTE, start_ns=0, duration_ns=20_000_000),
        Event(1, "all_reduce", dtype="float32", group=group, in_bytes=8, out_bytes=8, deps=(0,)),
    )
    found = slots(Trace(2, dict.fromkeys(group, events)))
    (times,) = replays.measure([replays.Prepared(found, mesh(2), gaps=True)], [2])
    assert np.median(times.wall_ns) > 10e6
