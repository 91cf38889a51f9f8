"""`recjax study hoti2020`: its files, what it says, and its older name, `recjax simulate hoti2020`."""

import dataclasses
import json

import pytest
from support.commands import assert_refused, inside

from recjax.lab.simulate.dlrm import PRESETS, DlrmShape, dlrm
from recjax.lab.studies.hoti2020 import study
from recjax.lab.studies.hoti2020.observed import crossing, rows
from recjax.lab.studies.hoti2020.study import DIRECT, TREE

SOME = ("simulate", "hoti2020", "--ranks", 16, "--chunks", 1, "--out")


# Worked by hand from the model's shapes: 512 samples a GPU, 16 bits a value, 60 TFLOP/s, 900 GB/s.
#   bottom, 1600-1024x6-64: 1,638,400 + 5 x 1,048,576 + 65,536           =  6,946,816 products a sample
#   65 vectors give 65 x 64 / 2 = 2080 pairs, with the bottom's 64: 2144 inputs of the top
#   top, 2144-2048x11-1: 4,390,912 + 10 x 4,194,304 + 2048               = 46,336,000
#   each three times (forward, both gradients), but no gradient of the data: 3 x 53,282,816 - 1,638,400 = 158,210,048
#   the interaction, 65 x 65 x 64 = 270,400, forward and twice that backward:                               811,200
#   so 159,021,248 products, twice that many FLOP, of 512 samples: 162,837,757,952 FLOP, in 2,713,962.633 ns
#   look-ups: 512 samples x 64 tables x 60 ids x 128 bytes = 251,658,240 bytes, read once and for the update read and
#   written: 754,974,720 bytes, in 838,860.8 ns
ITERATION_NS = 2_713_962.633 + 838_860.8


def test_the_computation_by_hand():
    (shape,) = PRESETS.values()
    durations = [operation.duration_ns for operation in dlrm(shape, 128).operations]
    assert sum(durations) == pytest.approx(ITERATION_NS, abs=0.001)
    twice = dlrm(dataclasses.replace(shape, flops_per_s=30e12), 128, 2)
    assert sum(o.duration_ns for o in twice.operations) == pytest.approx(2 * (ITERATION_NS + 2_713_962.633), abs=0.01)


# With one layer of 1024 and one of 2048: 1,638,400 + 65,536 and 4,390,912 + 2048 products, three times 6,096,896 but
# for 1,638,400, and 811,200: 17,463,488, twice that of 512 samples in 298,043.529 ns.
SHORT = DlrmShape(bottom=(1024, 64), top=(2048, 1))
SHORT_NS = 298_043.529 + 838_860.8


@pytest.mark.full
def test_the_study_at_a_small_size(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "hoti2020", SHORT)
    done = inside("study", "hoti2020", "--ranks", 16, "--chunks", 1, "--out", tmp_path, "--json")
    result = done.result
    assert json.loads((tmp_path / "hoti2020.json").read_text()) == result
    pictures = ("systems", "layers", "flops", "in_flight", "chunks", "copies", "lone_all_reduce", "transport")
    assert {path.name for path in tmp_path.iterdir()} == {
        "hoti2020.json",
        "hoti2020.md",
        "hoti2020.html",
        "setup.json",
        "finished.jsonl",
        *(f"{name}.png" for name in pictures),
    }
    stated = [row for row in result["report"]["rows"] if row["same"] is not None]
    assert {row["source"] for row in stated} >= {
        "3x",
        "up to 50x",
        "flat systems are more sensitive",
        "an optimum between utilised links and queueing",
        "flat and hierarchical systems differ in sensitivity",
    }
    assert all(row["ours"] and row["why"] for row in stated)
    assert "window of 0.5 MB" in " ".join(result["assumptions"])
    assert "hoti2020: transport" in done.err
    (compute_ns,) = {row["compute_ns"] for row in result["systems"]}  # the same on every network
    assert compute_ns == pytest.approx(2 * SHORT_NS)


def test_a_part_of_the_study(tmp_path):
    done = inside(*SOME, tmp_path, "--experiments", "lone_all_reduce")
    names = {"hoti2020.json", "hoti2020.md", "hoti2020.html", "lone_all_reduce.png", "setup.json", "finished.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names
    # Sixteen ranks, direct, one chunk: N s at a port against s, when latency does not count.
    row = next(
        row
        for row in json.loads((tmp_path / "hoti2020.json").read_text())["report"]["rows"]
        if "direct, 1 chunk(s)" in row["quantity"]
    )
    assert "beyond it 16.0x at 256.0 MiB" in row["ours"] and row["same"] is False
    assert "16.0x" in done.out
    assert_refused(inside(*SOME, tmp_path, "--experiments", "system"), 2, "'system' is unknown. There are systems")
    assert_refused(inside(*SOME, tmp_path, "--ranks", 100), 2, "--ranks 100")
    assert_refused(inside(*SOME, tmp_path, "--ranks", 32), 2, "other settings .ranks.")


def test_where_a_level_is_crossed():
    assert crossing({10.0: 1.0, 30.0: 2.0, 60.0: 5.0}, 3.0) == 40.0
    assert crossing({10.0: 1.0, 30.0: 2.0}, 3.0) is None


def _of(system: str, time_ns: float, **more: object) -> dict[str, object]:
    return {"system": system, "time_ns": time_ns, "compute_ns": 5.0, **more}


def test_rows_say_what_holds():
    """Made-up times: 3.2x between systems, a flat one that slows down more, an optimum at 16 chunks in one system."""
    systems = [_of(n, t, all_reduce=a) for a in (TREE, DIRECT) for n, t in (("Flat100G", 32.0), ("HierOpt", 10.0))]
    copies = [
        _of(name, time, all_reduce=a, copy_us=copy)
        for a, slow in ((TREE, 40.0), (DIRECT, 11.0))
        for name, copy, time in (
            ("Flat100G", 0.01, 10.0),
            ("Flat100G", 100.0, slow),
            ("Hier", 0.01, 10.0),
            ("Hier", 100.0, 20.0),
        )
    ]
    chunks = [_of("Hier", t, chunks=n) for n, t in ((1, 9.0), (16, 7.0), (64, 8.0))]
    chunks += [_of("Flat100G", t, chunks=n) for n, t in ((1, 9.0), (16, 8.0), (64, 7.0))]
    found = rows({"systems": systems, "copies": copies, "chunk_counts": chunks})
    assert [row.same for row in found] == [True, True, True, False, True]
    assert found[0].ours.startswith("3.20x") and "50%" in found[0].why
    assert found[2].ours.startswith("Flat100G 4.00x") and "Hier best at 16 (1.286x at 1, 1.143x at 64)" in found[4].ours
    assert found[4].why.endswith("in Hier")


def test_rows_say_where_three_times_holds_and_which_order_is_faster():
    flops = [_of(n, t, tflops=f) for f, fast in ((30, 20.0), (60, 8.0)) for n, t in (("Hier", 40.0), ("HierOpt", fast))]
    orders = [
        _of("Hier", t, scheduling=o, in_flight=n)
        for o, n, t in (
            ("lifo", 1, 12.0),
            ("lifo", 64, 10.0),
            ("lifo", 128, 11.0),
            ("fifo", 64, 15.0),
            ("fifo", 128, 11.0),
        )
    ]
    crossed, fifo, best = rows({"flops": flops, "in_flight": orders})
    assert crossed.ours == "3x at 40 TFLOP/s (30: 2.00x, 60: 5.00x)" and crossed.same is False  # not within a quarter
    assert fifo.ours == "Hier (64) 1.500, Hier (128) 1.000" and fifo.same is None
    assert best.same is True and best.ours == "Hier best at 64 (1.200x at 1, 1.100x at 128)"
    alike = rows({"in_flight": [one | {"time_ns": 1.0} for one in orders]})
    assert alike[1].same is False and alike[1].why.endswith("nowhere by 0.1% or more")


def _sent(system: str, what: str, window: float | None, buffer: float | None, time_ns: float, lost: int = 0) -> object:
    return _of(system, time_ns, what=what, window_bytes=window, buffer_bytes=buffer, lost_segments=lost)


@pytest.mark.parametrize("hier_slows, differ", [(1.5, True), (4.1, False)])
def test_rows_say_whether_buffers_matter_as_much_to_both_kinds_of_system(hier_slows, differ):
    """A flat system is four times slower with 16 MB; within 5% of the slower one both are alike."""
    alone = [
        _sent(name, "many_to_one", 5e5, buffer, time, lost)
        for name, slow in (("Flat800G", 4.0), ("Hier", hier_slows))
        for buffer, time, lost in ((16e6, slow, 70), (64e6, 1.0, 0), (1e9, 1.0, 0))
    ]
    alone += [
        _sent(name, "all_reduce", w, 1e9, t) for name in ("Flat800G", "Hier") for w, t in ((5e5, 2.0), (1e5, 3.0))
    ]
    ways = ((None, None, 5.0, 0), (5e5, 1e9, 4.0, 0), (5e5, 64e6, 6.0, 9), (1e5, 1e9, 8.0, 0))
    iterations = [
        _sent(name, "", w, b, t, lost) | {"all_reduce": a}
        for name in ("Flat800G", "Hier")
        for a in (TREE, DIRECT)
        for w, b, t, lost in ways
    ]
    buffers, window, *whole = rows({"transport": {"alone": alone, "iterations": iterations}})
    assert buffers.same is differ and buffers.ours.startswith("Flat800G 1.00x and 4.00x (0 and 70 lost), Hier 1.00x")
    assert window.ours == "Flat800G 1.50x, Hier 1.50x"
    assert [row.ours for row in whole[:2]] == [
        "Flat800G 2.000x (no TCP 1.250x), Hier 2.000x (no TCP 1.250x)",
        "Flat800G 1.500x (9 lost), Hier 1.500x (9 lost)",
    ]
    assert [row.same for row in whole] == [None, False, None, False]  # of 64 MB both kinds suffer alike here
    assert "double binary tree" in whole[0].quantity and "direct" in whole[2].quantity and "timeout" in whole[3].why


def test_rows_say_how_much_congestion_costs():
    """Direct: 40 times at 4 MiB and 48 at 8, beyond it 100; 50 between 8 and 16 MiB, at 8 x 2^(2 / 52)."""
    ratios = ((2**22, 40.0), (2**23, 48.0), (2**24, 100.0))
    alone = [
        _of("Flat100G", 1.0, all_reduce=a, chunks=1, bytes=size, ratio=r if a == DIRECT else 2.0)
        for a in (TREE, DIRECT)
        for size, r in ratios
    ]
    tree, direct = rows({"lone_all_reduce": alone})
    assert tree.same is False and tree.why.startswith("never 50 up to 16.0 MiB")
    assert direct.same is True and direct.ours == "48.0x at 8.0 MiB, beyond it 100.0x at 16.0 MiB"
    assert direct.why.startswith("50x at 8.2 MiB")
    assert "public simulator" not in direct.why  # which was asked for 128 ranks, whose time is another one
    for one in alone:
        one["time_ns"] = 1_344_177.2
    assert "public simulator" in rows({"lone_all_reduce": alone})[1].why


def test_reasons_follow_the_verdict():
    """Of the same experiment with another outcome the reason is another one, and never says what did not happen."""
    verdicts = {}
    for slow in (2.0, 0.5):
        copies = [
            _of(name, time, all_reduce=a, copy_us=copy)
            for a in (TREE, DIRECT)
            for name, slower in (("Flat100G", slow), ("Hier", 1.5))
            for copy, time in ((0.01, 10.0), (100.0, 10.0 * slower))
        ]
        systems = [_of(n, t, all_reduce=a) for a in (TREE, DIRECT) for n, t in (("a", 15.0 * slow), ("b", 10.0))]
        alone = [
            _sent(name, "many_to_one", 5e5, buffer, time)
            for name, slower in (("Flat100G", slow), ("Hier", 2.0))
            for buffer, time in ((16e6, slower), (64e6, 1.0), (1e9, 1.0))
        ]
        alone += [_sent(n, "all_reduce", w, 1e9, slow if w == 1e5 else 1.0) for n in ("Hier",) for w in (5e5, 1e5)]
        ways = ((None, None, 1.0), (5e5, 1e9, 1.0), (5e5, 64e6, slow), (1e5, 1e9, slow))
        iterations = [
            _sent(name, "", w, b, t, int(slow)) | {"all_reduce": a}
            for name in ("Flat100G", "Hier")
            for a in (TREE, DIRECT)
            for w, b, t in ways
        ]
        transport = {"alone": alone, "iterations": iterations}
        for row in rows({"systems": systems, "copies": copies, "transport": transport}):
            verdicts.setdefault((row.figure, row.quantity), []).append((row.same, row.why))
    for quantity, ((same, why), (other_same, other_why)) in verdicts.items():
        assert same == other_same or why != other_why, quantity
    of_copies = verdicts["memory copies", "100 us against 0.01 us (direct)"]
    assert [same for same, _ in of_copies] == [True, False]
    assert "flat systems have more chunks" in of_copies[0][1] and "one more" in of_copies[1][1]
    whys = [why for (figure, _), both in verdicts.items() if figure == "TCP window" for _, why in both]
    assert whys.count("what a connection has to send at once is less than a window") == 3


def test_wider_gradients_and_buffers_of_fewer_gpus(tmp_path):
    """32 bits are twice the all-reduce; a sixteenth of the GPUs have a sixteenth of the buffer."""
    narrow, wide = (dlrm(dataclasses.replace(SHORT, gradient_bytes=size), 16).operations for size in (0, 4))
    sizes = [[o.bytes for o in of if o.collective == "all_reduce"] for of in (narrow, wide)]
    assert [2 * size for size in sizes[0]] == sizes[1] and sizes[0]
    other = [[o.bytes for o in of if o.collective == "all_to_all"] for of in (narrow, wide)]
    assert other[0] == other[1]
    runs = study.Runs(study.settings(16), 1, False, lambda name, make: name)
    assert f"tcp={dataclasses.astuple(dataclasses.replace(study.TCP, buffer_bytes=1e9 / 8))}" in runs.iterations(
        runs.systems[0], DIRECT
    )
    of = [
        {"system": n, "bytes": b, "time_ns": t}
        for n, b, t in (("a", 2, 20.0), ("b", 2, 10.0), ("a", 4, 33.0), ("b", 4, 11.0))
    ]
    (row,) = rows({"gradients": of})
    assert row.same is True and row.ours == "3.00x: a 33 ns (1.65x), b 11 ns (1.10x)" and row.why.startswith("2.00x")
