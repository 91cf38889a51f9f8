"""curves.png: that it is drawn from what the run wrote, and that nothing heavy is imported before."""

import subprocess
import sys

import numpy as np
import pytest

from recjax.errors import TrainingError
from recjax.train.run import curves
from recjax.train.run.writers import MetricsFile


def write_run(path, with_auc=True):
    rng = np.random.default_rng(0)
    with MetricsFile(path, None) as file:
        for step in range(10, 3001, 10):
            loss = 0.52 + 0.15 * np.exp(-step / 400) + rng.normal() * 0.02
            file.write({"step": step, "split": "train", "loss": loss if step != 500 else float("nan")})
            if step % 250 == 0:
                auc = 0.77 - 0.2 * np.exp(-step / 500) - 3e-6 * max(step - 2000, 0)
                line = {"step": step, "split": "validation", "loss": 0.53 + 0.13 * np.exp(-step / 400)}
                file.write(line | ({"auc": auc} if with_auc else {}))
        file.write({"step": 3000, "split": "test", "loss": 99.0, "auc": 0.1})


def test_curves_show_the_series_the_baselines_and_the_chosen_step(tmp_path, monkeypatch):
    import matplotlib.figure

    drawn = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, file, **_: (drawn.append(self), file.write(b"png"))
    )
    write_run(tmp_path / "metrics.jsonl")
    curves.draw_curves(tmp_path / "metrics.jsonl", tmp_path / "c.png", "a run", {"movie mean": 0.7}, 2000)
    assert (tmp_path / "c.png").read_bytes() == b"png"
    loss, auc = drawn[0].axes
    raw, smooth, validation, chosen = loss.lines
    assert raw.get_xydata().shape == (299, 2), "300 training lines, of which one has no loss"
    assert 500 not in raw.get_xdata()
    assert np.std(np.diff(smooth.get_ydata())) < np.std(np.diff(raw.get_ydata())) / 5
    np.testing.assert_allclose(validation.get_xdata(), np.arange(250, 3001, 250))
    np.testing.assert_allclose(validation.get_ydata()[0], 0.53 + 0.13 * np.exp(-250 / 400))
    assert chosen.get_xdata() == [2000, 2000]
    model, test, baseline, chosen = auc.lines
    assert (list(test.get_xdata()), list(test.get_ydata())) == ([3000], [0.1])
    assert len(model.get_xdata()) == 12 and list(baseline.get_ydata()) == [0.7, 0.7]
    assert chosen.get_xdata() == [2000, 2000]
    assert drawn[0].get_suptitle() == "a run"


@pytest.mark.parametrize("lines", ["none", "no auc", "all"])
def test_curves_of_any_run_are_a_picture(tmp_path, lines):
    path = tmp_path / "metrics.jsonl"
    if lines == "none":
        MetricsFile(path, None).close()
    else:
        write_run(path, with_auc=lines == "all")
    curves.draw_curves(path, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def figure_of(path, monkeypatch, *arguments):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: drawn.append(self))
    curves.draw_curves(path / "metrics.jsonl", path / "c.png", "a run", *arguments)
    drawn[0].draw_without_rendering()
    return drawn[0]


def test_legends_lie_below_the_panels_which_show_the_same_steps(tmp_path, monkeypatch):
    write_run(tmp_path / "metrics.jsonl")
    figure = figure_of(tmp_path, monkeypatch, {"movie mean": 0.7}, 2000)
    loss, auc = figure.axes
    for panel in (loss, auc):
        assert panel.get_legend().get_window_extent().y1 < panel.get_window_extent().y0
    assert loss.get_xlim() == auc.get_xlim() and 3000 < auc.get_xlim()[1] < 3200 and -200 < auc.get_xlim()[0] < 0


def test_the_axis_of_a_single_evaluation_begins_with_the_first_step(tmp_path, monkeypatch):
    with MetricsFile(tmp_path / "metrics.jsonl", None) as file:
        file.write({"step": 103, "split": "validation", "loss": 0.5, "auc": 0.7})
    for panel in figure_of(tmp_path, monkeypatch).axes:
        assert panel.get_xlim() == pytest.approx((-0.03 * 103, 1.03 * 103))


def test_smoothing_is_the_mean_of_the_neighbours_twice():
    values = np.random.default_rng(1).normal(size=130)
    half, expected = 130 // 24, values
    for _ in range(2):
        centred = [expected[max(i - half, 0) : i + half + 1].mean() for i in range(130)]
        expected = np.array([*centred[: 130 - half], *[expected[-2 * half - 1 :].mean()] * half])
    np.testing.assert_allclose(curves._smoothed(values), expected, rtol=0, atol=1e-14)
    assert [len(curves._smoothed(values[:n])) for n in range(6)] == [0, 1, 2, 3, 4, 5]


def test_the_last_batch_which_may_be_small_makes_no_spike():
    values = np.linspace(0.7, 0.43, 21)
    values[-1] = 0.6  # of a few samples
    smooth = curves._smoothed(values)
    assert (np.diff(smooth) <= 1e-12).all() and smooth[-1] < 0.49


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    write_run(tmp_path / "metrics.jsonl")
    with pytest.raises(TrainingError, match=r"cannot write .*nowhere/c\.png"):
        curves.draw_curves(tmp_path / "metrics.jsonl", tmp_path / "nowhere" / "c.png", "title")


def test_plotting_is_imported_only_when_drawing():
    code = (
        "import sys, recjax.train.run.curves, recjax.train.run.writers, recjax.train.metrics.measures\n"
        "assert not {'matplotlib', 'torch', 'tensorflow', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
