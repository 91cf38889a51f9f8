"""The config machinery on configs of its own: nothing here depends on what recjax trains."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import Adam, Before, Cross, Dot, Inner, Odd, Root, Train, changed

from recjax import settings as cfg
from recjax.errors import ConfigError


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("seed=12", Root(seed=12)),
        ("seed=-3", Root(seed=-3)),
        ("seed=1e6", Root(seed=1_000_000)),
        ("seed=1_000_000", Root(seed=1_000_000)),
        ("seed=2.5e1", Root(seed=25)),
        # 2**64 - 1 and 1e20 are no float64: reading integers through float would change them.
        ("seed=18446744073709551615", Root(seed=2**64 - 1)),
        ("seed=123456789012345678.9e1", Root(seed=1234567890123456789)),
        ("name=a=b", Root(name="a=b")),
        ("name=", Root(name="")),
        ("name=none", Root(name="none")),
        ("note=none", Root(note=None)),
        ("note=some text", Root(note="some text")),
        ("precision=bfloat16", Root(precision="bfloat16")),
        ("tags=x,y z", Root(tags=("x", "y z"))),
        ("tags=a-b", Root(tags=("a-b",))),
        ("tags=", Root(tags=())),
        ("rates=1e-3,2", Root(rates=(0.001, 2.0))),
        ("devices=8", Root(devices=8)),
        ("devices=auto", Root(devices="auto")),
        ("model.hidden=128-64", Root(model=Dot(hidden=(128, 64)))),
        ("model.hidden=128,64", Root(model=Dot(hidden=(128, 64)))),
        ("model.hidden=-1--2-3", Root(model=Dot(hidden=(-1, -2, 3)))),
        ("model.hidden=7", Root(model=Dot(hidden=(7,)))),
        ("train.clip=1", Root(train=Train(clip=1.0))),
        ("train.shuffle=false", Root(train=Train(shuffle=False))),
        ("model=cross", Root(model=Cross())),
        ("teacher=dot", Root(teacher=Dot())),
        ("optimizer=adam", Root()),
    ],
)
def test_override_reads_values_by_type(assignment: str, expected: Root) -> None:
    result = changed(assignment)
    assert result == expected
    assert [type(value) for value in cfg.flatten(result).values()] == [
        type(value) for value in cfg.flatten(expected).values()
    ]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("train.shuffle=False", Root(train=Train(shuffle=False))),
        ("train.shuffle=True", Root()),
        ("train.clip=None", Root()),
        ("note=None", Root(note=None)),
        ("model.hidden=[32,1]", Root(model=Dot(hidden=(32, 1)))),
        ("model.hidden=[32, 1]", Root(model=Dot(hidden=(32, 1)))),
        ("model.hidden=(32,)", Root(model=Dot(hidden=(32,)))),
        ("model.hidden=()", Root(model=Dot(hidden=()))),
        ("rates=[1e-3, 2]", Root(rates=(0.001, 2.0))),
        ("tags=['x', \"y z\"]", Root(tags=("x", "y z"))),
        ("tags=(a,b)", Root(tags=("a", "b"))),
        ("seed='3'", Root(seed=3)),
        ("devices=Auto", Root(devices="auto")),
        ("precision=BFloat16", Root(precision="bfloat16")),
        ("precision='bfloat16'", Root(precision="bfloat16")),
        ("model=Cross", Root(model=Cross())),
        ('model="CROSS"', Root(model=Cross())),
        ("teacher=Dot", Root(teacher=Dot())),
        # A field of any text takes it as it is: a path may be written so.
        ("name='x'", Root(name="'x'")),
        ("name=None", Root(name="None")),
        ("name=[x]", Root(name="[x]")),
    ],
)
def test_override_reads_what_python_would_write(assignment: str, expected: Root) -> None:
    result = changed(assignment)
    assert result == expected and cfg.config_hash(result) == cfg.config_hash(expected)
    assert cfg.to_json(result) == cfg.to_json(expected)


def test_override_acts_in_order_but_a_choice_before_the_settings_inside_it() -> None:
    assert changed("model.dim=3", "model=cross", "model.layers=7") == Root(model=Cross(dim=3, layers=7))
    assert changed("seed=1", "seed=2").seed == 2
    assert changed("teacher=cross", "teacher=none").teacher is None
    with pytest.raises(ConfigError, match="teacher.dim"):
        changed("teacher=cross", "teacher.dim=2", "teacher=none")


def test_a_choice_of_the_kind_that_is_there_already_changes_nothing() -> None:
    made = Root(model=Dot(4, (8,)), optimizer=Adam(rate=9.0), teacher=Cross(layers=7))
    assert cfg.override(made, ["optimizer=adam", "model=dot", "teacher=cross"]) == made
    assert cfg.override(made, ["model.dim=5", "model=dot"]).model == Dot(5, (8,))
    assert cfg.override(made, ["teacher=dot"]) == dataclasses.replace(made, teacher=Dot())
    assert cfg.override(made, ["teacher=none", "teacher=cross"]).teacher == Cross()  # one after the other


def test_override_leaves_the_original_alone() -> None:
    root = Root()
    cfg.override(root, ["model.dim=1", "seed=5"])
    assert root == Root()


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("seed=1.5", ["seed", "'1.5'", "an integer", "seed=1000"]),
        ("seed=true", ["an integer"]),
        ("seed=", ["an integer"]),
        ("seed=1e400", ["an integer"]),
        ("seed=1e999999999", ["an integer"]),
        ("seed=nan", ["an integer"]),
        ("seed=inf", ["an integer"]),
        ("seed=__import__('os')", ["an integer"]),
        ("train.shuffle=1", ["train.shuffle", "true or false", "train.shuffle=true"]),
        ("train.shuffle=yes", ["true or false"]),
        ("seed=None", ["an integer"]),
        ("model.hidden=[32,1", ["a list, each item an integer"]),
        ("model.hidden=[32,,1]", ["a list, each item an integer"]),
        ("train.clip=nan", ["train.clip", "a finite number or none", "train.clip=0.01"]),
        ("train.clip=inf", ["finite"]),
        ("train.clip=1e999", ["finite"]),
        ("optimizer.rate=none", ["a finite number"]),
        ("precision=float16", ["float32 or bfloat16", "precision=float32"]),
        ("model.hidden=512-x", ["a list, each item an integer", "model.hidden=512-256-64"]),
        ("model.hidden=512,", ["a list, each item an integer"]),
        ("rates=1,inf", ["a finite number"]),
        ("devices=all", ["an integer or auto", "devices=1000"]),
        ("model=resnet", ["dot or cross", "model=dot"]),
        ("model=none", ["dot or cross"]),
        ("teacher=resnet", ["dot, cross or none"]),
        ("optimizer=sgd", ["expected adam"]),
        ("train=5", ["group of settings", "train.steps", "train.shuffle"]),
        ("seed", ["no '='", "KEY=VALUE"]),
        ("=3", ["'=3' is not an override: it has nothing before its '='", "without spaces around the '='"]),
    ],
)
def test_override_refuses_and_says_what_is_expected(assignment: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(assignment)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.step", "train.steps"),
        ("trian.steps", "train.steps"),
        ("batch_size", "train.batch_size"),
        ("train.batchsize", "train.batch_size"),
        ("some.quite.different.group.batch_size", "train.batch_size"),
        ("model.kind", "model"),
        ("Seed", "seed"),
        ("zzzz.qqq", "At the top stand seed, name"),
        ("seed.x", "seed"),
        ("train.", "train"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(f"{key}=1")
    assert f"unknown key {key!r}" in str(caught.value)
    assert nearest in str(caught.value).split("unknown key", 1)[1].split(repr(key), 1)[1]


def test_unknown_key_of_a_kind_that_is_not_chosen() -> None:
    with pytest.raises(ConfigError, match=r"'model\.layers': it exists only with model=cross"):
        changed("model.layers=2")
    with pytest.raises(ConfigError, match=r"'teacher\.dim': it exists only with teacher="):
        changed("teacher.dim=2")


def test_failing_check_is_reported_with_its_path_and_only_at_the_end() -> None:
    with pytest.raises(ConfigError, match=r"^train: steps must be a multiple of batch_size$"):
        changed("train.steps=6000")
    # After the first assignment alone the check would fail.
    assert changed("train.steps=6000", "train.batch_size=1000").train.steps == 6000
    with pytest.raises(ConfigError, match=r"^run\.json: train: steps must"):
        cfg.from_json(Root, cfg.to_json(Root()).replace('"steps": 100', '"steps": 6000'), source="run.json")


floats = st.floats(allow_nan=False, allow_infinity=False)
models = st.one_of(
    st.builds(Dot, dim=st.integers(), hidden=st.lists(st.integers()).map(tuple)),
    st.builds(Cross, dim=st.integers(), layers=st.integers()),
)
roots = st.builds(
    Root,
    seed=st.integers(),
    name=st.text(),
    note=st.none() | st.text(),
    precision=st.sampled_from(["float32", "bfloat16"]),
    tags=st.lists(st.text()).map(tuple),
    rates=st.lists(floats).map(tuple),
    devices=st.just("auto") | st.integers(),
    model=models,
    optimizer=st.builds(Adam, rate=floats),
    teacher=st.none() | models,
    train=st.builds(Train, steps=st.integers(0, 1000), clip=st.none() | floats, shuffle=st.booleans()),
)


@given(roots)
@settings(max_examples=50, deadline=None)
def test_json_round_trip_keeps_everything(root: Root) -> None:
    again = cfg.from_json(Root, cfg.to_json(root))
    assert again == root
    # == lets 1, 1.0 and True pass for each other; types must survive too.
    assert [type(v) for v in cfg.flatten(again).values()] == [type(v) for v in cfg.flatten(root).values()]
    assert cfg.diff(root, again) == []
    assert cfg.config_hash(root) == cfg.config_hash(again)


# Few values, so that equal pairs come up.
small_roots = st.builds(
    Root,
    seed=st.integers(0, 1),
    note=st.sampled_from([None, "none"]),
    model=st.sampled_from([Dot(), Cross()]),
    teacher=st.sampled_from([None, Dot()]),
    optimizer=st.builds(Adam, rate=st.sampled_from([0, 0.0, -0.0, 1])),
)


@given(small_roots, small_roots)
@settings(max_examples=100, deadline=None)
def test_diff_and_hash_agree_with_equality(a: Root, b: Root) -> None:
    assert (a == b) == (cfg.diff(a, b) == []) == (cfg.config_hash(a) == cfg.config_hash(b))


def test_json_text() -> None:
    plain = json.loads(cfg.to_json(Root(rates=(0.1, 1e-300), teacher=Cross())))
    assert plain == {
        "seed": 0,
        "name": "run",
        "note": None,
        "precision": "float32",
        "tags": [],
        "rates": [0.1, 1e-300],
        "devices": "auto",
        "model": {"kind": "dot", "dim": 16, "hidden": [512, 256, 64]},
        "optimizer": {"kind": "adam", "rate": 0.001},
        "teacher": {"kind": "cross", "dim": 8, "layers": 3},
        "train": {"steps": 100, "batch_size": 64, "clip": None, "shuffle": True},
    }
    assert cfg.from_json(Odd, cfg.to_json(Odd(kind="other"))) == Odd(kind="other")
    assert cfg.from_json(Cross, '{"kind": "cross", "dim": 1, "layers": 2}') == Cross(1, 2)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["seed"], 1.0, ["seed is 1.0", "an integer"]),
        (["seed"], True, ["seed is true", "an integer"]),
        (["name"], None, ["name is null", "text"]),
        (["train", "shuffle"], 1, ["train.shuffle is 1", "true or false"]),
        (["optimizer", "rate"], float("nan"), ["optimizer.rate is NaN", "finite"]),
        (["model", "hidden"], 512, ["model.hidden is 512", "a list"]),
        (["model", "hidden"], [512, 1.5], ["model.hidden"]),
        (["model", "kind"], "resnet", ["model", "resnet", "dot or cross"]),
        (["optimizer", "kind"], "sgd", ['optimizer.kind is "sgd"', "'adam'"]),
        (["model"], "dot", ['model is "dot"']),
        (["train"], 3, ["train is 3"]),
        (["extra"], 1, ["unknown keys extra"]),
        (["model", "extra"], 1, ["unknown keys model.extra", "Dot"]),
        (["optimizer", "kind"], ..., ["lacks the keys optimizer.kind"]),
    ],
)
def test_from_json_is_strict(path: list[str], value: Any, words: list[str]) -> None:
    plain = json.loads(cfg.to_json(Root()))
    inner = plain
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        cfg.from_json(Root, json.dumps(plain), source="some/config.json")
    assert str(caught.value).startswith("some/config.json: ")
    for word in words:
        assert word in str(caught.value)


def test_a_missing_key_takes_its_default_if_there_is_one() -> None:
    assert cfg.from_json(Root, "{}") == Root()
    assert cfg.from_json(Root, '{"model": {"kind": "cross", "layers": 7}}') == Root(model=Cross(layers=7))
    assert cfg.from_json(Before, '{"must": 1, "inner": {}}') == Before(1, Inner())  # its class's, not its place's
    with pytest.raises(ConfigError, match=r"^f\.json: the outermost object lacks the keys must\. The keys of Before"):
        cfg.from_json(Before, "{}", source="f.json")


def test_from_json_refuses_broken_text() -> None:
    text = cfg.to_json(Root())
    with pytest.raises(ConfigError, match=r"^f\.json:3: not valid JSON"):
        cfg.from_json(Root, "{\n\n" + "oops", source="f.json")
    with pytest.raises(ConfigError, match=r"not valid JSON"):
        cfg.from_json(Root, text[: len(text) // 2])
    with pytest.raises(ConfigError, match=r"'seed' stands twice"):
        cfg.from_json(Root, text.replace('"name": "run"', '"seed": 1, "name": "run"'))
    with pytest.raises(ConfigError, match=r"the outermost object is \[\]"):
        cfg.from_json(Root, "[]")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Root(seed=1.0), "seed is 1.0; expected an integer"),
        (Root(seed=True), "seed is True"),
        (Root(optimizer=Adam(rate=float("inf"))), "optimizer.rate is inf"),
        (Root(optimizer=Adam(rate=2**53 + 1)), "optimizer.rate is 9007199254740993"),
        (Root(optimizer=Adam(rate=10**400)), "optimizer.rate is 1000"),
        (Root(model=Dot(hidden=[1])), r"model.hidden is \[1\]"),
        (Root(model=Adam()), "model is Adam"),
        (Root(precision="float64"), "precision is 'float64'"),
        (Odd(level=True), "level is True; expected 0 or 1"),
    ],
)
def test_values_that_python_let_through_are_found(config: object, message: str) -> None:
    for function in (cfg.to_json, cfg.flatten, cfg.config_hash, lambda c: cfg.override(c, [])):
        with pytest.raises(ConfigError, match=message):
            function(config)


def test_flatten_and_diff() -> None:
    assert cfg.flatten(Root()) == {
        "seed": 0,
        "name": "run",
        "note": None,
        "precision": "float32",
        "tags": (),
        "rates": (0.5,),
        "devices": "auto",
        "model": "dot",
        "model.dim": 16,
        "model.hidden": (512, 256, 64),
        "optimizer": "adam",
        "optimizer.rate": 0.001,
        "teacher": None,
        "train.steps": 100,
        "train.batch_size": 64,
        "train.clip": None,
        "train.shuffle": True,
    }
    assert cfg.flatten(Cross()) == {"kind": "cross", "dim": 8, "layers": 3}
    assert cfg.flatten(Odd()) == {"kind": "a field here, not a tag", "level": 0}
    # A key that is absent differs from one that is None.
    assert ("clip", None, None) in cfg.diff(Adam(), Train())
    assert cfg.diff(Root(), changed("model=cross", "seed=1")) == [
        ("seed", 0, 1),
        ("model", "dot", "cross"),
        ("model.dim", 16, 8),
        ("model.hidden", (512, 256, 64), None),
        ("model.layers", None, 3),
    ]
