"""A run that goes on with further data, one source after the other: `recjax train RUN --more DATA`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.commands import assert_refused, inside
from support.days import MODEL, TABLE, scores, train, write_day

import recjax
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.run.folder import RunFolder, read_config
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

ORDERED = ("train.shuffle=false", "train.epochs=1", "train.batch_size=64")


def arrays_of(run):
    """All arrays of the newest checkpoint of a run, by path, and its step."""

    def flat(arrays, path=""):
        for name, value in arrays.items():
            yield from flat(value, f"{path}{name}/") if isinstance(value, dict) else [(path + name, value)]

    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        return checkpoints.newest(print, lambda restored: (dict(flat(load(restored.arrays))), restored.step))


def go_on(run, data, *settings):
    done = inside("train", run, "--more", data, *settings, "--json")
    assert done.status == 0, done.err
    return done.result


def lines_of(run, split):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def prepare(rows, out, *settings):
    plain = [text.removeprefix("data.") for text in TABLE]
    done = inside("data", "prepare", "table", "--from", rows, "--out", out, *plain, *settings)
    assert done.status == 0, done.err
    return out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def days(folder):
    """Five days, each prepared with the vocabulary of all, and all of them together. Days end where a batch ends."""
    rows = [write_day(folder / f"{d}.csv", range(20 * d, 60 + 20 * d), 64 * (3 + d % 2), d) for d in range(5)]
    head, *_ = rows[0].read_text().splitlines()
    body = [line for day in rows for line in day.read_text().splitlines()[1:]]
    (folder / "all.csv").write_text("\n".join([head, *body]) + "\n")
    together = prepare(folder / "all.csv", folder / "all")
    of_each = [prepare(day, folder / f"day{d}", f"base={together}", "base_values=keep") for d, day in enumerate(rows)]
    return together, of_each


def of_prepared(data, out, *settings):
    done = inside("train", "table", f"data.path={data}", *MODEL, *ORDERED, *settings, "--out", out)
    assert done.status == 0, done.err


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_days_one_by_one_are_one_run_over_all(folder, days, optimizer):
    together, (first, *others) = days
    settings = (f"embedding.optimizer={optimizer}", "train.optimizer=sgd", "train.optimizer.momentum=0.9")
    of_prepared(together, folder / "joined", *settings)
    of_prepared(first, folder / "run", *settings)
    for day in others:
        go_on(folder / "run", day)
    (truth, steps), (result, done) = arrays_of(folder / "joined"), arrays_of(folder / "run")
    assert done == steps == 17
    assert result.keys() == truth.keys()
    for name, array in truth.items():
        assert result[name].tobytes() == array.tobytes(), name


def test_days_on_other_meshes_are_the_same_run(folder, days):
    together, (first, *others) = days
    settings = ("compute_dtype=float64",)
    of_prepared(together, folder / "joined", *settings)
    of_prepared(first, folder / "run", *settings)
    for day, mesh in zip(others, ("devices=4", "devices=1", "devices=3", "devices=2"), strict=True):
        go_on(folder / "run", day, f"mesh.{mesh}", "plan=row_wise")
    (truth, _), (result, _) = arrays_of(folder / "joined"), arrays_of(folder / "run")
    for name, array in truth.items():
        np.testing.assert_allclose(result[name], array, rtol=0, atol=1e-9, err_msg=name)


def test_each_day_is_measured_before_it_is_trained_on(folder):
    days = [write_day(folder / f"{d}.csv", range(30 * d, 60 + 30 * d), 640, d) for d in range(3)]
    train(days[0], folder / "run", "train.epochs=2")
    expected = recjax.evaluate(folder / "run", input=only_training_rows(days[1], folder / "rows.csv"))
    before = scores(folder / "run", days[1], folder / "scores.csv")
    summary = go_on(folder / "run", only_training_rows(days[1], folder / "a.csv"))
    assert summary["eval"]["auc"] == pytest.approx(expected["auc"], abs=1e-12)
    assert summary["sources"][0]["samples"] == 640
    # Values that the run did not know have rows now, and those that it knew keep theirs.
    assert summary["sources"][0]["new_values"] == 30
    tables = recjax.open_run(folder / "run").tables
    assert len(tables["user"].rows([f"u{user}" for user in range(90)])) == 90
    assert not np.array_equal(scores(folder / "run", days[1], folder / "scores.csv"), before)
    summary = go_on(folder / "run", only_training_rows(days[2], folder / "b.csv"), "train.epochs=3")
    assert [row["source"] for row in summary["sources"]] == [1, 2]
    assert summary["steps"] == 20 + 10 + 30
    assert [line["source"] for line in lines_of(folder / "run", "ahead")] == [1, 2]
    assert [line["step"] for line in lines_of(folder / "run", "test")] == [20]  # of the first data, as it was
    again = go_on(folder / "run", folder / "b.csv")  # nothing is left to do
    assert again["steps"] == 60 and again["sources"] == summary["sources"]
    # Whatever reads a run reads this one too.
    assert inside("eval", folder / "run", "--json").result["samples"] == 40
    assert inside("export", folder / "run", "--out", folder / "exported").status == 0
    train(days[2], folder / "next", f"train.init_from={folder / 'run'}", "train.epochs=0")
    logits = [scores(folder / name, days[1], folder / "scores.csv") for name in ("run", "next")]
    known = [line.split(",")[0] in {f"u{u}" for u in range(60, 120)} for line in days[1].read_text().split()[1:]]
    assert np.array_equal(logits[0][known], logits[1][known]) and sum(known) > 100


def only_training_rows(day, out):
    head, *rows = day.read_text().splitlines()
    out.write_text("\n".join([head, *(row for row in rows if row.endswith("train"))]) + "\n")
    return str(out)


def test_a_source_goes_on_from_the_step_that_validation_chose(folder):
    rows = write_day(folder / "a.csv", range(60), 640, 0)
    text = rows.read_text()
    rows.write_text(text.replace(",test\n", ",validation\n", 20))
    rate = ("embedding.optimizer.learning_rate=2", "train.eval_every=10")  # soon too much
    train(rows, folder / "run", "train.epochs=6", *rate, "train.patience=0")
    chosen = json.loads((folder / "run" / "summary.json").read_text())["eval_step"]
    assert chosen < 60
    go_on(folder / "run", write_day(folder / "b.csv", range(60), 280, 1))
    assert lines_of(folder / "run", "ahead")[0]["step"] == chosen
    assert arrays_of(folder / "run")[1] == chosen + 5
    assert max(line["step"] for line in lines_of(folder / "run", "train")) == chosen + 5


@pytest.mark.parametrize("moment", ["ahead", "train"])
def test_a_kill_changes_nothing(folder, moment):
    days = [write_day(folder / f"{d}.csv", range(30 * d, 90 + 30 * d), 6400, d) for d in range(2)]
    train(days[0], folder / "run", "train.batch_size=32", "train.log_every=1", "train.checkpoint_every=20")
    shutil.copytree(folder / "run", folder / "whole")
    go_on(folder / "whole", days[1])
    command = [sys.executable, "-m", "recjax", "train", str(folder / "run"), "--more", str(days[1])]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes, env=os.environ | {"XLA_FLAGS": ""})
    end = time.monotonic() + 120
    while not any(line["step"] > 200 + 30 for line in lines_of_torn(folder / "run", moment)):
        if moment == "ahead" and lines_of_torn(folder / "run", moment):
            break
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert inside("predict", folder / "run", "--input", days[1], "--out", folder / "s.csv").status == 0
    summary = go_on(folder / "run", days[1])
    whole, run = (arrays_of(folder / name) for name in ("whole", "run"))
    assert whole[1] == run[1] == 402
    assert all(array.tobytes() == run[0][name].tobytes() for name, array in whole[0].items())
    assert summary["sources"] == json.loads((folder / "whole" / "summary.json").read_text())["sources"]
    losses = [[(line["step"], line["loss"]) for line in lines_of(folder / name, "train")] for name in ("whole", "run")]
    assert losses[0] == losses[1]


def lines_of_torn(run, split):
    text = (run / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text[: text.rfind("\n")].splitlines()) if line["split"] == split]


def test_missing_values_and_a_day_of_one_kind_are_taken_as_they_are(folder):
    train(write_day(folder / "a.csv", range(60), 640, 0), folder / "run")
    (folder / "b.csv").write_text("user,kind,price,clicked,fold\n" + "u3,,,1,train\n" * 70 + "17,k1,2.5,1,train\n" * 30)
    summary = go_on(folder / "run", folder / "b.csv")
    assert summary["sources"][0] | {"auc": None} == summary["sources"][0] | {"auc": None}
    assert summary["sources"][0]["samples"] == 100
    assert recjax.open_run(folder / "run").tables["user"].rows(["17"]).shape == (1, 8)


def test_rare_values_get_a_row_once_they_are_frequent_enough_over_all_days(folder):
    columns = "data.columns=user:id:min_count=3,kind:id,price:dense"
    train(write_day(folder / "a.csv", range(20), 640, 0), folder / "run", columns)
    seen = {"u900": (1, 0, 2), "u901": (1, 1, 0), "u902": (2, 0, 0), "u903": (0, 3, 0)}
    rows = {}
    for day in range(3):
        named = [user for user, counts in seen.items() for _ in range(counts[day])]
        lines = ["user,kind,price,clicked,fold", *(f"{user},k1,{day}.5,{n % 2},train" for n, user in enumerate(named))]
        (folder / f"{day}.csv").write_text("\n".join(lines) + "\n")
        rows[day] = go_on(folder / "run", folder / f"{day}.csv")["sources"][-1]["new_values"]
    assert rows == {0: 0, 1: 1, 2: 1}  # u903, and u900; u901 and u902 were seen twice
    tables = recjax.open_run(folder / "run").tables
    assert tables["user"].rows(["u903", "u900"]).shape == (2, 8)
    with pytest.raises(KeyError, match="u901"):
        tables["user"].rows(["u901"])


def test_mistakes(folder):
    day, other = (write_day(folder / f"{d}.csv", range(60), 640, d) for d in range(2))
    train(day, folder / "run")
    run = folder / "run"
    before = sorted(path.name for path in run.iterdir()), (run / "metrics.jsonl").read_bytes()

    def refused(says, *arguments, status=2, of=run):
        done = inside("train", of, "--more", *arguments)
        assert_refused(done, status, says)

    refused("so --out has no place", other, "--out", folder / "x")
    refused("so train.batch_size cannot be set", other, "train.batch_size=32")
    refused("so train.steps cannot be set", other, "train.steps=32")
    refused("has trained on these rows already, as the data that it began with", day)
    refused("does not exist", folder / "no.csv", status=3)
    refused("is not a run folder", other, of=folder / "runs")
    fewer = folder / "fewer.csv"
    fewer.write_text("user,kind,clicked\nu1,k1,1\n")
    refused("has no column 'price'", fewer, status=3)
    wrong = folder / "wrong.csv"
    wrong.write_text("user,kind,price,clicked\nu1,k1,dear,1\n")
    refused("row 1.*'dear'", wrong, status=3)
    alone = prepare(other, folder / "alone")
    refused("have other rows in .* than in the run. Prepare them with base=RUN base_values=keep", alone, status=3)
    column = write_day(folder / "more.csv", range(60), 100, 3, more="shop")
    plain = [text.removeprefix("data.").replace("kind:id", "kind:id,shop:id") for text in TABLE]
    done = inside("data", "prepare", "table", "--from", column, "--out", folder / "more", *plain, f"base={run}")
    assert done.status == 0, done.err
    refused(r"has other columns than those that the run was trained on \(shop\)", folder / "more", status=3)
    assert before == (sorted(path.name for path in run.iterdir()), (run / "metrics.jsonl").read_bytes())
    train(day, folder / "killed", "train.checkpoint_every=5")
    shutil.rmtree(folder / "killed" / "checkpoints" / "00000010")  # as if it had been killed before
    refused("is not at the end of its training. Finish it first", other, of=folder / "killed")
    with RunFolder(run, read_config(run)):
        refused("another process is training in", other, status=1)
    go_on(run, other)
    done = inside("train", "table", f"data.from={day}", *TABLE, *MODEL, "--out", run)
    assert_refused(done, 2, "has gone on with further data, of which it has trained on number 1 last")


def test_a_run_whose_data_tell_nothing_is_refused(folder):
    few = ("train.steps=2", "mesh.devices=1", "data.train_rows=4096")
    done = inside("train", "synthetic", *few, "--out", folder / "run")
    assert done.status == 0, done.err
    assert_refused(inside("train", folder / "run", "--more", "x.csv"), 2, "kept no vocabularies of its data")
