"""Scores as Parquet: the numbers of CSV, and carried columns with the types of the input."""

import csv
import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from support.commands import inside

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs, pytest.mark.full]
DAY = datetime.datetime(2026, 1, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    user = rng.integers(0, 20, 400)
    table = pa.table(
        {
            "user": [f"u{u}" for u in user],
            "when": [DAY + datetime.timedelta(hours=i) for i in range(400)],
            "tags": [[f"t{u % 3}"] * (i % 3) for i, u in enumerate(user)],
            "stars": [None if i % 9 == 0 else i % 5 for i in range(400)],
            "y": (rng.random(400) < 0.2 + 0.6 * (user % 2)).astype(int),
        }
    )
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    settings = ("data.label=y", "mesh.devices=1", "train.batch_size=100", "train.epochs=1", "train.eval_batch_size=150")
    source = f"data.from={folder / 'rows.parquet'}"
    assert inside("train", "table", source, *settings, "--out", folder / "run").status == 0
    return folder, table


def test_numbers_and_types(trained, tmp_path):
    folder, table = trained
    given = ("predict", folder / "run", "--input", folder / "rows.parquet", "--columns", "when,tags,stars")
    assert inside(*given, "--out", tmp_path / "s.csv").status == 0
    assert inside(*given, "--out", tmp_path / "s.parquet").status == 0
    scores = pyarrow.parquet.read_table(tmp_path / "s.parquet")
    assert scores.column_names == ["row", "logit", "probability", "when", "tags", "stars"]
    with (tmp_path / "s.csv").open(newline="") as file:
        text = list(csv.DictReader(file))
    assert scores["row"].to_pylist() == list(range(1, 401)) and len(text) == 400
    np.testing.assert_allclose([float(row["logit"]) for row in text], scores["logit"].to_pylist(), rtol=1e-8)
    for name in ("when", "tags", "stars"):
        assert scores[name].to_pylist() == table[name].to_pylist()
    assert pa.types.is_timestamp(scores.schema.field("when").type) and pa.types.is_list(
        scores.schema.field("tags").type
    )
    assert [row["when"] for row in text[:2]] == ["2026-01-01T00:00:00", "2026-01-01T01:00:00"]
    again = inside(*given, "--out", tmp_path / "s.parquet")
    assert again.status == 0, "scores are replaced"
    kept = (folder / "rows.parquet").read_bytes()
    (tmp_path / "other.parquet").write_bytes(kept)
    refused = inside(*given, "--out", tmp_path / "other.parquet")
    assert refused.status == 2 and "is no file of scores" in refused.err
    assert (tmp_path / "other.parquet").read_bytes() == kept


def test_unlike_types_are_named(trained, tmp_path):
    folder, _ = trained
    rows = [
        f'{{"user": "u1", "tags": [], "stars": 1, "x": {1 if i < 200 else chr(34) + "a" + chr(34)}}}'
        for i in range(400)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    given = ("predict", folder / "run", "--input", tmp_path / "rows.jsonl", "--columns", "x")
    refused = inside(*given, "--out", tmp_path / "s.parquet")
    assert refused.status == 3 and "column 'x' has values of unlike types" in refused.err
    assert not (tmp_path / "s.parquet").exists()
    assert inside(*given, "--out", tmp_path / "s.jsonl").status == 0
