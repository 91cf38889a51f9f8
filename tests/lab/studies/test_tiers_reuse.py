"""The study of tables larger than memory: published locality, bandwidth by table, nodes that count computing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recjax.config import presets
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Segment
from recjax.lab.predict.nodes import Need, Node, Table, bounds, compared
from recjax.lab.predict.tier_plan import run_of, tier_plan
from recjax.lab.studies.tiers import measure, study
from recjax.planning.tier_model import Classes


@pytest.mark.parametrize("name", measure.HISTOGRAMS)
def test_a_law_has_the_shares_of_the_histogram(name: str) -> None:
    """Of rows that are looked up once, and of look-ups in each bin, up to how the source rounds."""
    histogram = measure.HISTOGRAMS[name]
    law = histogram.law(histogram.rows)
    assert law.rows == pytest.approx(histogram.rows)
    assert (law.rows_K * law.q_K).sum() == pytest.approx(1)
    shares_K = law.rows_K * law.q_K
    assert shares_K == pytest.approx(np.array(histogram.of_lookups_K) / sum(histogram.of_lookups_K), rel=1e-6)
    assert law.rows_K[0] / law.rows == pytest.approx(histogram.of_rows_K[0], abs=0.01)
    times_K = law.q_K * histogram.lookups  # how often each is looked up in a batch
    assert np.all(np.diff(times_K) > 0) and times_K[0] == pytest.approx(1, rel=0.02)
    for times, least, most in zip(times_K[1:8], 2.0 ** np.arange(7), 2.0 ** np.arange(1, 8), strict=True):
        assert least < times <= 1.03 * most  # shares are rounded to a thousandth


@pytest.mark.full
@pytest.mark.parametrize("name", [*measure.HISTOGRAMS, "Zipf"])
def test_the_closed_form_is_within_a_point_of_a_drawn_stream(name: str) -> None:
    curve = study.reuse_curve(name, (0.05, 0.2, 0.6))
    assert [one["slots"] for one in curve] == [pytest.approx(slots, abs=2) for slots in (10_000, 40_000, 120_000)]
    for one in curve:
        for rates in one["rules"].values():
            assert abs(rates["model"] - rates["counted"]) < 0.01
        counted = [rates["counted"] for rates in one["rules"].values()]
        assert counted == sorted(counted)


def test_bandwidth_of_tables_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 64 + 4 bytes, 100 samples/s: a table of 1,000 rows with 3 ids a sample, and one of 9,000 with one."""
    settings: tuple[str, ...] = ("data.rows=1000,9000", "data.ids_per_bag=3,1", "data.weighted=false")
    settings += ("embedding.dim=16", "embedding.optimizer=rowwise_adagrad")
    monkeypatch.setattr(study, "MODELS", {"x": ("synthetic", settings, 100.0)})
    need = study.bandwidth_need("x")
    assert (need["tables"], need["bytes"]) == (2, 68 * 10_000)
    assert [need[key] for key in ("least", "middle", "most", "total")] == pytest.approx([6_800, 13_600, 20_400, 27_200])
    assert need["of_half"] == pytest.approx(0.1 * 2 / 3)  # two thirds of the small table


def test_computing_and_finding_rows_ask_for_nodes_too() -> None:
    """Of a hundred nodes at 10 FLOP/s each, a thousand a batch are all that ten batches in ten seconds may take."""
    cold = Classes(np.array([1000.0]), np.array([1e-3]))
    need = Need("x", [Table(cold, 4.0, 1.0)], 1.0, flop=1000.0, home_bytes=1.0, slot_bytes=2.0)
    node = Node("by hand", 40.0, 1e6, 1e6, dram_bytes=100.0, flops=10.0)
    assert bounds(need, node, 50, False)["computing"] == 2.0
    found = compared(need, node)
    assert [found[key]["nodes"] for key in ("without", "with")] == [100, 100]
    # Beside 4,000 bytes of rows 1,000 to find them, and for 200 rows on 20 devices 400 more: of 20 hosts of 100 bytes.
    assert bounds(need, node, 20, True)["bytes"] == pytest.approx(5400 / 2000)
    alone = Need("x", need.tables, 1.0)
    assert bounds(alone, node, 20, True)["bytes"] == pytest.approx(2.0)
    assert "computing" not in bounds(alone, Node("x", 40.0, 1e6, 1e6), 20, False)


@pytest.mark.full  # a thousand tables
def test_model_a_is_bound_by_computing() -> None:
    """2.3 PFLOP/s of 93.6 TFLOP/s a node, either way."""
    found = study.nodes_saved("model A")[-2:]
    assert [(one["without"]["nodes"], one["with"]["nodes"], one["memory_nodes"]) for one in found] == [(25, 25, 25)] * 2
    assert {one[way]["bound_by"] for one in found for way in ("without", "with")} == {"computing"}
    storage = study.nodes_saved("model F")[-1]
    assert storage["memory_nodes"] / storage["with"]["nodes"] == pytest.approx(41 / 12)


@pytest.mark.full
def test_model_f_is_planned_with_caches_of_columns(tmp_path: Path) -> None:
    """One table cut by columns, all by rows; of eight processes each finds an eighth of the rows."""
    plan: dict[str, tuple[Segment, ...]] = {f"sparse_{n}": (Segment("row_wise"),) for n in range(22)}
    plan["sparse_0"] = tuple(Segment("row_wise", columns=columns) for columns in ((0, 128), (128, 256)))
    file = tmp_path / "plan.json"
    file.write_text(Plan(plan).to_json())
    config = presets.load("bench_model_f", [f"plan={file}", "tier.device_bytes=32GB"])
    told = tier_plan(config)
    assert told["cached"] and {of["table"] for of in told["tables"]} >= {"sparse_0[0:128]", "sparse_0[128:256]"}
    assert all(of["rows"] == pytest.approx(sum(of[k] for k in _PLACES)) for of in told["tables"])
    assert told["steady_hit_rate"] < told["belady_hit_rate"] < 1
    assert told["directory_bytes"] == 8 * run_of(config, 8).directory_bytes()


_PLACES = ("device", "dram", "disk", "untouched")
