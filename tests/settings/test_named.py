"""Settings by name, on configs of their own: keys, JSON, difference, hash, and every mistake."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax import settings as cfg
from recjax.errors import ConfigError
from recjax.settings.values import Named


@dataclasses.dataclass(frozen=True)
class Sgd:
    kind: ClassVar[str] = "sgd"
    rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class Adam:
    kind: ClassVar[str] = "adam"
    rate: float = 0.001
    decay: float | None = 0.5


@dataclasses.dataclass(frozen=True)
class Table:
    dim: int | None = None
    optimizer: Sgd | Adam | None = None
    pooling: Literal["sum", "none"] | None = None
    place: str | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and self.dim < 1:
            raise ConfigError(f"dim is {self.dim}; it must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Inner:
    dim: int = 16
    tables: Named[Table] = Named()


@dataclasses.dataclass(frozen=True)
class Root:
    seed: int = 0
    inner: Inner = Inner()


def root(**tables: Table) -> Root:
    return Root(inner=Inner(tables=Named(tables)))


def changed(*assignments: str, of: Root | None = None) -> Root:
    return cfg.override(of or Root(), assignments)


@pytest.mark.parametrize(
    ("assignments", "tables"),
    [
        (["inner.tables.C3.dim=64"], {"C3": Table(dim=64)}),
        (["inner.tables.C3.optimizer=adam", "inner.tables.C3.optimizer.rate=0.5"], {"C3": Table(optimizer=Adam(0.5))}),
        # the choice acts first, wherever it stands
        (["inner.tables.C3.optimizer.rate=0.5", "inner.tables.C3.optimizer=adam"], {"C3": Table(optimizer=Adam(0.5))}),
        (["inner.tables.C3.linear.dim=1"], {"C3.linear": Table(dim=1)}),
        (
            ["inner.tables.a-b_1.x.y.optimizer=sgd", "inner.tables.a-b_1.x.y.optimizer.rate=2"],
            {"a-b_1.x.y": Table(optimizer=Sgd(2.0))},
        ),
        (["inner.tables.dim.dim=4"], {"dim": Table(dim=4)}),  # a name may be called like a field
        (["inner.tables.optimizer.optimizer=sgd"], {"optimizer": Table(optimizer=Sgd())}),
        (["inner.tables.user id.dim=4"], {"user id": Table(dim=4)}),
        (["inner.tables.C3.pooling=none"], {"C3": Table(pooling="none")}),
        (["inner.tables.C3.dim=64", "inner.tables.C3.dim=none"], {}),
        (["inner.tables.C3.dim=none"], {}),
        (["inner.tables.b.dim=1", "inner.tables.a.dim=2"], {"a": Table(dim=2), "b": Table(dim=1)}),
    ],
)
def test_an_entry_is_made_by_its_first_assignment(assignments: list[str], tables: dict[str, Table]) -> None:
    result = changed(*assignments)
    assert result == root(**tables)
    assert dict(result.inner.tables) == tables
    assert hash(result) == hash(root(**tables))
    assert Root() == root()  # the original is untouched


def test_an_entry_of_the_preset_is_changed_and_not_replaced() -> None:
    preset = root(C3=Table(dim=64, optimizer=Adam(0.5)), C4=Table(place="here"))
    result = changed("inner.tables.C3.optimizer.rate=2", "inner.tables.C4.place=none", of=preset)
    assert result == root(C3=Table(dim=64, optimizer=Adam(2.0)))


def test_what_is_not_set_is_neither_shown_nor_compared() -> None:
    one = root(C3=Table(dim=64, optimizer=Adam(decay=None)), C1=Table(place="here"))
    assert cfg.flatten(one) == {
        "seed": 0,
        "inner.dim": 16,
        "inner.tables.C1.place": "here",
        "inner.tables.C3.dim": 64,
        "inner.tables.C3.optimizer": "adam",
        "inner.tables.C3.optimizer.rate": 0.001,
        "inner.tables.C3.optimizer.decay": None,
    }
    assert cfg.diff(one, root(C3=Table(dim=8, optimizer=Adam(decay=None)))) == [
        ("inner.tables.C1.place", "here", None),
        ("inner.tables.C3.dim", 64, 8),
    ]
    assert cfg.named_keys(one) == [f"inner.tables.NAME.{field}" for field in ("dim", "optimizer", "pooling", "place")]


def test_json_is_an_object_by_name() -> None:
    plain = json.loads(cfg.to_json(root(**{"C3.linear": Table(dim=64)})))
    unset = {"optimizer": None, "pooling": None, "place": None}
    assert plain["inner"]["tables"] == {"C3.linear": {"dim": 64, **unset}}
    assert cfg.from_json(Root, json.dumps(plain | {"inner": {"tables": {"b": {"dim": 2}}}})) == root(b=Table(dim=2))


names = st.sampled_from(["a", "b", "C3", "C3.linear", "dim", "x-1_y.z", "user id"])
tables = st.builds(
    Table,
    dim=st.none() | st.integers(1, 2),
    optimizer=st.none() | st.builds(Adam, rate=st.sampled_from([0.1, 0.5]), decay=st.none() | st.just(0.5)),
    place=st.sampled_from([None, "none", "x"]),
)
roots = st.dictionaries(names, tables, max_size=3).map(lambda tables: root(**tables))


@given(roots, roots)
@settings(max_examples=100, deadline=None)
def test_equality_json_difference_and_hash_agree(a: Root, b: Root) -> None:
    again = cfg.from_json(Root, cfg.to_json(a))
    assert again == a and hash(again) == hash(a) and list(again.inner.tables) == sorted(a.inner.tables)
    assert (a == b) == (cfg.diff(a, b) == []) == (cfg.config_hash(a) == cfg.config_hash(b))


@given(roots)
@settings(max_examples=50, deadline=None)
def test_the_flat_keys_are_the_overrides_that_make_it(config: Root) -> None:
    # a text field cannot be written to be the text "none", nor can an override give what is not shown
    flat = {key: value for key, value in cfg.flatten(config).items() if value is not None and key != "seed"}
    if "none" not in flat.values():
        unset = [f"{key}=none" for key, value in cfg.flatten(config).items() if value is None]
        assert changed(*(f"{key}={value}" for key, value in flat.items()), *unset) == config


def test_hash_leaves_out_what_a_pattern_names() -> None:
    plain, placed = Root(), root(**{"C3.linear": Table(place="here"), "C1": Table(place="there")})
    assert cfg.config_hash(plain) != cfg.config_hash(placed)
    assert cfg.config_hash(plain, ["inner.tables.*.place"]) == cfg.config_hash(placed, ["inner.tables.*.place"])
    both = root(C1=Table(dim=4, place="x")), root(C1=Table(dim=5, place="x"))
    assert cfg.config_hash(both[0], ["inner.tables.*.place"]) != cfg.config_hash(both[1], ["inner.tables.*.place"])


@pytest.mark.parametrize(
    ("key", "names", "result"),
    [
        ("mesh", ["mesh"], True),
        ("mesh.devices", ["mesh"], True),
        ("meshes", ["mesh"], False),
        ("a.mesh", ["mesh"], False),
        ("t.C3.place", ["t.*.place"], True),
        ("t.C3.linear.place", ["t.*.place"], True),
        ("t.C3.place.x", ["t.*.place"], True),
        ("t.C3.dim", ["t.*.place"], False),
        ("t.C3.places", ["t.*.place"], False),
        ("t.C3.dim", [], False),
    ],
)
def test_matches(key: str, names: list[str], result: bool) -> None:
    assert cfg.matches(key, names) is result


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("inner.tables.C3.dim=x", ["inner.tables.C3.dim=x: expected an integer or none"]),
        ("inner.tables.C3.dim=0", ["inner.tables.C3: dim is 0"]),
        ("inner.tables.C3.dims=4", ["unknown key 'inner.tables.C3.dims'", "Did you mean inner.tables.C3.dim"]),
        ("inner.tables.C3.linear.dims=4", ["unknown key 'inner.tables.C3.linear.dims'", "inner.tables.C3.linear.dim"]),
        ("inner.tables.C3.optimizer.rate=4", ["exists only with inner.tables.C3.optimizer=sgd or inner.tables.C3.opt"]),
        ("inner.tables.C3.dim.x=4", ["unknown key 'inner.tables.C3.dim.x'"]),
        ("inner.tables.C3=adam", ["inner.tables.C3 is a group of settings", "inner.tables.C3.dim, inner.tables.C3.op"]),
        ("inner.tables=none", ["inner.tables is a group of settings", "Set one of them: inner.tables.NAME.dim"]),
        ("tables.C3.dim=4", ["unknown key 'tables.C3.dim'", "inner.tables.NAME.dim"]),
        ("inner.tables..dim=4", ["inner.tables: '' cannot be a name"]),
        ("inner.tables.a..b.dim=4", ["inner.tables: 'a..b' cannot be a name"]),
        ("inner.tables.C3.pooling=mean", ["expected sum or none, not 'mean'"]),
    ],
)
def test_mistakes_in_overrides(assignment: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(assignment)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"C3": 5}, ["inner.tables.C3 is 5; expected an object with the keys of Table"]),
        ({"C3": {"dims": 5}}, ["inner.tables.C3 has unknown keys inner.tables.C3.dims"]),
        ({"C3": {"dim": "5"}}, ['inner.tables.C3.dim is "5"; expected an integer or none']),
        ({"C3": {"optimizer": {"kind": "ftrl"}}}, ["inner.tables.C3.optimizer is", "sgd, adam or none"]),
        ({"a=b": {"dim": 5}}, ["inner.tables: 'a=b' cannot be a name"]),
        ([], ["inner.tables is []; expected settings by name"]),
        (None, ["inner.tables is null; expected settings by name"]),
    ],
)
def test_mistakes_in_json(tables: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cfg.from_json(Root, json.dumps({"seed": 0, "inner": {"dim": 1, "tables": tables}}), "run/config.json")
    assert str(caught.value).startswith("run/config.json: ")
    for word in words:
        assert word in str(caught.value)


def test_mistakes_in_python() -> None:
    for name in ("", ".", "a.", "a=b", "a.dim", "a.optimizer.b"):
        with pytest.raises(ConfigError, match=f"{name!r} cannot be a name"):
            Named({name: Table(dim=1)})
    wrong: Any = Named({"C3": Sgd(0.5)})
    with pytest.raises(ConfigError, match=r"inner\.tables\.C3 is Sgd\(rate=0\.5\); expected a group of settings"):
        cfg.flatten(Root(inner=Inner(tables=wrong)))
    wrong = {"C3": Table(dim=1)}
    with pytest.raises(ConfigError, match=r"inner\.tables is \{.*; expected settings by name"):
        cfg.to_json(Root(inner=Inner(tables=wrong)))
    with pytest.raises(TypeError):
        Named({"C3": Table(dim=1)})["C3"] = Table()  # type: ignore[index]
