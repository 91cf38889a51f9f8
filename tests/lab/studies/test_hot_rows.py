"""The study of hot rows: what it makes of measures, and a small run of it whose bytes are worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.zipf import asked_for, contiguous_owners, law

from recjax.config.presets import load
from recjax.data.presence import Items, Presence
from recjax.embedding.plan import Plan
from recjax.embedding.segment import RowIds, Segment
from recjax.errors import ConfigError
from recjax.lab.studies.hot_rows import draw, findings, study, sweep
from recjax.lab.studies.hot_rows.measure import Arm, Contestant, contiguous_imbalance, trainer_presence
from recjax.train.build import build_trainer

pytestmark = pytest.mark.light_compile


def test_contiguous_owners_by_hand() -> None:
    """Ids 0 to 9 on 2 devices: those below 5 are asked for 12 times, the others 2; without ids 0 and 1 3 and 2.

    Without dedup 30 times and 9; without these ids 6 and 9.
    """
    items = Items(10, np.array([0, 1, 4, 7]), np.array([8, 1, 3, 2]), np.array([23, 1, 6, 9]))
    presence = Presence({"t": items}, 4, 2, 8, np.zeros(3))
    whole, hot = Plan({"t": (Segment("row_wise"),)}), (Segment("hot", RowIds((0, 1))), Segment("row_wise", "rest"))
    for dedup, of_whole, of_rest in ((True, 12 / 7, 3 / 2.5), (False, 30 / 19.5, 9 / 7.5)):
        assert contiguous_imbalance(presence, whole, 2, {"t": 10}, dedup) == pytest.approx(of_whole)
        assert contiguous_imbalance(presence, Plan({"t": hot}), 2, {"t": 10}, dedup) == pytest.approx(of_rest)
    assert contiguous_imbalance(presence, Plan({"t": (Segment("data_parallel"),)}), 2, {"t": 10}, True) == 1.0


def test_counts_are_those_of_the_law_of_the_ids() -> None:
    """Rows that a device asks for, ids that hot rows cover, and owners' loads: within 4 standard errors."""
    b, N, batches, V = 64, 4, 100, (90, 31)
    small = ("data=zipf_stream", "data.rows=90,31", "data.exponent=1.5", "small.below_rows=0", "plan=row_wise")
    hot_rows = ("embedding.hot.rows=12", f"embedding.hot.batches={batches}")
    config = load("synthetic", (*small, *hot_rows, f"mesh.devices={N}", f"train.batch_size={b * N}"))
    trainer = build_trainer(config, weights=False)
    counted = trainer_presence(trainer)
    hot = {}
    for table, rows in zip(trainer.plan.tables, V, strict=True):
        hot[table] = list(trainer.plan.tables[table][0].rows.ids)
        law_V, items = law(rows, 1.5), counted.tables[table]
        asked_V = asked_for(law_V, b)
        error = math.sqrt((asked_V * (1 - asked_V)).sum() / (batches * N))
        assert abs(counted.probability(table).sum() - asked_V.sum()) < 4 * error
        covered, found = law_V[hot[table]].sum(), items.found_U[np.isin(items.ids_U, hot[table])].sum()
        share = math.sqrt(covered * (1 - covered) / (batches * N * b))
        assert abs(found / items.found_U.sum() - covered) < 4 * share and len(hot[table]) > 2
    assert sum(map(len, hot.values())) == 12
    for dedup in (True, False):
        owners_N = np.zeros(N)
        for table, rows in zip(trainer.plan.tables, V, strict=True):
            asked_V = asked_for(law(rows, 1.5), b, dedup)
            asked_V[hot[table]] = 0
            owners_N += contiguous_owners(asked_V, N)
        error = math.sqrt(owners_N.max() / (batches * N)) / owners_N.mean()
        counted_too = contiguous_imbalance(
            counted, trainer.plan, N, dict(zip(trainer.plan.tables, V, strict=True)), dedup
        )
        assert abs(counted_too - owners_N.max() / owners_N.mean()) < 4 * error


def made(label: str, rows: int, padded: float, cpu: float) -> dict[str, Any]:
    times = {"route_cpu_ms": 1.0, "step_cpu_ms": cpu - 1, "step_ms": cpu, "cpu_ms": cpu, "noise": 0.02}
    return {
        "label": label,
        "devices": 2,
        "rows": rows,
        "covered": 0.5,
        "bytes": {"padded": padded, "useful": 1.0},
        "imbalance": 1.1,
        "contiguous_imbalance": 2.0,
        "times": times,
    }


def test_findings() -> None:
    labels = [arm.label for arm in study.arms((9,), True)]
    assert labels == ["row-wise, no dedup", "row-wise, dedup", "9 hot, no dedup", "9 hot, dedup", "table-wise, pooled"]
    measures = [(800.0, 12.0), (400.0, 10.0), (200.0, 8.0), (160.0, 6.0), (100.0, 24.0)]
    arms = [made(label, 9 * ("9 hot" in label), *of) for label, of in zip(labels, measures, strict=True)]
    (line,) = study.summary(arms)
    assert line["bytes"] == {"dedup": 2, "hot": 4, "hot and dedup": 5, "pooled": 8}
    assert line["cpu"] == {"dedup": 1.2, "hot": 1.5, "hot and dedup": 2, "pooled": 0.5}
    assert line["best"] == "9 hot, dedup"
    described = {
        "batches": 2,
        "batch_size": 4,
        "tables": [],
        "histogram": {"1": 9, "2": 1},
        "new": 0.25,
        "accesses": {"1": 1.0, "2": 0.6},
        "all": {"rows": 20, "items": 10, "ids": 16, "items_for": [1, 8, 10], "items_for_share": [0.1, 0.8, 1.0]},
    }
    about = {"model": "dlrm", "data": "zipf", "batch_size": 4, "dim": 8}
    copies = [
        {
            "devices": 8,
            "hosts": 2,
            "rows": 9,
            "on": on,
            "held": held,
            "sent": 60.0,
            "across": across,
            "all_sent": 90.0,
            "all_across": 45.0,
        }
        for on, held, across in (("device", 80.0, 40.0), ("host", 20.0, 10.0))
    ]
    result = {"about": about, "presence": described, "arms": arms, "copies": copies, "summary": [line]}
    drawn = draw.pictures(result)
    assert [picture.name for picture in drawn] == ["presence.png", "bytes.png", "copies.png", "cpu.png"]
    assert all(len(picture.png) > 10_000 for picture in drawn)
    report = findings.report(result, {}, drawn)
    rows = {row.quantity: row for row in report.rows}
    cpu = rows["CPU time of a step, times less than row-wise, no dedup, 2 device(s)"]
    assert cpu.source == "2.16 to 16.8 times faster" and cpu.same is False  # the best way needs half the time
    assert cpu.ours == "best 2.00 (dedup 1.20, hot 1.50, hot and dedup 2.00, pooled 0.50)"
    sent = rows["bytes sent, times less than row-wise, no dedup, 2 device(s)"]
    assert sent.ours.startswith("best 8.00") and sent.same is None
    assert rows["items of a batch that no batch before it had"].same is False  # a quarter
    assert rows["share of the items that takes 90% of the look-ups"].ours == "80.0% on zipf"
    on_hosts = rows["bytes with copies on hosts, over those on devices, 9 hot rows, 8 devices in 2 host(s)"]
    assert on_hosts.ours == "held 0.250x, sent 1.000x, across 0.250x" and on_hosts.same is None
    tables = {table.title: table.rows for section in report.sections for table in section.tables}
    assert tables["bytes of a device"][2] == ["8", "2", "9", "hosts", "20", "60", "10", "90", "45"]
    assert [[picture.name for picture in section.pictures] for section in report.sections] == [
        ["presence.png"],
        ["bytes.png", "cpu.png"],
        ["copies.png"],
    ]
    assert tables["2 device(s)"][4][:4] == ["9 hot, dedup", "50%", "160", "5.00"]
    assert ["2 batches", "1", "10.00%", "60.00%"] in tables["items by the number of batches that they are in"]


def test_a_choice_beside_others() -> None:
    """The third round is slow for all, which ratios within it leave out; 9 rows are within 5% of the best, 99 not."""
    times = {0: [10, 12, 20], 9: [9.2, 11.04, 18.4], 99: [10.5, 12.6, 21], 8: [9, 10.8, 18], -1: [10.1, 12.12, 19.8]}
    arms = [
        {"rows": max(0, rows), "label": str(rows), "covered": 0.5, "predicted_us": 8.0, "ms": ms, "cpu_ms": ms}
        for rows, ms in times.items()
    ]
    found = sweep.verdict(arms, 9)
    assert found["ratios"] == pytest.approx([1, 0.92, 1.05, 0.9, 1.01]) and found["best"] == 8
    assert found["band"] == pytest.approx(0.01) and found["chosen_over_best"] == pytest.approx(0.92 / 0.9)
    assert found["near"] and not found["slower"]
    worse = sweep.verdict(arms, 99)
    assert worse["slower"] and not worse["near"] and not sweep.verdict(arms, 0)["slower"]
    line = {"devices": 2, "choice": {"rows": 9, "why": "by hand"}, "arms": arms, "verdict": found}
    about = {"model": "dlrm", "data": "zipf", "batch_size": 4, "dim": 8}
    report = sweep.report({"about": about, "sweeps": [line]}, {})
    (row,) = report.rows
    assert row.ours == "1.022 (9 chosen, 8 shortest)" and row.why.startswith("at most 1.05; band of the clock 1.0%")
    (table,) = report.sections[0].tables
    assert table.rows[2] == ["9", "50.0%", "11.04", "0.920", "0.920 to 0.920", "11.0", "8 <-"]


@pytest.mark.full
def test_bytes_by_hand() -> None:
    """Two devices, all rows of two tables hot: half of [R, D + 1] and of [R, D] leaves each; no row is asked for."""
    small = ("data.rows=7,5", "data.train_rows=400", "embedding.dim=4", "train.batch_size=40", "small.below_rows=0")
    config = load("synthetic", (*small, "mesh.devices=2", "plan=row_wise", "embedding.hot.rows=12"))
    one = Contestant(Arm("hot", (), 12), config, 2)
    (group,) = one.trainer.bound.groups
    found = one.bytes()
    assert group.rows == 12 and found["padded"] == found["useful"] == 12 / 2 * 4 * (5 + 4)
    assert one.covered() == 1 and one.imbalance() == 1
    host, cpu, wall = one.turn(0, 3)
    assert 0 < host < cpu and wall > 0


@pytest.mark.full
def test_bytes_of_copies_on_hosts_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices in two hosts, all R = 12 rows of two tables hot, D = 4, float32.

    Copies on devices: 3/4 of [R, D + 1] is reduced and of [R, D] gathered; 2 of the 4 links of a ring cross, and 2 of 3
    other devices are elsewhere. On hosts: half of both inside, then half of half of both across. A device holds half.
    """
    small = ("data.rows=7,5", "data.train_rows=400", "embedding.dim=4", "train.batch_size=40", "small.below_rows=0")
    options = study.Options((12,), (4,), batches=2, rounds=0, steps=2, hosts=(2, 3, 4))
    config = load("synthetic", (*small, "plan=row_wise"))
    result = study.study(config, options, tmp_path, lambda text: None)
    assert "Not finished: 5 part(s) so far" in (tmp_path / "hot_rows.md").read_text()
    monkeypatch.setattr(study, "Contestant", None)  # what is there is not made again
    assert study.study(config, options, tmp_path, lambda text: None) == result
    reduced, gathered = 12 * 5 * 4, 12 * 4 * 4
    sent, across = 3 / 4 * (reduced + gathered), 3 / 4 * (reduced * 2 / 4 + gathered * 2 / 3)
    on_devices = {"held": gathered, "sent": sent, "across": across, "all_sent": sent, "all_across": across}
    across = (reduced / 2 + gathered / 2) / 2
    on_hosts = {"held": gathered / 2, "sent": sent, "across": across, "all_sent": sent, "all_across": across}
    case = {"devices": 4, "hosts": 2, "rows": 12}
    assert result["copies"] == [case | {"on": "device"} | on_devices, case | {"on": "host"} | on_hosts]


def test_options() -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        study.Options(hosts=(2, 0))
    with pytest.raises(ConfigError, match="--devices"):
        study.Options(devices=())
    with pytest.raises(ConfigError, match="--batches"):
        study.Options(batches=0)
