"""What a run learns, against the best that is possible on synthetic data with a planted signal."""

from pathlib import Path

import pytest

import recjax

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]


# Where tables have few rows, few samples are enough.
SMALL = (
    "data.rows=60,50,40,20",
    "data.train_rows=100000",
    "train.epochs=3",
    "train.batch_size=512",
    "data.test_rows=30000",
    "data.validation_rows=10000",
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        pytest.param("synthetic", ("mesh.devices=8",), marks=pytest.mark.wide),
        pytest.param("synthetic_multihot", ("mesh.devices=2",), marks=pytest.mark.wide),
        ("synthetic_multihot", ("mesh.devices=1", *SMALL)),
    ],
    ids=["synthetic", "synthetic_multihot", "small"],
)
def test_a_run_comes_within_a_hundredth_of_the_planted_optimum(
    preset: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    summary = recjax.fit(recjax.load(preset, *settings), tmp_path / "run")
    best = summary["references"]["best possible"]
    assert 0.75 < best < 0.85
    assert best - 0.01 < summary["eval"]["auc"] < best + 0.01
    assert summary["eval"]["calibration"] == pytest.approx(1, abs=0.1)


@pytest.mark.full
def test_without_a_signal_there_is_nothing_to_learn(tmp_path: Path) -> None:
    config = recjax.load("synthetic", "data.shuffle_labels=true", "train.steps=300", "mesh.devices=2")
    summary = recjax.fit(config, tmp_path / "run")
    assert summary["references"]["best possible"] == 0.5
    assert summary["eval"]["auc"] == pytest.approx(0.5, abs=0.02)
