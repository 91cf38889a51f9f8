"""What `recjax data prepare` and `recjax data info` do, against counts by hand."""

import json

import numpy as np
import pytest

from recjax.data import catalog
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.datasets.movietweetings import MovieTweetings
from recjax.data.statistics import describe, to_text
from recjax.data.storage.blocks import write_prepared
from recjax.data.synthetic.clicks import Synthetic
from recjax.errors import ConfigError, DataError


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown dataset 'movietweeting'. Did you mean movietweetings?"):
        catalog.default("movietweeting")
    with pytest.raises(ConfigError, match="The datasets are movietweetings, movielens, .*synthetic"):
        describe(catalog.open_verified("ml-100k"))


def test_every_dataset_opens_under_its_name_or_says_how_to_prepare_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path))
    for name in set(catalog.DATASETS) - {"prepared"}:  # which needs a path; see test_prepared.py
        if name in ("movietweetings", "synthetic", "zipf_stream"):
            assert catalog.default(name).open().name == name
        else:
            with pytest.raises(DataError, match=f"recjax data prepare {name} --from PATH --out DIR"):
                catalog.default(name).open()


def test_prepare_tells_what_it_made(tmp_path):
    made = catalog.prepare(MovieTweetings(), None, tmp_path / "out")
    assert json.loads(json.dumps(made)) == made
    assert made["rows"] == {"train": 79_104, "validation": 896, "test": 20_000}
    described = describe(catalog.open_verified(str(tmp_path / "out")))
    assert described["fingerprint"] == made["fingerprint"]
    with pytest.raises(ConfigError, match="Leave out 'threshold=5'"):
        describe(catalog.open_verified(str(tmp_path / "out"), ["threshold=5"]))


def test_synthetic_data_need_no_preparation(tmp_path):
    with pytest.raises(ConfigError, match="nothing to prepare"):
        catalog.prepare(catalog.default("synthetic"), None, tmp_path)


def test_describe_verifies_checksums(tmp_path):
    catalog.prepare(MovieTweetings(), None, tmp_path / "out")
    file = next((tmp_path / "out").glob("blocks/*/*-test.array_record*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"Damaged: {file}"):
        describe(catalog.open_verified(str(tmp_path / "out")))


def test_counts_by_hand(tmp_path):
    """Ids of x: 0 eight times, 1 once, 2 once: two ids take 90%. Ids of y: three of 5, in bags of 3, 0 and 0."""

    def rows(ids, labels, bag, lengths):
        count = len(ids)
        return Batch(
            np.zeros((count, 0), np.float32),
            {"x": Bags(np.array(ids)[:, None]), "y": Bags(np.array(bag, np.int64), np.array(lengths, np.int32))},
            np.array(labels, np.float32),
            np.ones(count, np.float32),
        )

    schema = Schema((), (Feature("x", 100), Feature("y", 2**31 - 1, None)))
    splits = {
        "train": [rows([0] * 6, [1, 1, 1, 0, 0, 0], [5, 5, 5], [3, 0, 0, 0, 0, 0]), rows([0], [1], [], [0])],
        "validation": [],
        "test": [rows([0, 1, 2], [0, 0, 0], [], [0, 0, 0])],
    }
    found = describe(write_prepared(tmp_path / "out", "toy", schema, splits, {"baselines": {"mean": 0.5}}))
    assert found["splits"] == {
        "train": {"rows": 7, "label_rate": 4 / 7},
        "validation": {"rows": 0, "label_rate": None},
        "test": {"rows": 3, "label_rate": 0.0},
    }
    x, y = found["features"]
    assert x == {
        "name": "x",
        "rows": 100,
        "bag": 1,
        "weighted": False,
        "ids": 10,
        "distinct_ids": 3,
        "mean_bag": 1.0,
        "top_id_share": 0.8,
        "ids_for_90_percent": 2,
        "ids_for_90_percent_share": 2 / 3,
    }
    assert (y["ids"], y["distinct_ids"], y["mean_bag"], y["top_id_share"]) == (3, 1, 0.3, 1.0)
    assert found["references"] == {"mean": 0.5}
    text = to_text(found)
    assert "mean         0.5000" in text and "57.14%" in text and "jagged, mean 0.30" in text


def test_synthetic_data_tell_the_best_auc_of_every_split():
    found = describe(catalog.open_verified("synthetic", ["train_rows=5000", "test_rows=3000", "shuffle_labels=true"]))
    assert json.loads(json.dumps(found)) == found
    assert [split["best_auc"] for split in found["splits"].values()] == [0.5, 0.5, 0.5]
    plain = describe(catalog.open_verified("synthetic", ["train_rows=5000", "test_rows=3000"]))
    assert plain["references"]["best possible"] == plain["splits"]["test"]["best_auc"] > 0.75
    assert "best AUC" in to_text(plain)


def test_large_data_are_counted_in_parts():
    """More ids than are held before they are merged: the sums must be those of one count over all."""
    source = Synthetic(ids_per_bag=(4, 1, 1, 1)).open()  # 2.5 million ids
    found = describe(source)["features"][0]
    ids = np.concatenate(
        [
            source.read(split, i).bags["sparse_0"].ids.ravel()
            for split in ("train", "validation", "test")
            for i in range(len(source.row_counts(split)))
        ]
    )
    counts = np.sort(np.bincount(ids))[::-1]
    assert (found["ids"], found["distinct_ids"]) == (len(ids), (counts > 0).sum())
    assert found["top_id_share"] == counts[0] / len(ids)
