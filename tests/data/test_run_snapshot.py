"""What lets the ids of two data stand for different values."""

import dataclasses
from typing import Any

import pytest
from support.shop import Reader, prepare_shop

from recjax.data.batch import Schema
from recjax.data.prepare.ids import Hash
from recjax.data.storage.run_snapshot import other_encoding
from recjax.data.synthetic.clicks import Synthetic


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return prepare_shop(tmp_path_factory.mktemp("shop") / "data")


def changed(source: Any, what: str) -> Any:
    """The same data but for one thing."""
    user, *others = source.schema.features
    schema = {
        "rows": Schema(source.schema.dense, (dataclasses.replace(user, rows=36), *others)),
        "order": Schema(source.schema.dense[::-1], source.schema.features),
        "fewer": Schema(source.schema.dense, (user, *others[:-1])),
    }.get(what, source.schema)
    about = dict(source.about)
    if what == "mean":
        about["encoder"] = about["encoder"] | {"stats": about["encoder"]["stats"] | {"mean": [50.5, 0.25]}}
    if what == "none":
        del about["vocabularies"]
    made = object.__new__(type(source))
    made.__dict__.update(source.__dict__ | {"schema": schema, "about": about})
    return made


@pytest.mark.parametrize(
    ("what", "kind", "values"),
    [
        ("rows", "columns", "columns.4.rows: 35 there, 36 here"),
        ("order", "columns", 'columns.0.dense: "age" there, "price_missing" here'),
        ("fewer", "columns", "columns.6: "),
        ("mean", "encoder", "encoder.stats.mean.0: 50.554 there, 50.5 here"),
        ("none", "vocabularies", "... there, nothing here"),
    ],
)
def test_the_first_difference_is_named_with_both_values(source, what, kind, values):
    found = other_encoding(source, changed(source, what))
    assert found is not None and found.startswith(f"have other {kind} than those that the run was trained on (")
    assert values in found


def test_the_same_meaning(source, tmp_path):
    assert other_encoding(source, changed(source, "nothing")) is None
    hashed = [prepare_shop(tmp_path / name, Reader, Hash((10,))) for name in ("one", "two")]
    assert other_encoding(*hashed) is None
    synthetic = Synthetic(rows=(9,)).open()
    assert other_encoding(synthetic, synthetic) is None
    assert "columns" in str(other_encoding(synthetic, source))
