"""A run that starts from another one: rows by original value, columns by name, and parts that stay as they are."""

import json

import numpy as np
import pytest
from support.commands import assert_refused, inside
from support.days import MODEL, TABLE, scores, train, write_day

import recjax
from recjax.data.row_values import RowValues
from recjax.data.storage.blocks import open_prepared
from recjax.errors import ConfigError
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.start import match_rows
from recjax.utils.lazy_arrays import load

full = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


def checkpoint(run, step=None):
    """Arrays and facts of a checkpoint, of the newest if no step is given."""
    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        take = lambda restored: (load(restored.arrays), restored.meta)  # noqa: E731
        return checkpoints.newest(print, take) if step is None else checkpoints.restore(step, take)


@pytest.mark.parametrize("dtypes", [("i8", "i8"), ("i8", "u8"), ("u8", "i8"), ("S3", "S5"), ("S5", "S3"), ("i4", "i8")])
def test_rows_are_matched_by_value(dtypes):
    rng = np.random.default_rng(0)
    values = [rng.choice(60, size, replace=False) for size in (30, 40)]
    arrays = []
    for one, dtype in zip(values, dtypes, strict=True):
        if dtype[0] == "S":
            arrays.append(np.array([f"v{v}"[: int(dtype[1])].encode() for v in one], dtype))
        else:
            arrays.append(one.astype(dtype))
    if dtypes[0] == "u8":
        arrays[0][3] = 2**64 - 5  # as int64 it would be -5
    if dtypes[1] == "i8":
        arrays[1][4] = -5
    then, now = (RowValues("f", "text", first, a) for first, a in zip((1, 2), arrays, strict=True))
    match = match_rows("f", then, 31, now, 42)
    at = {int(v) if dtypes[0][0] != "S" else bytes(v): 1 + n for n, v in enumerate(arrays[0])}
    expected = [0, -1, *(at.get(int(v) if dtypes[1][0] != "S" else bytes(v), -1) for v in arrays[1])]
    assert match.source_V.tolist() == expected
    reused = sum(row >= 0 for row in expected)
    assert match.counts() == {"rows": 42, "reused": reused, "new": 42 - reused, "gone": 31 - reused}


def test_rows_without_a_vocabulary_are_their_ids():
    assert match_rows("f", None, 3, None, 5).source_V.tolist() == [0, 1, 2, -1, -1]
    assert match_rows("f", None, 5, None, 3).counts() == {"rows": 3, "reused": 3, "new": 0, "gone": 2}
    with pytest.raises(ConfigError, match="plain numbers there, and stand for values of a vocabulary here"):
        match_rows("f", None, 3, RowValues("f", "text", 1, np.array([b"a"])), 2)
    with pytest.raises(ConfigError, match="for integer there, for text here"):
        match_rows("f", RowValues("f", "integer", 1, np.array([1])), 2, RowValues("f", "text", 1, np.array([b"a"])), 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


class TestRuns:
    pytestmark = full

    def test_a_run_that_trains_nothing_gives_the_same_scores(self, folder):
        day = write_day(folder / "a.csv", range(200), 2000, 0)
        train(day, folder / "old", "train.epochs=2")
        summary = train(day, folder / "new", f"train.init_from={folder / 'old'}", "train.epochs=0")
        assert summary["steps"] == 0
        other = write_day(folder / "b.csv", range(100, 300), 500, 1)
        scores(folder / "old", other, folder / "old.csv")
        scores(folder / "new", other, folder / "new.csv")
        assert (folder / "old.csv").read_bytes() == (folder / "new.csv").read_bytes()
        (old, _), (new, _) = checkpoint(folder / "old"), checkpoint(folder / "new")
        assert old["opt"].keys() == new["opt"].keys()
        assert all(np.array_equal(old["opt"][name], new["opt"][name]) for name in old["opt"])
        origins = json.loads((folder / "new" / "origins.json").read_text())
        assert origins["tables"]["user"] == {"rows": 201, "reused": 201, "new": 0, "gone": 0, "slots": True}

    @pytest.mark.parametrize("devices", [1, 3])
    def test_shared_users_keep_their_rows_and_others_are_as_in_a_run_of_their_own(self, folder, devices):
        train(write_day(folder / "a.csv", range(200), 6000, 0), folder / "old", "train.epochs=2")
        later = write_day(folder / "b.csv", range(100, 300), 6000, 1)
        start, mesh = f"train.init_from={folder / 'old'}", f"mesh.devices={devices}"
        train(later, folder / "zero", start, "train.epochs=0", mesh)
        train(later, folder / "alone", "train.steps=1", "train.freeze=tables,dense")  # trains nothing, so has new rows
        old, zero, alone = (recjax.open_run(folder / name).tables["user"] for name in ("old", "zero", "alone"))
        shared = [f"u{user}" for user in range(100, 200)]
        assert np.array_equal(old.rows(shared), zero.rows(shared))
        fresh = [f"u{user}" for user in range(200, 300)]
        assert np.array_equal(alone.rows(fresh), zero.rows(fresh))
        with pytest.raises(ConfigError, match="no row for the id 'u5'"):
            zero.rows(["u5"])
        train(later, folder / "on", start, "train.epochs=1", mesh)
        rows = write_day(folder / "c.csv", range(100, 300), 2000, 2)
        auc = {name: recjax.evaluate(folder / name, input=str(rows))["auc"] for name in ("old", "on")}
        assert auc["on"] >= auc["old"]
        train(later, folder / "kept", start, "train.epochs=0", "data.base_values=keep")
        everybody = [f"u{user}" for user in range(200)]
        kept = recjax.open_run(folder / "kept").tables["user"]
        assert np.array_equal(old.rows(everybody), kept.rows(everybody))

    @pytest.mark.parametrize(
        "model",
        [
            ("model=dlrm", "model.bottom=12-8"),
            ("model=dlrm", "model.bottom=12-8", "model.interaction=cat"),
            ("model=dcnv2", "model.bottom=12-8", "model.rank=4"),
            ("model=dcnv2", "model.bottom=", "model.rank=0", "model.structure=parallel"),
            ("model=wide_deep",),
            ("model=mmoe",),
        ],
        ids=" ".join,
    )
    def test_a_new_column_changes_no_score_until_it_is_trained(self, folder, model):
        model = ("model.top=16-1", *model) if model[0] in ("model=dlrm", "model=dcnv2") else model
        common = (*TABLE, "embedding.dim=8", "mesh.devices=1", "small.below_rows=0", "train.batch_size=64", *model)
        old = write_day(folder / "a.csv", range(50), 700, 0)
        done = inside("train", "table", f"data.from={old}", *common, "--out", folder / "old")
        assert done.status == 0, done.err
        new = write_day(folder / "b.csv", range(50), 700, 0, more="shop")
        columns = "data.columns=shop:id,user:id,kind:id,price:dense"
        start = (f"train.init_from={folder / 'old'}", "train.epochs=0")
        done = inside("train", "table", f"data.from={new}", *common, columns, *start, "--out", folder / "new")
        assert done.status == 0, done.err
        logits = [scores(folder / name, new, folder / "scores.csv") for name in ("old", "new")]
        np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=2e-6)  # sums in another order
        start = (f"train.init_from={folder / 'new'}", "train.epochs=0")
        done = inside("train", "table", f"data.from={old}", *common, *start, "--out", folder / "back")  # and it went
        assert done.status == 0, done.err
        logits.append(scores(folder / "back", new, folder / "scores.csv"))
        np.testing.assert_allclose(logits[2], logits[0], rtol=0, atol=2e-6)

    def test_dense_columns_keep_the_statistics_of_the_run(self, folder):
        train(write_day(folder / "a.csv", range(50), 700, 0), folder / "old")
        later = write_day(folder / "b.csv", range(50), 700, 1, mean=9.0)
        start = (f"train.init_from={folder / 'old'}", "train.epochs=0")
        train(later, folder / "new", *start)
        train(later, folder / "alone", *start, "data.base=none")
        stats = {
            name: open_prepared(folder / name / "data").about["encoder"]["stats"] for name in ("old", "new", "alone")
        }
        assert stats["new"] == stats["old"]
        assert stats["alone"]["mean"][0] > 8 > stats["old"]["mean"][0]

    def test_frozen_parts_keep_their_bits_and_no_state(self, folder):
        day = write_day(folder / "a.csv", range(200), 1500, 0)
        train(day, folder / "old", "train.epochs=2")
        start = (f"train.init_from={folder / 'old'}", "train.clip_norm=0.5")
        train(day, folder / "user", *start, "train.freeze=tables:user,dense", "mesh.devices=2")
        (old, _), (new, meta) = checkpoint(folder / "old"), checkpoint(folder / "user")
        assert meta["tables"]["user"]["slots"] == [] and meta["tables"]["kind"]["slots"] != []
        assert new["tables"]["user"].keys() == {"rows"} and new.get("opt", {}) == {}
        assert np.array_equal(new["tables"]["user"]["rows"], old["tables"]["user"]["rows"])
        assert not np.array_equal(new["tables"]["kind"]["rows"], old["tables"]["kind"]["rows"])
        assert all(new["dense"][name].tobytes() == old["dense"][name].tobytes() for name in old["dense"])
        train(day, folder / "all", *start, "train.freeze=tables")
        new, _ = checkpoint(folder / "all")
        assert all(np.array_equal(new["tables"][t]["rows"], old["tables"][t]["rows"]) for t in ("user", "kind"))
        assert any(not np.array_equal(new["dense"][name], old["dense"][name]) for name in old["dense"])

    def test_the_run_that_another_started_from_is_not_needed_any_more(self, folder):
        day, later = (write_day(folder / f"{n}.csv", range(50), 700, n) for n in (0, 1))
        train(day, folder / "old")
        arguments = (later, folder / "new", f"train.init_from={folder / 'old'}")
        train(*arguments, "train.steps=5")
        (folder / "old").rename(folder / "gone")
        assert train(*arguments, "train.steps=8")["steps"] == 8
        whole = train(later, folder / "whole", f"train.init_from={folder / 'gone'}", "train.steps=8")
        assert whole["steps"] == 8
        arrays = [checkpoint(folder / name)[0]["tables"]["user"]["rows"] for name in ("new", "whole")]
        assert np.array_equal(*arrays)


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "settings", "says"),
    [
        ({}, ("train.init_from={run}x",), "{run}x is not a run folder: it does not exist. Did you mean {run}?"),
        ({}, ("train.init_from={run}", "train.init_step=7"), "has no checkpoint of step 7; the steps that it has: 11"),
        ({}, ("train.epochs=0",), "epochs is 0, so nothing would be trained"),
        ({}, ("train.init_step=newest",), "init_step is newest, but init_from names no run"),
        ({}, ("train.init_from={run}", "embedding.dim=4", "model.bottom=12-4"), "have 8 values in {run}, and 4 here"),
        ({}, ("train.init_from={run}", "model.top=20-1"), "{run} has another dense part: 'top.layers.0"),
        ({}, ("train.init_from={run}", "model.top=16-8-1"), "'top.layers.1.bias.value' has shape [1] there, [8] here"),
        ({}, ("train.init_from={run}", "data.ids=hash", "data.ids.rows=100"), "stood for other values: for text there"),
        ({"prefix": "4"}, ("train.init_from={run}",), "stood for other values: for text there, for integer here"),
        (
            {},
            ("train.init_from={run}", "data.label=kind", "data.positive=k1"),
            "{run} has learnt another label",
        ),
        ({}, ("train.init_from={run}", "train.freeze=tables:usr"), "tables:usr: there is no table 'usr'. Did you mean"),
        ({}, ("train.freeze=user",), "freeze has 'user', which is no part of a model"),
        (
            {},
            ("train.freeze=tables:user", "embedding.hot.rows=20"),
            "'user', which does not go with embedding.hot",
        ),
        ({}, ("train.init_from={out}",), "is the run folder itself"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_mistakes(started, data, settings, says, tmp_path):
    day = write_day(tmp_path / "b.csv", range(50), 700, 1, **data)
    names = {"run": str(started), "out": str(tmp_path / "out")}
    if "itself" in says:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text((started / "config.json").read_text())
    given = [text.format(**names) for text in settings]
    labels = [text for text in TABLE if not any(one.startswith("data.label=") for one in given)]
    columns = [text.replace("kind:id,", "") if "data.label=kind" in given else text for text in labels]
    done = inside("train", "table", f"data.from={day}", *columns, *MODEL, *given, "--out", tmp_path / "out")
    assert_refused(done, 1 if "no checkpoint of step" in says else 2)
    assert says.format(**names) in done.err, done.err
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("started")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECJAX_CACHE", str(folder / "cache"))
        train(write_day(folder / "a.csv", range(50), 700, 0), folder / "run")
    return folder / "run"


@pytest.mark.full
def test_a_run_that_is_still_training_is_refused(started, tmp_path):
    from recjax.config import presets
    from recjax.train.run.folder import RunFolder, read_config

    day = write_day(tmp_path / "b.csv", range(50), 700, 1)
    arguments = ("train", "table", f"data.from={day}", *TABLE, *MODEL, f"train.init_from={started}")
    assert presets.default_out(read_config(started))
    with RunFolder(started, read_config(started)):
        done = inside(*arguments, "--out", tmp_path / "out")
        assert_refused(done, 1, f"train.init_from={started}: another process is training in")
        assert inside(*arguments, "train.init_step=11", "--out", tmp_path / "out").status == 0
