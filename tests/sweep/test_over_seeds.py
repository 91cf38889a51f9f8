"""Mean, deviation and number of runs over the seeds of a sweep, against a calculation by hand."""

import math
from pathlib import Path

import pytest

from recjax.config.presets import load
from recjax.sweep import report
from recjax.sweep.file import Axis, Run, Sweep

SEEDS = Axis(("seed",), (("0",), ("1",), ("2",)))
DIMS = Axis(("embedding.dim",), (("4",), ("16",)))


def sweep(*axes, sort="validation.auc"):
    run = Run(0, "synthetic", {}, (), load("synthetic"), Path("x"))
    return Sweep(Path("configs/size.toml"), Path("runs/size"), axes, sort, (run,))


def run(dim, seed, auc):
    done = {"test": {"auc": auc - 0.1, "logloss": 0.5}, "validation": {"auc": auc}, "samples_per_s": 1000.0}
    swept = {"embedding.dim": dim, "seed": seed}
    return {"index": 0, "swept": swept, "status": "open" if math.isnan(auc) else "done"} | (
        {} if math.isnan(auc) else done
    )


RUNS = [
    *(run("4", str(seed), auc) for seed, auc in enumerate((0.70, 0.72, 0.74))),
    run("16", "0", 0.8),  # the luckiest, but the only one that is done
    run("16", "1", math.nan),
]


def test_figures_over_the_seeds():
    best, other = report.over_seeds(sweep(DIMS, SEEDS), RUNS)
    assert best["swept"] == {"embedding.dim": "16"} and best["validation.auc"] == {"mean": 0.8, "std": None, "n": 1}
    assert other["validation.auc"]["mean"] == pytest.approx(0.72) and other["validation.auc"]["n"] == 3
    assert other["validation.auc"]["std"] == pytest.approx(math.sqrt((0.02**2 + 0.02**2) / 2))
    assert other["test.auc"]["mean"] == pytest.approx(0.62) and other["test.logloss"]["std"] == pytest.approx(0)


def test_lines():
    lines = report.seeds_table(sweep(DIMS, SEEDS), report.over_seeds(sweep(DIMS, SEEDS), RUNS)).splitlines()
    assert lines[0] == "over the seeds, mean (standard deviation):"
    assert lines[1].split() == ["dim", "n", "validation.auc", "test.auc", "test.logloss", "samples_per_s"]
    assert lines[3].split() == ["16", "1", "0.8000", "0.7000", "0.5000", "1,000"]
    assert lines[4].split()[:6] == ["4", "3", "0.7200", "(0.0200)", "0.6200", "(0.0200)"]


@pytest.mark.parametrize("axes", [(DIMS,), (DIMS, Axis(("seed",), (("0",),)))])
def test_nothing_where_the_seed_does_not_vary(axes):
    assert report.over_seeds(sweep(*axes), RUNS) == []


def test_seeds_within_a_zip():
    both = Axis(("seed", "embedding.dim"), (("0", "4"), ("1", "4"), ("0", "16")))
    assert [row["validation.auc"]["n"] for row in report.over_seeds(sweep(both), RUNS)] == [1, 3]
