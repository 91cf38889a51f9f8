"""Runs whose data have no test split, or nothing but training rows: they train, and say what is not measured."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from support.commands import inside, lines_of

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs, pytest.mark.full]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    users, rng = np.arange(400) % 20, np.random.default_rng(0)
    labels = (rng.random(400) < (0.2 + 0.6 * (users % 2))).astype(int)
    path = tmp_path_factory.mktemp("table") / "table.csv"
    table = {"user": [f"u{u}" for u in users], "clicked": labels, "stars": np.round(users / 4, 1)}
    pyarrow.csv.write_csv(pa.table(table), path)
    return path


def trained(file, out, split, *more):
    settings = ("train.batch_size=100", "train.epochs=2", "mesh.devices=1", *more)
    label = () if any(text.startswith("data.label") for text in more) else ("data.label=clicked",)
    columns = f"data.from={file}", "data.columns=user:id", f"data.split={split}"
    return inside("train", "table", *columns, *label, *settings, "--out", out, "--json")


def test_without_test_rows_the_results_are_those_of_validation(file, tmp_path):
    done = trained(file, tmp_path / "run", "random:0.9,0.1,0")
    assert done.status == 0 and "no test split, so there is no test line" in done.err
    assert done.result["eval_split"] == "validation" and done.result["references"] == {}
    (best,) = [x for x in lines_of(tmp_path / "run", "validation") if x["step"] == done.result["eval_step"]]
    assert done.result["eval"]["auc"] == best["auc"]
    assert lines_of(tmp_path / "run", "test") == []
    assert "recjax, validation, step" in inside(*_table(file, tmp_path / "run", "random:0.9,0.1,0")).out


def _table(file, out, split):
    columns = f"data.from={file}", "data.columns=user:id", f"data.split={split}", "data.label=clicked"
    return "train", "table", *columns, "train.batch_size=100", "train.epochs=2", "mesh.devices=1", "--out", out


def test_with_training_rows_alone_nothing_is_measured(file, tmp_path):
    done = trained(file, tmp_path / "run", "random:1,0,0")
    assert done.status == 0 and "nothing is measured" in done.err and "nothing chooses an earlier one" in done.err
    assert (done.result["eval"], done.result["eval_split"]) == ({}, "")
    assert "on no split" in inside(*_table(file, tmp_path / "run", "random:1,0,0")).out
    scored = inside("predict", tmp_path / "run", "--input", file, "--out", tmp_path / "scores.csv")
    assert scored.status == 0 and len((tmp_path / "scores.csv").read_text().splitlines()) == 401
    refused = inside("eval", tmp_path / "run")
    assert refused.status == 3 and "split 'test'" in refused.err


def test_several_labels_without_test_rows(file, tmp_path):
    done = trained(file, tmp_path / "run", "random:0.9,0.1,0", "data.label=clicked,stars:number", "model=mmoe")
    assert done.status == 0 and done.result["eval_split"] == "validation" and "clicked.auc" in done.result["eval"]
