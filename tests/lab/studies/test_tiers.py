"""The study of tables larger than memory: counted hits, nodes, and a small run of all of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from recjax.config import presets
from recjax.lab.studies import report
from recjax.lab.studies.tiers import findings, study
from recjax.planning.tier_run import Run

pytestmark = pytest.mark.light_compile

PRESET = ("synthetic", "data.rows=3000,2000", "data.train_rows=32768", "mesh.devices=1", "train.batch_size=128")


def test_hits_rise_with_what_is_seen_and_with_the_cache() -> None:
    """The golden ones; the closed form is within a point of them, but for Belady's, which it flatters."""
    config = presets.load(PRESET[0], list(PRESET[1:]))
    trace = study.Trace(config, 60)
    found = [study.hit_curve(trace, share) for share in (0.1, 0.3)]
    assert [one["slots"] for one in found] == [500, 1500]
    counted = [[of["counted"] for of in one["rules"].values()] for one in found]
    assert all(row == sorted(row) for row in counted) and counted[0] < counted[1]
    assert counted == [pytest.approx(row, abs=1e-4) for row in GOLDEN]
    for one in found:
        for name, of in one["rules"].items():
            assert -0.01 < of["model"] - of["counted"] < (0.02 if name == "Belady" else 0.01)


GOLDEN = [[0.509165, 0.576235, 0.686974, 0.687621], [0.73485, 0.751995, 0.796959, 0.876213]]


def test_batches_are_read_once_for_caches_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = presets.load(PRESET[0], list(PRESET[1:]))
    trace = study.Trace(config, 5)
    first, second = (trace.run(share) for share in (0.1, 0.3))
    (group,) = first.bound.cached
    alone = [homes[group.name] for homes in itertools.islice(second.homes(), 10)]
    kept = [homes[group.name] for homes in trace.homes(first)]
    assert all(np.array_equal(a, b) for a, b in zip(alone, kept, strict=True))
    monkeypatch.setattr(Run, "homes", lambda run: pytest.fail("read again"))
    study.hit_curve(trace, 0.3)


@pytest.mark.parametrize("options", [study.SMALL, study.FULL])
def test_no_batch_of_a_trace_comes_twice(options: study.Options) -> None:
    config = presets.load(options.preset[0], list(options.preset[1:]))
    assert 2 * options.steps * config.train.batch_size <= 4096 * config.data.distinct_blocks


def test_nodes_are_those_of_the_page() -> None:
    """Model F: 48.2 TB by 256 GB of devices, by 1.2 TB of memory; MLPerf's tables fit into one node."""
    found = study.nodes_saved("model F")
    assert [(one["without"]["nodes"], one["with"]["nodes"]) for one in found] == [(189, 41), (189, 8)] * 2 + [
        (189, 41),
        (189, 12),
    ]
    assert {one["without"]["bound_by"] for one in found} == {"bytes"}
    assert found[-1]["with"]["bound_by"] in ("disk writes", "disk reads")
    assert [one["times"] for one in study.nodes_saved("MLPerf DLRM-DCNv2")] == [1.0] * 6


@pytest.mark.full
def test_a_small_run_is_reported_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MODELS", {"model F": study.MODELS["model F"]})
    how = study.Options(PRESET, (0.1, 0.3), 20, (0.8, 0.3), 2, 1, 2, str(tmp_path))
    result = study.study(tmp_path / "out", how, lambda text: None)
    monkeypatch.setattr(study, "hit_curve", lambda *given: pytest.fail("counted again"))  # what is there is not
    again = study.study(tmp_path / "out", how, lambda text: None)
    assert json.dumps(again) == json.dumps(result)
    assert [one["label"] for one in result["times"]] == ["all", "80%", "30%", "30%, half of the rows in memory"]
    assert result["times"][0]["ratio"] == 1.0 and result["times"][3]["reads"] > 0
    made = findings.report(result, report.provenance(0.0))
    files = report.write(made, result, tmp_path / "out")
    assert set(files) == {"tiers.html", "tiers.md", "tiers.json", "hits.png", "times.png"}
    text = report.to_text(made)
    assert "189 / 41 = 4.6" in text and "4 to 8" in text and "FBGEMM" in text
    without = dataclasses.replace(how, rounds=0)
    assert study.study(tmp_path / "other", dataclasses.replace(without, shares=()), lambda text: None)["times"] == []
