"""From a config to tables and lookups; `test_models.py` shows that the lookups read what they should."""

import dataclasses
from typing import Any, ClassVar

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.train.table_specs import dims, specs

DATA = Synthetic(rows=(50, 20), ids_per_bag=(1, 0), weighted=(False, True), train_rows=300)
ADAGRAD = RowWiseAdagrad(0.03)


@dataclasses.dataclass(frozen=True)
class FirstOrder:
    """Config of a model with first-order weights."""

    first_order: ClassVar[bool] = True
    linear: Any = None


def specs_of(model: Any = None) -> tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...]]:
    config = RunConfig(data=DATA, embedding=EmbeddingConfig(dim=8, optimizer=ADAGRAD, pooling="mean"))
    return specs(dataclasses.replace(config, model=model) if model else config, DATA.open().schema)


def test_one_table_and_lookup_for_each_feature():
    tables, features = specs_of()
    assert tables == (TableSpec("sparse_0", 50, 8, ADAGRAD), TableSpec("sparse_1", 20, 8, ADAGRAD))
    assert features == (
        FeatureSpec("sparse_0", "sparse_0", 1, "mean"),
        FeatureSpec("sparse_1", "sparse_1", None, "mean", weighted=True),
    )
    assert dims(tables, features) == {"sparse_0": 8, "sparse_1": 8}


def test_first_order_weights_are_second_tables_of_the_same_features():
    for chosen, optimizer in ((None, ADAGRAD), (Sgd(0.2), Sgd(0.2))):
        plain, (tables, features) = specs_of(), specs_of(FirstOrder(chosen))
        assert tables[:2] == plain[0] and features[:2] == plain[1]
        assert tables[2:] == (
            TableSpec("sparse_0.linear", 50, 1, optimizer, init_scale=0),
            TableSpec("sparse_1.linear", 20, 1, optimizer, init_scale=0),
        )
        assert features[2:] == (
            FeatureSpec("sparse_0.linear", "sparse_0.linear", 1, "mean", source="sparse_0"),
            FeatureSpec("sparse_1.linear", "sparse_1.linear", None, "mean", weighted=True, source="sparse_1"),
        )
        names = ["sparse_0", "sparse_1", "sparse_0.linear", "sparse_1.linear"]
        assert list(dims(tables, features).items()) == list(zip(names, [8, 8, 1, 1], strict=True))
