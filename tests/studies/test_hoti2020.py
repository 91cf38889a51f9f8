"""`recjax study hoti2020`: its files, what it says, and its older name, `recjax simulate hoti2020`."""

import json

import pytest
from support.commands import assert_refused, inside

from recjax.studies.hoti2020.observed import crossing, rows
from recjax.studies.hoti2020.study import DIRECT, TREE

SOME = ("simulate", "hoti2020", "--ranks", 16, "--chunks", 1, "--out")


@pytest.mark.full
def test_the_study_at_a_small_size(tmp_path):
    done = inside("study", "hoti2020", "--ranks", 16, "--chunks", 2, "--out", tmp_path, "--json")
    result = done.result
    assert json.loads((tmp_path / "hoti2020.json").read_text()) == result
    pictures = ("systems", "layers", "flops", "in_flight", "chunks", "copies", "lone_all_reduce", "transport")
    assert {path.name for path in tmp_path.iterdir()} == {
        "hoti2020.json", "hoti2020.md", "hoti2020.html", "setup.json", "finished.jsonl",
        *(f"{name}.png" for name in pictures),
    }  # fmt: skip
    stated = [row for row in result["report"]["rows"] if row["same"] is not None]
    assert {row["source"] for row in stated} >= {
        "3x", "up to 50x", "flat systems are more sensitive", "an optimum between utilised links and queueing",
        "flat and hierarchical systems differ in sensitivity",
    }  # fmt: skip
    assert all(row["ours"] and row["why"] for row in stated)
    assert "window of 0.5 MB" in " ".join(result["assumptions"])
    assert "hoti2020: transport" in done.err
    (compute_ns,) = {row["compute_ns"] for row in result["systems"]}  # the same on every network
    assert compute_ns == pytest.approx(7_105_646.865)


def test_a_part_of_the_study(tmp_path):
    done = inside(*SOME, tmp_path, "--experiments", "lone_all_reduce")
    names = {"hoti2020.json", "hoti2020.md", "hoti2020.html", "lone_all_reduce.png", "setup.json", "finished.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names
    # Sixteen ranks, direct, one chunk: N s at a port against s, when latency does not count.
    row = next(
        row for row in json.loads((tmp_path / "hoti2020.json").read_text())["report"]["rows"]
        if "direct, 1 chunk(s)" in row["quantity"]
    )  # fmt: skip
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
        for name, copy, time in (("Flat100G", 0.01, 10.0), ("Flat100G", 100.0, slow), ("Hier", 0.01, 10.0),
                                 ("Hier", 100.0, 20.0))
    ]  # fmt: skip
    chunks = [_of("Hier", t, chunks=n) for n, t in ((1, 9.0), (16, 7.0), (64, 8.0))]
    chunks += [_of("Flat100G", t, chunks=n) for n, t in ((1, 9.0), (16, 8.0), (64, 7.0))]
    found = rows({"systems": systems, "copies": copies, "chunk_counts": chunks})
    assert [row.same for row in found] == [True, True, True, False, True]
    assert found[0].ours.startswith("3.20x") and "50%" in found[0].why
    assert found[2].ours.startswith("Flat100G 4.00x") and "Hier best at 16 (1.286x at 1, 1.143x at 64)" in found[4].ours
    assert found[4].why.endswith("in Hier")
