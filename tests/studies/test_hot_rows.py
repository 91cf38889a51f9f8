"""The study of hot rows: what it makes of measures, and a small run of it whose bytes are worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recjax.config.presets import load
from recjax.data.presence import Items, Presence
from recjax.embedding.plan import Plan, RowIds, Segment
from recjax.errors import ConfigError
from recjax.studies.hot_rows import draw, findings, study
from recjax.studies.hot_rows.measure import Arm, Contestant, contiguous_imbalance


def test_contiguous_owners_by_hand() -> None:
    """Ids 0 to 9 on 2 devices: those below 5 are asked for 12 times, the others 2; without ids 0 and 1 3 and 2."""
    items = Items(10, np.array([0, 1, 4, 7]), np.array([8, 1, 3, 2]), np.array([8, 1, 3, 2]))
    presence = Presence({"t": items}, 4, 2, 8, np.zeros(3))
    whole, hot = Plan({"t": (Segment("row_wise"),)}), (Segment("hot", RowIds((0, 1))), Segment("row_wise", "rest"))
    assert contiguous_imbalance(presence, whole, 2, {"t": 10}) == pytest.approx(12 / 7)
    assert contiguous_imbalance(presence, Plan({"t": hot}), 2, {"t": 10}) == pytest.approx(3 / 2.5)
    assert contiguous_imbalance(presence, Plan({"t": (Segment("data_parallel"),)}), 2, {"t": 10}) == 1.0


def made(label: str, rows: int, padded: float, cpu: float) -> dict[str, Any]:
    times = {"route_cpu_ms": 1.0, "step_cpu_ms": cpu - 1, "step_ms": cpu, "cpu_ms": cpu, "noise": 0.02}
    return {"label": label, "devices": 2, "rows": rows, "covered": 0.5, "bytes": {"padded": padded, "useful": 1.0},
            "imbalance": 1.1, "contiguous_imbalance": 2.0, "times": times}  # fmt: skip


def test_findings() -> None:
    labels = [arm.label for arm in study.arms((9,), True)]
    assert labels == ["row-wise, no dedup", "row-wise, dedup", "9 hot, no dedup", "9 hot, dedup", "table-wise, pooled"]
    measures = [(800.0, 12.0), (400.0, 10.0), (200.0, 8.0), (160.0, 6.0), (100.0, 24.0)]
    arms = [made(label, 9 * ("9 hot" in label), *of) for label, of in zip(labels, measures, strict=True)]
    (line,) = study.summary(arms)
    assert line["bytes"] == {"dedup": 2, "hot": 4, "hot and dedup": 5, "pooled": 8}
    assert line["cpu"] == {"dedup": 1.2, "hot": 1.5, "hot and dedup": 2, "pooled": 0.5}
    assert line["best"] == "9 hot, dedup"
    described = {"batches": 2, "batch_size": 4, "tables": [], "histogram": {"1": 9, "2": 1}, "new": 0.25,
                 "accesses": {"1": 1.0, "2": 0.6}, "all": {"rows": 20, "items": 10, "ids": 16, "items_for": [1, 8, 10],
                 "items_for_share": [0.1, 0.8, 1.0]}}  # fmt: skip
    about = {"model": "dlrm", "data": "zipf", "batch_size": 4, "dim": 8}
    result = {"about": about, "presence": described, "arms": arms, "summary": [line]}
    drawn = draw.pictures(result)
    assert [picture.name for picture in drawn] == ["presence.png", "bytes.png", "cpu.png"]
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
    tables = {table.title: table.rows for section in report.sections for table in section.tables}
    assert tables["2 device(s)"][4][:4] == ["9 hot, dedup", "50%", "160", "5.00"]
    assert ["2 batches", "1", "10.00%", "60.00%"] in tables["items by the number of batches that they are in"]


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
    assert one.route_ms(0) >= 0 and min(one.step_ms(0)) > 0


def test_options() -> None:
    with pytest.raises(ConfigError, match="--devices"):
        study.Options(devices=())
    with pytest.raises(ConfigError, match="--batches"):
        study.Options(batches=0)
