"""The table and the picture, from results made by hand."""

import math
from pathlib import Path

import pytest

from recjax.config.presets import load
from recjax.sweep import report
from recjax.sweep.file import Axis, Run, Sweep, direction

SEEDS = Axis(("seed",), (("0",), ("1",)))
DIMS = Axis(("embedding.dim", "model.bottom"), (("16", "32-16"), ("4", "8-4")))
BATCHES = Axis(("train.batch_size",), (("256",), ("1024",), ("4096",)))


def sweep(*axes, sort=None):
    run = Run(0, "synthetic", {}, (), load("synthetic"), Path("x"))
    return Sweep(Path("configs/size.toml"), Path("runs/size"), axes, sort, (run,))


def row(index, auc, status="done", **swept):
    known = {"index": index, "status": status, "swept": {key.replace("__", "."): value for key, value in swept.items()}}
    measured = {
        "test": {"auc": auc, "logloss": 1 - auc},
        "validation": {"auc": auc + 0.1, "logloss": 0.9 - auc},
        "samples_per_s": 1000.0 * index,
    }
    return known | (measured if status == "done" else {"error": "no"})


THREE = [row(0, 0.6, seed="0"), row(1, math.nan, "failed", seed="1"), row(2, 0.75, seed="2")]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        (None, [0, 1, 2]),
        ("test.auc", [2, 0, 1]),
        ("test.logloss", [2, 0, 1]),
        ("samples_per_s", [2, 0, 1]),
        ("test.ne", [0, 1, 2]),
    ],
)
def test_the_best_comes_first_and_what_has_no_value_last(sort, order):
    assert [r["index"] for r in report.ordered(sweep(SEEDS, sort=sort), THREE)] == order
    assert [r["index"] for r in report.ordered(sweep(SEEDS, sort=sort), THREE[::-1])][-1] in (order[-1], 0)


def test_less_loss_is_better_even_where_the_auc_is_not():
    rows = [row(0, 0.7), row(1, 0.6)]
    rows[1]["test"]["logloss"] = 0.1
    assert [r["index"] for r in report.ordered(sweep(SEEDS, sort="test.logloss"), rows)] == [1, 0]


def test_measures_of_single_labels_order_runs_too():
    rows = [row(0, 0.7), row(1, 0.6)]
    for number, result in enumerate(rows):
        result["validation"] |= {"click.auc": 0.5 + number / 4, "rating.mae": 1.0 + number}
    assert report.measure(rows[1], "validation.click.auc") == 0.75
    assert [r["index"] for r in report.ordered(sweep(SEEDS, sort="validation.click.auc"), rows)] == [1, 0]
    assert [r["index"] for r in report.ordered(sweep(SEEDS, sort="validation.rating.mae"), rows)] == [0, 1]
    assert direction("validation.click.nothing") is None and direction("click.auc") is None


def test_table():
    assert report.table(sweep(SEEDS, sort="test.ne"), THREE).splitlines() == [
        "run  seed  validation.auc  test.auc  test.logloss  samples_per_s  test.ne",
        "---------------------------------------------------------------------------------",
        "  0     0          0.7000    0.6000        0.4000              0        -",
        "  1     1               -         -             -              -        -  failed",
        "  2     2          0.8500    0.7500        0.2500          2,000        -",
    ]


def test_table_shortens_keys_only_where_they_stay_apart():
    rates = Axis(("train.optimizer.learning_rate",), (("1",),)), Axis(("embedding.optimizer.learning_rate",), (("2",),))
    result = row(0, 0.5, train__optimizer__learning_rate="1", embedding__optimizer__learning_rate="2", seed="0")
    title = report.table(sweep(*rates, SEEDS), [result]).splitlines()[0]
    assert title.split()[1:4] == ["train.optimizer.learning_rate", "embedding.optimizer.learning_rate", "seed"]


def grid():
    """AUC 0.5 + 0.1 for D=16, + 0.01 for each step of the batch size, + 0.002 for seed 1; the last one is missing."""
    rows = []
    for dim, (d, bottom) in enumerate(DIMS.points):
        for step, (batch,) in enumerate(BATCHES.points):
            for seed in (0, 1):
                auc = 0.5 + 0.1 * (1 - dim) + 0.01 * step + 0.002 * seed
                swept = {"embedding__dim": d, "model__bottom": bottom, "train__batch_size": batch, "seed": str(seed)}
                rows.append(row(len(rows), auc, **swept))
    return rows[:-1]


def test_points_of_a_line_agree_in_the_other_axes_and_differ_in_the_seed():
    lines = report.points(BATCHES, [DIMS], "test.auc", grid())
    assert lines.keys() == {(("16", "32-16"),), (("4", "8-4"),)}
    assert lines[(("16", "32-16"),)] == {
        0: pytest.approx([0.6, 0.602]),
        1: pytest.approx([0.61, 0.612]),
        2: pytest.approx([0.62, 0.622]),
    }
    assert lines[(("4", "8-4"),)][2] == pytest.approx([0.52])
    across = report.points(DIMS, [BATCHES], "test.auc", grid())
    assert [*across[(("4096",),)].values()] == [pytest.approx([0.62, 0.622]), pytest.approx([0.52])]


def test_picture(tmp_path):
    out = tmp_path / "sweep.png"
    assert report.draw(sweep(SEEDS, DIMS, BATCHES), grid(), out)
    assert out.read_bytes().startswith(b"\x89PNG")
    # Nothing to see: no run is done, or nothing but the seed varies.
    failed = [row(0, 0.0, "failed", train__batch_size="256")]
    assert not report.draw(sweep(BATCHES), failed, tmp_path / "none.png")
    assert not report.draw(sweep(SEEDS), THREE, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, in place of files."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: kept.append(self))
    return kept


def test_what_the_panels_show(figures, tmp_path):
    """Read off the figure: mean and range over seeds at each position, ticks and legend."""
    report.draw(sweep(SEEDS, DIMS, BATCHES), grid(), tmp_path / "sweep.png")
    panels = figures[0].axes
    assert len(panels) == 6  # three measures, two axes
    labels = [panel.get_ylabel() for panel in panels[::2]]
    assert labels == ["validation AUC", "validation log loss (nats)", "samples/s"]
    assert panels[4].get_xlabel() == "embedding.dim (with bottom)" and panels[5].get_xlabel() == "train.batch_size"
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["16", "4"]
    auc = panels[1]
    assert [tick.get_text() for tick in auc.get_xticklabels()] == ["256", "1024", "4096"]
    assert [text.get_text() for text in panels[5].get_legend().get_texts()] == ["dim=16", "dim=4"]
    wide, narrow = auc.containers
    assert list(wide.lines[0].get_ydata()) == pytest.approx([0.701, 0.711, 0.721])
    assert list(narrow.lines[0].get_ydata()) == pytest.approx([0.601, 0.611, 0.62])
    assert [line.get_linestyle() for line in (wide.lines[0], narrow.lines[0])] == ["-", "--"]
    ranges = [segment[:, 1].tolist() for segment in narrow.lines[2][0].get_segments()]
    assert ranges == [pytest.approx([0.6, 0.602]), pytest.approx([0.61, 0.612]), pytest.approx([0.62, 0.62])]


def test_categories_are_not_joined_and_what_failed_has_no_place(figures, tmp_path):
    """Of single runs, which have no bars; without a validation split, of the test split."""
    models = Axis(("model",), (("dlrm",), ("dcnv2",), ("wide_deep",)))
    rows = [row(i, 0.5 + i / 10, "failed" if i == 0 else "done", model=m) for i, (m,) in enumerate(models.points)]
    for result in rows[1:]:
        result["validation"] = {}
    report.draw(sweep(models), rows, tmp_path / "sweep.png")
    auc = figures[0].axes[0]
    assert auc.get_ylabel() == "test AUC" and not auc.containers
    assert [tick.get_text() for tick in auc.get_xticklabels()] == ["dcnv2", "wide_deep"]
    (line,) = auc.lines
    assert line.get_linestyle() == "None" and line.get_xydata().tolist() == [[0, 0.6], [1, 0.7]]
    assert "without 1 of 3 runs, not done" in figures[0].get_suptitle()


def test_ticks_name_as_many_keys_as_tell_the_points_apart(figures, tmp_path):
    both = Axis(("a.x", "a.y", "a.z"), (("1", "2", "3"), ("1", "3", "3")))
    rows = [row(i, 0.5, a__x=p[0], a__y=p[1], a__z=p[2]) for i, p in enumerate(both.points)]
    report.draw(sweep(both), rows, tmp_path / "sweep.png")
    assert [tick.get_text() for tick in figures[0].axes[0].get_xticklabels()] == ["1 / 2", "1 / 3"]
