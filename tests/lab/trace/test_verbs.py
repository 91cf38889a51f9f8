"""`recjax trace`, `trace report` and `replay` as commands."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from support.commands import assert_refused, inside, outside
from support.traces import by_hand

from recjax.errors import ConfigError
from recjax.lab.replay.program import shrink
from recjax.lab.trace import verbs
from recjax.lab.trace.verbs import write

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

RUN = ("mesh.devices=4", "train.steps=100")


@pytest.fixture(scope="module")
def traced(preset, tmp_path_factory):
    """(folder, result) of a trace of two steps in two formats."""
    out = tmp_path_factory.mktemp("traces") / "four"
    formats = ("--format", "recjax", "--format", "chakra-et", "--format", "param")
    done = inside("trace", preset, *RUN, "--steps", 2, "--out", out, *formats, "--json")
    return out, done.result


def test_a_trace_has_a_file_for_each_rank_and_every_collective_a_time(traced):
    out, result = traced
    assert sorted(p.name for p in out.glob("*.json")) == [f"trace.{rank}.json" for rank in range(4)]
    assert len(list((out / "chakra-et").glob("*.et"))) == len(list((out / "param").glob("*.json"))) == 4
    for rank in range(4):
        held = json.loads((out / f"trace.{rank}.json").read_text())
        assert (held["format"], held["version"], held["rank"], held["world"]) == ("recjax-trace", 1, rank, 4)
        assert held["about"]["config"]["train.batch_size"] == "64" and held["about"]["devices"] == 4
        collectives = [e for e in held["events"] if e["kind"] != "compute"]
        phases = ["id_exchange", "row_exchange", "grad_exchange", "dense_grads", "finite_check"]
        assert sorted(e["phase"] for e in collectives) == sorted(phases * 2)
        assert all(e["duration_ns"] > 0 for e in collectives)
        computing = [e for e in held["events"] if e["kind"] == "compute"]
        assert computing and all(e["duration_ns"] >= 0 for e in computing)
        for step in (0, 1):  # what this rank sends rank 1, rank 1 receives
            exchange = next(e for e in collectives if (e["phase"], e.get("step", 0)) == ("row_exchange", step))
            other = json.loads((out / "trace.1.json").read_text())["events"]
            there = next(e for e in other if (e.get("phase"), e.get("step", 0)) == ("row_exchange", step))
            assert exchange["sends"][1] == there["receives"][rank]
    (figures,) = result["traces"]
    assert figures["count"] == 5 and figures["time"]["share"] > 0 and figures["steps"] == 2


def test_steps_that_have_the_cores_to_themselves_send_the_same(traced, preset, tmp_path):
    out, _ = traced
    assert inside("trace", preset, *RUN, "--steps", 2, "--out", tmp_path / "alone", "--alone").status == 0
    both = []
    for folder in (out, tmp_path / "alone"):
        held = json.loads((folder / "trace.2.json").read_text())
        both.append([(e["phase"], e["sends"], e["receives"]) for e in held["events"] if "sends" in e])
        assert all(e["duration_ns"] > 0 for e in held["events"] if e["kind"] != "compute")
    assert both[0] == both[1] and len(both[0]) == 6
    assert held["about"]["alone"] is True


def test_a_step_that_is_compiled_and_not_run_has_the_collectives_of_one_that_runs(traced, preset, tmp_path):
    assert inside("trace", preset, *RUN, "--compile", "--out", tmp_path / "four").status == 0
    for rank in range(4):
        held, ran = (json.loads((f / f"trace.{rank}.json").read_text()) for f in (tmp_path / "four", traced[0]))
        assert held["about"]["compiled"] and not any(e.get("duration_ns") for e in held["events"])
        there = [e for e in ran["events"] if e["kind"] != "compute"]
        assert [(e["kind"], e["phase"]) for e in held["events"]] == [(e["kind"], e["phase"]) for e in there[:5]]
        ids, rows, grads = (e for e in held["events"] if "sends" in e)
        # for each id, an int32, a row of 8 float32 goes back, and its gradient the way of the id
        assert rows["sends"] == [8 * n for n in ids["receives"]] and grads["sends"] == [8 * n for n in ids["sends"]]
        assert sum(ids["sends"]) > 0
        exchanged = next(e["id"] for e in held["events"] if e["phase"] == "id_exchange")
        assert next(e["deps"] for e in held["events"] if e["phase"] == "row_exchange") == [exchanged]


def test_the_plan_of_a_cluster_that_nobody_owns_is_simulated(preset, tmp_path):
    """More devices than this process has; the same exchange takes longer on a slower network."""
    folder = tmp_path / "many"
    assert outside("trace", preset, "mesh.devices=16", "--compile", "--out", folder).status == 0
    took = []
    for rate in ("100Gb/s", "10Gb/s"):
        network = ("--topology", "switch:16", "--bandwidth", rate, "--latency", "500ns")
        took.append(inside("simulate", "workload", folder, *network, "--json").result["time_ns"])
    assert 5 * 500 < took[0] < took[1] < 10 * took[0]


def test_report_of_several_formats(traced, tmp_path):
    out, _ = traced
    page, png = tmp_path / "r.html", tmp_path / "r.png"
    done = inside("trace", "report", out, out / "chakra-et", out / "param", "--out", page, "--out", png, "--json")
    one, chakra, param = done.result["traces"]
    assert [t["format"] for t in (one, chakra, param)] == ["recjax", "chakra-et", "param"]
    assert one["useful_bytes"] == chakra["useful_bytes"] == param["useful_bytes"] and param["steps"] == 2
    assert chakra["time"]["step_ms"] == pytest.approx(one["time"]["step_ms"], rel=0.01)
    assert page.read_text().startswith("<!doctype html>") and png.read_bytes().startswith(b"\x89PNG")
    text = inside("trace", "report", out).out
    assert "row_exchange" in text and "exposed" in text


def test_vary(preset, tmp_path):
    done = inside(
        "trace", preset, "mesh.devices=2", "--steps", 1, "--out", tmp_path, "--vary", "train.batch_size=32,64", "--json"
    )
    small, large = done.result["traces"]
    assert [small["batch_size"], large["batch_size"]] == [32, 64]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.batch_size=32", "train.batch_size=64"]
    assert small["useful_bytes"] < large["useful_bytes"]


def test_vary_several_settings_alike_and_in_all_combinations():
    """Which runs there are, and what they are called; `test_vary` records."""
    alike = "embedding.exchange.forward+embedding.exchange.backward=bfloat16,int8"
    given = Namespace(out=Path("o"), overrides=["seed=1"], vary=[alike, "mesh.devices=2,4"])
    found = {str(folder): settings for folder, settings in verbs._variants(given)}
    both = "o/embedding.exchange.forward+embedding.exchange.backward"
    assert list(found) == [f"{both}={kind},mesh.devices={n}" for kind in ("bfloat16", "int8") for n in (2, 4)]
    assert found[f"{both}=int8,mesh.devices=4"] == [
        "seed=1",
        "embedding.exchange.forward=int8",
        "embedding.exchange.backward=int8",
        "mesh.devices=4",
    ]
    assert list(verbs._variants(Namespace(out=Path("o"), overrides=[], vary=[]))) == [(Path("o"), [])]
    tuples = Namespace(out=Path("o"), overrides=[], vary=["model.top=64,1;32,1"])
    assert [settings for _, settings in verbs._variants(tuples)] == [["model.top=64,1"], ["model.top=32,1"]]
    for wrong in ("seed", "seed=", "seed=1,,2", "+seed=1"):
        with pytest.raises(ConfigError, match="write KEY=A,B"):
            list(verbs._variants(Namespace(out=Path("o"), overrides=[], vary=["mesh.devices=2", wrong])))


def test_replay(traced, tmp_path):
    out, _ = traced
    kept = tmp_path / "replay.json"
    result = inside("replay", out, "--repeats", 2, "--out", kept, "--json").result
    assert sum(line["count"] for line in result["collectives"]) == 10
    assert all(line["p50_us"] > 0 and line["original_us"] > 0 for line in result["collectives"])
    assert json.loads(kept.read_text())["ranks"] == 4
    shrunk = inside("replay", out / "param", "--shrink", 2, "--repeats", 1)
    assert shrunk.status == 0 and "2 ranks" in shrunk.out, shrunk.err


def test_sweep(tmp_path):
    arguments = ("--sweep", "--devices", 2, "--collective", "all_gather", "--max", "1KiB", "--factor", 64)
    done = inside("replay", *arguments, "--repeats", 2)
    assert done.status == 0 and "fit:" in done.out, done.err


def test_mistakes(traced, preset, tmp_path):
    out, _ = traced
    assert_refused(inside("trace", preset, "--out", out), 2, "holds a trace already")
    assert_refused(inside("trace", preset, "--out", tmp_path / "x", "--steps", 0), 2, "--steps is 0")
    assert_refused(inside("trace", preset, "--out", tmp_path, "--vary", "seed"), 2, "write KEY=A,B")
    for of_running in (("--alone",), ("--steps", 2)):
        both = ("--compile", *of_running, "--out", tmp_path / "x")
        assert_refused(inside("trace", preset, *both), 2, "Leave it or them out")
    assert_refused(inside("trace", preset, "a.b=1", "--out", tmp_path / "x"), 2, "a.b")
    assert_refused(inside("trace", "report", tmp_path), 3, "there is no trace in it")
    assert_refused(inside("trace", "report", out, "--out", "x.pdf"), 2, "must end in .html or .png")
    assert_refused(inside("replay"), 2, "needs either the folder of a trace, or --sweep")
    assert_refused(inside("replay", out, "--shrink", 9), 2, "give 2 to 4")
    assert_refused(inside("replay", out, "--splits", "ragged"), 2, "no ragged all-to-all on CPU")
    assert_refused(inside("replay", "--sweep", "--max", "big"), 2, "--max 'big'")
    assert_refused(inside("replay", "--sweep", "--collective", "gossip"), 2, "gossip")
    (tmp_path / "trace.0.json").write_text("{")
    assert_refused(inside("trace", "report", tmp_path), 3, r"trace.0.json:1: not valid JSON")
    assert_refused(inside("replay", tmp_path), 3, "not valid JSON")


def test_an_older_trace_of_more_ranks_leaves_nothing_behind(tmp_path):
    for ranks in (4, 2):
        write(shrink(by_hand(), ranks), tmp_path, "recjax")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.0.json", "trace.1.json"]
