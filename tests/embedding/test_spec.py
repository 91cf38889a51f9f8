"""What a table or a feature may be."""

import math

import pytest

from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec, check_specs
from recjax.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "table 't' has 0 rows; a table has 1 to 2147483647"),
        ({"rows": 2**31}, "table 't' has 2147483648 rows"),
        ({"dim": 0}, "table 't' has 0 columns"),
        ({"init_scale": -0.1}, "table 't' has init_scale -0.1"),
        ({"init_scale": math.nan}, "init_scale nan"),
        ({"init_scale": math.inf}, "init_scale inf"),
    ],
)
def test_tables_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        TableSpec(**{"name": "t", "rows": 3, "dim": 2, "optimizer": Sgd(), **settings})


def test_every_row_is_for_tables_of_a_limited_size():
    dense = Sgd(every_row=True)
    TableSpec("t", 2**22, 16, dense)
    TableSpec("t", 2**22 + 1, 16, Sgd())
    with pytest.raises(ConfigError, match=r"'t' has 4,194,305 rows of 16 .* 67,108,880 values, but 67,108,864 are the"):
        TableSpec("t", 2**22 + 1, 16, dense)


def test_the_scale_of_the_initial_values():
    assert TableSpec("t", 10_000, 2, Sgd()).scale == 0.01
    assert TableSpec("t", 2**31 - 1, 2, Sgd(), 0.25).scale == 0.25
    assert TableSpec("t", 10, 2, Sgd(), 0).scale == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bag": 0}, "feature 'f' has bag 0; give 1 or more"),
        ({"bag": -1}, "feature 'f' has bag -1"),
        ({"pooling": "max"}, "feature 'f' has pooling 'max'; choose one of sum, mean"),
    ],
)
def test_features_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        FeatureSpec("f", "t", **settings)


def test_names_must_fit_together():
    a, b = TableSpec("a", 3, 2, Sgd()), TableSpec("b", 3, 2, Sgd())
    for tables, features, message in (
        ((a, a), ("a", "b"), "table name 'a' is used twice"),
        ((a, b), ("a", "b", "b"), "feature name 'b' is used twice"),
        ((a, b), ("a", "b", "c"), "feature 'c' looks up table 'c', which does not exist; the tables are a, b"),
        ((a, b), ("a",), "no feature looks up table 'b'"),
    ):
        features = tuple(FeatureSpec(name, name) for name in features)
        with pytest.raises(ConfigError, match=message):
            check_specs(tables, features)
        with pytest.raises(ConfigError, match=message):
            bind(make_plan("row_wise", tables), tables, features, 2)
    check_specs((a, b), (FeatureSpec("f", "a"), FeatureSpec("g", "b"), FeatureSpec("h", "a")))
