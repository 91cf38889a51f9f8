"""`recjax eval` as a whole: splits, slices, groups, calibration, and splits that are too large to be kept."""

import json
import tempfile

import numpy as np
import pytest
from support.commands import assert_refused, inside

import recjax
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.storage import blocks
from recjax.train import evaluation
from recjax.train.metrics import auc, measures, slices
from recjax.train.run.open_run import open_run

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

PLAIN = ("auc", "logloss", "ne", "calibration", "samples")


def block(seed, count=500):
    """Users 0 to 29, jagged tags with empty bags, weights 0 to 2, and a label that depends on both."""
    rng = np.random.default_rng(seed)
    users, lengths = rng.integers(0, 30, (count, 1)), rng.integers(0, 3, count).astype(np.int32)
    tags = rng.integers(0, 8, lengths.sum())
    labels = (rng.random(count) < 0.2 + 0.6 * (users[:, 0] % 2)).astype(np.float32)
    bags = {"user": Bags(users), "tags": Bags(tags, lengths)}
    weights = rng.integers(0, 3, count).astype(np.float32)
    return Batch(rng.normal(size=(count, 1)).astype(np.float32), bags, labels, weights)


@pytest.fixture(scope="module")
def run(preset, tmp_path_factory):
    """A run on data with weights."""
    folder = tmp_path_factory.mktemp("weighted")
    schema = Schema(("x",), (Feature("user", 30), Feature("tags", 8, None)))
    splits = {"train": [block(0), block(1)], "validation": [block(2)], "test": [block(3)]}
    blocks.write_prepared(folder / "data", "clicks", schema, splits, {})
    done = inside(
        "train",
        preset,
        "data=prepared",
        f"data.path={folder / 'data'}",
        "mesh.devices=2",
        "train.epochs=1",
        "train.eval_batch_size=128",
        "--out",
        folder / "run",
    )
    assert done.status == 0, done.err
    return folder / "run"


@pytest.fixture(scope="module")
def truth(run):
    """Labels, logits and weights of the test split, and its users and bags of tags."""
    trainer, state, _ = open_run(run, (), ("test",), None, report=print)
    batches = list(trainer.predict(state, trainer.eval_inputs("test")))
    assert [batch.size for batch, _ in batches] == [128, 128, 128, 116]
    whole = block(3)
    logits = np.concatenate([logits for _, logits in batches])
    tags = np.split(whole.bags["tags"].ids, np.cumsum(whole.bags["tags"].lengths)[:-1])
    return (whole.labels, logits, whole.weights), whole.bags["user"].ids[:, 0], tags


def pick(samples, chosen):
    return measures.evaluate(*(column[np.array(chosen)] for column in samples))


def test_several_splits_at_once(run):
    both = inside("eval", run, "--split", "test", "--split", "train", "--json").result
    assert both.keys() == {"step", "splits"} and list(both["splits"]) == ["test", "train"]
    for split in both["splits"]:
        alone = inside("eval", run, "--split", split, "--json").result
        assert alone == {"step": both["step"], "split": split, **both["splits"][split]}
    assert (run / "calibration.png").read_bytes().startswith(b"\x89PNG")
    text = inside("eval", run, "--split", "train", "--split", "test").out
    assert text.splitlines()[1].split() == ["split", "train", "test"]
    assert recjax.evaluate(run, split=("test", "train")) == both
    assert recjax.evaluate(run, by="tags")["by"].keys() == {"tags"}


def test_slices_and_groups(run, truth):
    samples, users, tags = truth
    result = inside("eval", run, "--by", "user", "--by", "tags", "--top", "3", "--group", "user", "--json").result
    assert {name: result[name] for name in PLAIN} == measures.evaluate(*samples)
    assert result["auc_method"] == "exact" and "auc_low" not in result
    assert [row["value"] for row in result["by"]["user"]][3:] == ["rest"]
    for row in result["by"]["user"][:3]:
        picked = pick(samples, users == row["id"])
        assert {name: row[name] for name in PLAIN} == pytest.approx(picked)
    *_, rest, none = result["by"]["tags"]
    shown = {row["id"] for row in result["by"]["tags"][:3]}
    assert {name: rest[name] for name in PLAIN} == pytest.approx(pick(samples, [bool(set(t) - shown) for t in tags]))
    assert {name: none[name] for name in PLAIN} == pytest.approx(pick(samples, [len(t) == 0 for t in tags]))
    labels, logits, weights = samples
    won = total = 0.0
    for user in range(30):
        area, weight = auc.auc(*(c[users == user] for c in samples)), weights[users == user].sum()
        if not np.isnan(area):
            won, total = won + area * weight, total + weight
    assert result["grouped"]["gauc"] == pytest.approx(won / total)
    text = inside("eval", run, "--by", "tags", "--group", "user").out
    assert "test by tags:" in text and "no value" in text and "AUC within each user" in text


def test_groups_are_worked_on_in_parts(run, monkeypatch):
    """Of a size of their own, in few files however many rows there are."""
    kept = recjax.evaluate(run, group="user")["grouped"]
    made = []
    for rows, files in ((500, 0), (499, 2), (99, 6), (1, 256)):
        made.clear()
        monkeypatch.setattr(evaluation, "_PART_ROWS", rows)
        monkeypatch.setattr(slices, "_file", lambda: made.append(1) or tempfile.TemporaryFile())
        assert recjax.evaluate(run, group="user", exact_rows=9)["grouped"] == pytest.approx(kept)
        assert len(made) == files


def test_a_split_too_large_to_be_kept(run, truth):
    samples, _, _ = truth
    exact = measures.evaluate(*samples)
    result = inside("eval", run, "--exact-rows", "99", "--by", "user", "--group", "user", "--json").result
    assert result["auc_method"] == "binned"
    assert result["auc_low"] <= exact["auc"] <= result["auc_high"] < result["auc_low"] + 1e-3
    assert {name: result[name] for name in PLAIN[1:]} == pytest.approx({name: exact[name] for name in PLAIN[1:]})
    kept = inside("eval", run, "--by", "user", "--group", "user", "--json").result
    assert result["grouped"] == pytest.approx(kept["grouped"])
    for row, whole in zip(result["by"]["user"], kept["by"]["user"], strict=True):
        assert (row["id"], row["samples"]) == (whole["id"], whole["samples"])
        if whole["auc"] is None:  # one class
            assert (row["auc"], row["auc_low"], row["auc_high"]) == (None, None, None)
        else:
            assert row["auc_low"] <= whole["auc"] <= row["auc_high"]
    assert "the true one lies between" in inside("eval", run, "--exact-rows", "499").out
    assert "the true one lies between" not in inside("eval", run, "--exact-rows", "500").out


def test_the_calibration_curve(run, truth):
    (labels, logits, weights), _, _ = truth
    result = inside("eval", run, "--calibration-bins", "4", "--calibration-by", "width", "--json").result
    curve, probabilities = result["calibration_curve"], measures.probabilities(logits)
    bins = np.floor(probabilities * 4).astype(int)
    expected = []
    for number in np.unique(bins[weights > 0]):
        at = (bins == number) & (weights > 0)
        weight = weights[at].sum()
        means = (np.sum((weights * x)[at]) / weight for x in (probabilities, labels))
        expected.append([*means, int(at.sum()), weight])
    assert [list(point.values()) for point in curve] == [pytest.approx(row) for row in expected]
    assert result["ece"] == pytest.approx(sum(w * abs(p - o) for p, o, _, w in expected) / weights.sum())
    assert result["positive_share"] == pytest.approx(np.sum(weights * labels) / weights.sum())


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--by", "usr"], r"no categorical feature 'usr'\. Did you mean user\? They have user, tags"),
        (["--group", "tags"], "samples cannot be grouped by 'tags'.* several values a sample"),
        (["--by", "user", "--top", "0"], "top is 0; it must be at least 1"),
        (["--calibration-bins", "0"], "calibration_bins is 0; it must be at least 1"),
        (["--exact-rows", "-1"], "exact_rows is -1; it must be at least 0"),
    ],
)
def test_mistakes(run, options, pattern):
    assert_refused(inside("eval", run, *options), 2, pattern)


def test_a_run_folder_that_cannot_be_written_is_evaluated_all_the_same(run, monkeypatch):
    def refuse(path, data):
        raise recjax.errors.TrainingError(f"cannot write {path}: Read-only file system.")

    monkeypatch.setattr("recjax.train.metrics.calibration.write_whole", refuse)
    done = inside("eval", run, "--json")
    assert done.result["samples"] == json.loads((run / "summary.json").read_text())["eval"]["samples"]
    assert "there is no picture of the calibration: cannot write" in done.err


def test_data_without_a_validation_split(preset, tmp_path):
    """Blocks of one's own need not have one; nor a test split, until someone asks for it."""
    schema = Schema(("x",), (Feature("user", 30), Feature("tags", 8, None)))
    blocks.write_prepared(tmp_path / "data", "clicks", schema, {"train": [block(0)], "test": [block(3)]}, {})
    done = inside(
        "train",
        preset,
        "data=prepared",
        f"data.path={tmp_path / 'data'}",
        "mesh.devices=2",
        "train.steps=2",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert done.result["eval"]["samples"] == (block(3).weights > 0).sum()
    assert_refused(inside("eval", tmp_path / "run", "--split", "validation"), 3, "validation")
