"""Settings of single tables and features: from the command line to what is trained."""

import dataclasses
from typing import Any, ClassVar

import pytest
from support.commands import SMALL, assert_refused, inside, write_preset

import recjax
from recjax.config.run import EmbeddingConfig, FeatureConfig, RunConfig, TableConfig
from recjax.data.batch import Feature, Schema
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.settings.values import Named
from recjax.train.run.folder import changes
from recjax.train.table_specs import dims, specs

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

SCHEMA = Schema((), (Feature("C1", 50), Feature("C3", 50, None), Feature("user.id", 20, 2)))
ADAGRAD = RowWiseAdagrad(0.03)


@dataclasses.dataclass(frozen=True)
class FirstOrder:
    """Config of a model with first-order weights."""

    first_order: ClassVar[bool] = True
    linear: Any = None


def config(tables: dict[str, TableConfig], features: dict[str, FeatureConfig] | None = None, model: Any = None) -> Any:
    embedding = EmbeddingConfig(8, optimizer=ADAGRAD, tables=Named(tables), features=Named(features or {}))
    made = RunConfig(embedding=embedding)
    return dataclasses.replace(made, model=model) if model else made


def test_a_table_has_what_is_set_for_it_and_else_what_all_have():
    settings = {
        "C1": TableConfig(dim=4, placement="data_parallel"),
        "user.id": TableConfig(optimizer=Sgd(0.5), init_scale=0.0),
    }
    tables, features = specs(config(settings, {"C3": FeatureConfig(pooling="mean")}), SCHEMA)
    assert tables == (
        TableSpec("C1", 50, 4, ADAGRAD, placement="data_parallel"),
        TableSpec("C3", 50, 8, ADAGRAD),
        TableSpec("user.id", 20, 8, Sgd(0.5), init_scale=0.0),
    )
    assert features == (
        FeatureSpec("C1", "C1"),
        FeatureSpec("C3", "C3", None, "mean"),
        FeatureSpec("user.id", "user.id", 2),
    )
    assert dims(tables, features) == {"C1": 4, "C3": 8, "user.id": 8}
    everywhere = RunConfig(embedding=EmbeddingConfig(init_scale=0.25))
    assert {t.init_scale for t in specs(everywhere, SCHEMA)[0]} == {0.25}


def test_a_feature_that_shares_has_no_table_of_its_own():
    shares = {"C1": FeatureConfig(share="C3")}
    tables, features = specs(config({"C3": TableConfig(dim=4)}, shares), SCHEMA)
    assert tables == (TableSpec("C3", 50, 4, ADAGRAD), TableSpec("user.id", 20, 8, ADAGRAD))
    assert features[0] == FeatureSpec("C1", "C3")
    assert dims(tables, features) == {"C1": 4, "C3": 4, "user.id": 8}


def test_first_order_tables_have_settings_and_are_shared_too():
    settings = {"C3.linear": TableConfig(optimizer=Sgd(0.7)), "C3": TableConfig(dim=4)}
    tables, features = specs(config(settings, {"C1": FeatureConfig(share="C3")}, FirstOrder(Sgd(0.2))), SCHEMA)
    assert tables[2:] == (
        TableSpec("C3.linear", 50, 1, Sgd(0.7), init_scale=0),
        TableSpec("user.id.linear", 20, 1, Sgd(0.2), init_scale=0),
    )
    assert features[3:] == (
        FeatureSpec("C1.linear", "C3.linear", source="C1"),
        FeatureSpec("C3.linear", "C3.linear", None, source="C3"),
        FeatureSpec("user.id.linear", "user.id.linear", 2, source="user.id"),
    )


def test_first_order_weights_of_a_feature_that_is_not_pooled_are_summed():
    class Takes(FirstOrder):
        sequences = True

    features = specs(config({}, {"C3": FeatureConfig(pooling="none")}, Takes()), SCHEMA)[1]
    assert [f.pooling for f in features] == ["sum", "none", "sum", "sum", "sum", "sum"]


@pytest.mark.parametrize(
    ("tables", "features", "words"),
    [
        ({"C2": TableConfig(dim=4)}, {}, ["embedding.tables.C2: there is no table 'C2'. Did you mean C"]),
        ({"zzz": TableConfig(dim=4)}, {}, ["no table 'zzz'. There are C1, C3, user.id."]),
        ({"C3.linear": TableConfig(dim=1)}, {}, ["there is no table 'C3.linear'. There are C1, C3"]),
        ({"C1": TableConfig(dim=4)}, {"C1": FeatureConfig(share="C3")}, ["no table 'C1': that feature uses", "of C3"]),
        ({}, {"user_id": FeatureConfig("mean")}, ["embedding.features.user_id: the data have no", "mean user.id?"]),
        ({}, {"C1": FeatureConfig(share="C4")}, ["embedding.features.C1.share=C4: the data have no feature 'C4'"]),
        ({}, {"C1": FeatureConfig(share="user.id")}, ["C1.share=user.id: C1 has 50 rows and user.id has 20"]),
        (
            {},
            {"C1": FeatureConfig(share="C3"), "C3": FeatureConfig(share="C1")},
            ["embedding.features.C1.share=C3: C3 itself uses the table of C1"],
        ),
    ],
)
def test_names_that_do_not_exist_and_tables_that_cannot_be_shared(tables, features, words):
    with pytest.raises(ConfigError) as caught:
        specs(config(tables, features), SCHEMA)
    for word in words:
        assert word in str(caught.value)


def test_first_order_weights_have_one_column():
    with pytest.raises(ConfigError, match=r"embedding\.tables\.C3\.linear\.dim is 2; first-order"):
        specs(config({"C3.linear": TableConfig(dim=2)}, model=FirstOrder()), SCHEMA)


def test_values_out_of_range_name_their_key():
    for assignment, message in (
        ("embedding.tables.C3.dim=0", r"^embedding\.tables\.C3: dim is 0"),
        ("embedding.tables.C3.init_scale=-1", r"^embedding\.tables\.C3: init_scale is -1"),
        ("embedding.init_scale=-1", r"^embedding: init_scale is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            recjax.load("synthetic", assignment)


def test_the_placement_of_a_table_comes_before_that_of_all(tmp_path):
    tables = (TableSpec("a", 10, 4, ADAGRAD, placement="data_parallel"), TableSpec("b", 10, 4, ADAGRAD))
    plan = make_plan("row_wise", tables)
    assert [plan.tables[name][0].placement for name in "ab"] == ["data_parallel", "row_wise"]
    assert plan.tables["a"][0].why == "embedding.tables.a.placement=data_parallel"
    automatic = make_plan("auto", (dataclasses.replace(tables[0], placement="row_wise"), tables[1]))
    assert [automatic.tables[name][0].placement for name in "ab"] == ["row_wise", "data_parallel"]
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert make_plan(str(file), tables).tables == plan.tables
    with pytest.raises(ConfigError, match=r"plan\.json places table 'b' row_wise, but .* says data_parallel"):
        make_plan(str(file), (tables[0], dataclasses.replace(tables[1], placement="data_parallel")))


def test_placement_may_change_on_resume_and_nothing_else():
    def loaded(*settings: str) -> RunConfig:
        return recjax.load("synthetic", *(f"embedding.tables.C3.{setting}" for setting in settings))

    assert changes(loaded(), loaded("placement=row_wise")) == []
    assert changes(loaded("placement=row_wise"), loaded("placement=data_parallel")) == []
    assert changes(loaded(), loaded("dim=8")) == ["embedding.tables.C3.dim: none there, 8 here"]
    adagrad = loaded("optimizer=rowwise_adagrad", "optimizer.eps=0.5")
    assert changes(loaded("dim=8"), adagrad) == [
        "embedding.tables.C3.dim: 8 there, none here",
        "embedding.tables.C3.optimizer: none there, rowwise_adagrad here",
    ]
    assert changes(loaded("optimizer=rowwise_adagrad"), adagrad) == [
        "embedding.tables.C3.optimizer.eps: 1e-08 there, 0.5 here"
    ]


@pytest.mark.full
def test_from_the_command_line(tmp_path):
    preset, out = write_preset(tmp_path), tmp_path / "run"
    own = (
        *(*SMALL, "embedding.dim=4", "model.interaction=cat"),
        *("embedding.tables.sparse_0.optimizer=sgd", "embedding.tables.sparse_0.optimizer.learning_rate=0.2"),
        "embedding.tables.sparse_2.dim=6",
    )
    shown = inside("show", preset, *own).out
    assert "\nembedding.tables.sparse_0.optimizer.learning_rate=0.2   (preset: none)\n" in shown
    assert "embedding.tables.NAME.dim, embedding.tables.NAME.optimizer, " in shown
    assert "embedding.features.NAME.pooling, embedding.features.NAME.share" in shown
    plan = inside("plan", preset, *own, "embedding.tables.sparse_2.placement=data_parallel", "--json").result["tables"]
    assert {name: (t["dim"], t["optimizer"], t["placement"]) for name, t in plan.items()} == {
        "sparse_0": (4, "sgd", "row_wise"),
        "sparse_1": (4, "rowwise_adagrad", "row_wise"),
        "sparse_2": (6, "rowwise_adagrad", "data_parallel"),
    }
    assert inside("train", preset, *own, "--out", out, "--json").result["steps"] == 2
    more = [setting for setting in own if setting not in SMALL] + ["train.steps=3", "mesh.devices=1"]
    moved = (*more, "embedding.tables.sparse_2.placement=data_parallel")
    assert inside("train", preset, *moved, "--out", out, "--json").result["steps"] == 3
    assert "auc" in inside("eval", out, "embedding.tables.sparse_1.placement=row_wise", "--json").result
    wrong = (*more, "embedding.tables.sparse_0.optimizer.learning_rate=0.3")
    assert_refused(inside("train", preset, *wrong, "--out", out), 2, r"sparse_0\.optimizer\.learning_rate: 0\.2 there")
    wrong = (*SMALL, "embedding.tables.sparse_9.dim=4")
    assert_refused(inside("train", preset, *wrong, "--out", tmp_path / "x"), 2, "there is no table 'sparse_9'. Did you")
