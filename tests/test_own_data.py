"""Training on data that one's own code wrote: few rows, no validation split."""

import re
import shutil

import numpy as np
import pytest
from support import tables
from support.commands import OWN, SCHEMA, arrays, assert_refused, assert_same_arrays, inside, lines_of, prepare

from recjax.data.storage.blocks import open_prepared, write_prepared

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


def test_a_batch_larger_than_the_data_is_all_of_them(preset, tmp_path):
    """600 rows: the numbers are those of batches of 600; a run goes on, and is evaluated."""
    data = prepare(tmp_path / "data")
    common = ("train", preset, *OWN, f"data.path={data}", "train.accumulate=2")
    large, same = tmp_path / "large", tmp_path / "same"
    done = inside(*common, "train.batch_size=1000", "train.steps=2", "--out", large)
    assert done.status == 0, done.err
    assert done.err.count("train.batch_size is 1,000, but the training split has 600 samples: each step takes all") == 1
    assert inside(*common, "train.batch_size=1000", "train.steps=4", "--out", large).status == 0
    done = inside(*common, "train.batch_size=600", "train.steps=4", "--out", same)
    assert done.status == 0 and "each step takes all" not in done.err
    assert_same_arrays(arrays(large, 4), arrays(same, 4))
    assert [line["samples"] for line in lines_of(large, "train")] == [600, 1200, 1800, 2400]
    losses = [[line["loss"] for line in lines_of(run, "train")] for run in (large, same)]
    assert losses[0] == losses[1]
    results = [inside("eval", run, "train.eval_batch_size=5000", "--json").result for run in (large, same)]
    assert results[0] == results[1]


def test_without_a_validation_split_training_says_so(preset, good, tmp_path):
    whole = open_prepared(good)
    splits = {split: [whole.read(split, i) for i in range(len(whole.row_counts(split)))] for split in ("train", "test")}
    source = write_prepared(tmp_path / "data", "own", SCHEMA, splits, {})
    done = inside(
        "train",
        preset,
        *OWN,
        f"data.path={source.path}",
        "train.patience=2",
        "train.steps=2",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert done.result["eval_step"] == done.result["steps"] == 2
    (said,) = re.findall("own has no validation split .*", done.err)
    assert "(it has train, test): the result is that of the last step" in said
    assert said.endswith("train.patience=2 stops nothing")
    done = inside("train", preset, *OWN, f"data.path={good}", "train.steps=2", "--out", tmp_path / "chosen")
    assert done.status == 0 and "no validation split" not in done.err
    assert np.isfinite(lines_of(tmp_path / "chosen", "validation")[0]["auc"])


@pytest.mark.parametrize("name", ["clicks.csv", "clicks.parquet", "new/rows.jsonl", "clicks.csv.gz"])
def test_a_table_where_a_preset_or_a_dataset_should_be(tmp_path, monkeypatch, name):
    """Whether it exists or not."""
    monkeypatch.chdir(tmp_path)
    how = ("`recjax train table data.from=.* data.label=COLUMN`", "docs/guides/own_data.md")
    for _ in range(2):
        refused = assert_refused(inside("train", name), 2, f"{name} is no preset", *how, f"data.from={name} data.label")
        assert "movietweetings" not in refused
        assert_refused(inside("data", "prepare", name, "--out", "new"), 2, f"unknown dataset '{name}'", *how)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("user,label")
    assert_refused(inside("data", "info", name), 3, f"{name} is a file, not a folder", *how)
    done = inside("train", "synthetic", "data=prepared", f"data.path={name}", "--out", "run")
    refused = assert_refused(done, 3, f"no prepared data at .*/{name}: that is a file", *how)
    assert f"--out {name}" not in refused
    assert_refused(inside("data", "prepare", "csv", "--out", "new"), 2, "unknown dataset 'csv'", *how)
    assert_refused(inside("data", "prepare", "prepared", "--out", "new"), 2, "are prepared already", *how)


def test_a_folder_that_is_called_like_a_dataset(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, dataset, said in (
        ("prepared", "own", "this is the folder"),
        ("synthetic", "synthetic", "this is the data"),
    ):
        shutil.copytree(good, name)
        done = inside("data", "info", name, "--json")
        assert done.result["name"] == dataset
        assert done.err.count(f"{name} is the name of a dataset and of a folder here: {said}") == 1
        assert inside("data", "info", f"./{name}", "--json").result["name"] == "own"


def test_files_that_are_named_beside_prepared_data_are_said_not_to_be_read(tmp_path):
    table = tables.write(tables.clicks(200, lists=False), tmp_path / "clicks.csv")
    made = inside("data", "prepare", "table", "--from", table, "--out", tmp_path / "data", "label=clicked")
    assert made.status == 0, made.err
    run = ["train", "table", f"data.path={tmp_path / 'data'}", "train.steps=1", "mesh.devices=1", "embedding.dim=4"]
    done = inside(*run, "data.from=newer.csv", "--out", tmp_path / "run")
    assert done.status == 0, done.err
    assert "is read, and not data.from=newer.csv: leave data.path out" in done.err
