"""How far new rows are from those that trained: indices by hand, and a run whose rows have moved."""

import asyncio
import math
import re

import numpy as np
import pytest
from support.commands import assert_refused, inside
from support.days import train, write_day
from support.serving import ask, running

import recjax
from recjax.train.metrics.drift import stability


def test_the_index_is_the_sum_over_bins():
    # (20 + 0.5) / (40 + 1) = 0.5 and 0.5; (10.5) / 41 and 30.5 / 41.
    low, high = 10.5 / 41, 30.5 / 41
    expected = (low - 0.5) * math.log(low / 0.5) + (high - 0.5) * math.log(high / 0.5)
    assert stability([20, 20], [10, 30]) == pytest.approx(expected, rel=1e-12)
    assert stability([5, 7, 0], [5, 7, 0]) == 0.0
    assert stability([30, 0], [0, 30]) == pytest.approx(stability([0, 30], [30, 0]), rel=1e-12)  # symmetric, finite


@pytest.mark.full
@pytest.mark.shared_programs
@pytest.mark.light_compile
@pytest.mark.few_programs
def test_rows_that_have_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    summary = train(write_day(tmp_path / "a.csv", range(100), 9000, 0), tmp_path / "run")
    alike = write_day(tmp_path / "alike.csv", range(100), 6000, 1)
    drift = recjax.evaluate(tmp_path / "run", input=str(alike))["drift"]
    assert drift["calibration_then"] == summary["eval"]["calibration"]
    assert {entry["name"] for entry in drift["features"]} == {"user", "kind", "price"}
    # By chance: 10 bins of 9,000 and 6,000 rows, 0.003; of users, whose bins follow the order of their own 90 rows each
    # in training, 1 / 90 more.
    assert all(entry["psi"] < 0.03 for entry in drift["features"]), drift
    moved = write_day(tmp_path / "moved.csv", range(50, 150), 6000, 2, mean=8.0)
    head, *rows = moved.read_text().splitlines()
    rows = [row.replace("k3", "") if n % 2 else row for n, row in enumerate(rows)]
    moved.write_text("\n".join([head, *rows]) + "\n")
    done = inside("eval", tmp_path / "run", "--input", moved)
    assert done.status == 0 and "drift from the rows that trained:" in done.out
    entries = {e["name"]: e for e in recjax.evaluate(tmp_path / "run", input=str(moved))["drift"]["features"]}
    users = np.array([int(row.split(",")[0][1:]) for row in rows])
    assert entries["user"]["unknown"] == pytest.approx((users >= 100).mean(), abs=1e-12)
    empty = np.mean([row.split(",")[1] == "" for row in rows])
    assert entries["kind"]["missing"] == pytest.approx(empty, abs=1e-12) and empty > 0.05
    assert entries["kind"]["unknown"] == pytest.approx(0, abs=1e-12)
    assert entries["price"]["psi"] > 0.25 and entries["user"]["psi"] > 0.25
    (tmp_path / "run" / "profile.json").unlink()  # of a run from before there were any
    entries = recjax.evaluate(tmp_path / "run", input=str(moved))["drift"]["features"]
    assert all(entry["psi"] is None for entry in entries)
    (tmp_path / "run" / "profile.json").write_text('{"ids": {"user": {"edges": [2, 1], "counts": [1]}}, "dense": {}}')
    assert_refused(inside("eval", tmp_path / "run", "--input", moved), 1, "profile.json is damaged")


@pytest.mark.full
@pytest.mark.shared_programs
@pytest.mark.light_compile
@pytest.mark.few_programs
def test_a_server_counts_what_it_scores(tmp_path, monkeypatch):
    for extra in ("fastapi", "prometheus_client", "flatbuffers"):
        pytest.importorskip(extra, reason="the extra `serve` is not installed")
    from recjax.serving.service import Service, ServiceConfig

    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    train(write_day(tmp_path / "a.csv", range(100), 3000, 0), tmp_path / "run")
    assert inside("export", tmp_path / "run", "--out", tmp_path / "exported").status == 0

    async def act():
        service = Service(tmp_path / "exported", ServiceConfig())
        async with running(service) as app:
            before = (await ask(app, "/metrics"))[2]
            rows = [{"user": f"u{user}", "kind": "k1", "price": 5.0} for user in (1, 2, 3, 999)]
            assert (await ask(app, "/score", {"candidates": rows}))[0] == 200
            return before, (await ask(app, "/metrics"))[2]

    before, after = asyncio.run(act())
    assert "recjax_feature_psi{" not in before
    assert 'recjax_feature_unknown{feature="user"} 0.25' in after
    assert 'recjax_feature_unknown{feature="kind"} 0.0' in after
    indices = dict(re.findall(r'recjax_feature_psi\{feature="(\w+)"\} ([0-9.e-]+)', after))
    assert set(indices) == {"user", "kind", "price"} and float(indices["price"]) > 0.25  # of one value alone
