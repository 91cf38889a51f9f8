"""What each column is worth: measured with its values mixed, and beside a model whose needs are known."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from support.commands import inside

from recjax.data.source import concatenate
from recjax.data.synthetic.clicks import Synthetic
from recjax.train.evaluation import MixedColumn

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

LAW = Synthetic(rows=(50, 30, 9), ids_per_bag=(1, 0, 2), train_rows=20_000, validation_rows=0, test_rows=0, dense=2)


def everything(source):
    return concatenate([source.read("train", i) for i in range(len(source.row_counts("train")))])


def lists_of(batch, name):
    bags = batch.bags[name]
    ends = np.cumsum(bags.lengths) if bags.lengths is not None else bags.ids.shape[1] * np.arange(1, batch.size + 1)
    return [tuple(part.tolist()) for part in np.split(bags.ids.ravel(), ends[:-1])]


@pytest.mark.parametrize("column", ["sparse_0", "sparse_1", "sparse_2", "dense_1"])
def test_a_column_is_dealt_again_and_all_else_stays(column):
    source = LAW.open()
    plain = everything(source)
    mixed, again = (everything(MixedColumn(source, column, seed)) for seed in (0, 0))
    other = everything(MixedColumn(source, column, 1))
    np.testing.assert_array_equal(mixed.labels, plain.labels)
    for name in plain.bags:
        before, after = lists_of(plain, name), lists_of(mixed, name)
        assert sorted(before) == sorted(after) and (before != after) == (name == column)
        assert after == lists_of(again, name)
    for k, name in enumerate(source.schema.dense):
        before, after = plain.dense[:, k], mixed.dense[:, k]
        np.testing.assert_array_equal(np.sort(before), np.sort(after))
        assert (before != after).any() == (name == column)
    moved = lists_of(other, column) if column in plain.bags else other.dense[:, 1].tolist()
    assert moved != (lists_of(mixed, column) if column in plain.bags else mixed.dense[:, 1].tolist())


@pytest.mark.full
def test_the_column_that_decides_costs_all_and_noise_nothing(tmp_path):
    rng = np.random.default_rng(0)
    user, noise = rng.integers(0, 20, 4000), rng.integers(0, 20, 4000)
    labels = (rng.random(4000) < np.where(user % 2, 0.9, 0.1)).astype(int)
    file, out = tmp_path / "table.csv", tmp_path / "run"
    pyarrow.csv.write_csv(
        pa.table({"user": [f"u{u}" for u in user], "noise": [f"n{n}" for n in noise], "y": labels}), file
    )
    settings = ("train.batch_size=128", "train.epochs=3", "mesh.devices=1")
    assert inside("train", "table", f"data.from={file}", "data.label=y", *settings, "--out", out).status == 0
    done = inside("eval", out, "--ablate", "--permutations", 2, "--json")
    found = done.result["ablation"]
    assert found["measure"] == "auc" and found["value"] == done.result["auc"] > 0.85
    first, last = found["columns"]
    assert (first["column"], last["column"]) == ("user", "noise") and len(first["values"]) == 2
    assert first["mean"] == pytest.approx(0.5, abs=0.06) and abs(last["loss"]) < 0.01
    for one in found["columns"]:
        assert one["mean"] == pytest.approx(np.mean(one["values"]))
        assert one["std"] == pytest.approx(np.std(one["values"], ddof=1))
        assert one["losses"] == pytest.approx([found["value"] - value for value in one["values"]])
    assert (out / "ablation.png").read_bytes()[:4] == b"\x89PNG"
    text = inside("eval", out, "--ablate", "--split", "validation")
    assert "validation, each column mixed among the rows; auc is" in text.out and "user" in text.out
    assert json.dumps(found) and inside("eval", out, "--ablate", "--permutations", 0).status == 2
