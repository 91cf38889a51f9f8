"""`recjax.open_run` on a trained run: what it gives is what the run folder holds and the command line says."""

import itertools
import json
import signal

import numpy as np
import pytest
from support.commands import SMALL, arrays, contents, inside
from support.shop import prepare_shop, rows

import recjax
from recjax.data.original_ids import original_ids
from recjax.data.prepare.encoder import open_encoder
from recjax.data.storage.blocks import open_prepared
from recjax.embedding.row_order import RowOrder
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.serving import table_rows
from recjax.serving.faults import RowFaults
from recjax.train.trainer import Trainer

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

TRAIN = ("mesh.devices=2", "train.epochs=1", "train.batch_size=64", "model.interaction=dot")


@pytest.fixture(scope="module")
def shop(preset, tmp_path_factory):
    """A run whose data are gone, and what opens it."""
    folder = tmp_path_factory.mktemp("shop")
    prepare_shop(folder / "data")
    done = inside(
        "train",
        preset,
        "data=prepared",
        f"data.path={folder / 'data'}",
        *TRAIN,
        "train.eval_every=3",
        "--out",
        folder / "run",
        "--json",
    )
    (folder / "data").rename(folder / "elsewhere")
    return folder, done.result, recjax.open_run(folder / "run")


def in_order(run, step, name):
    """A table of a checkpoint in the order of its rows."""
    stored = arrays(run, step)[f"/tables/{name}/rows"]
    return stored[RowOrder(len(stored)).position(np.arange(len(stored)))]


def test_rows_by_original_id_are_those_of_the_exported_tables(shop, tmp_path):
    folder, summary, run = shop
    assert run.step == summary["eval_step"] and run.step in run.steps
    out = tmp_path / "weights.npz"
    inside("weights", "export", folder / "run", "--format", "torchrec", "--out", out, f"data.path={folder}/elsewhere")
    with np.load(out) as file:
        exported = dict(file)
    encoder = open_encoder(folder / "elsewhere")
    before = contents(folder / "run")
    for raw, map_ in zip(encoder.features, encoder.maps, strict=True):
        (key,) = (key for key in exported if key.endswith(f"t_{raw.name}.weight"))
        table = run.tables[raw.name]
        column = [value for row in rows() for value in (row[raw.name] if raw.jagged else [row[raw.name]])]
        seen = sorted({value for value in column if value is not None})
        keys = np.array([value.encode() for value in seen], "S") if raw.values == "text" else np.array(seen)
        at = map_.rows_of(keys)
        known = [value for value, row in zip(seen, at, strict=True) if row]  # the others are too rare for a row
        assert set(known) == set(table.ids.tolist()) and len(known) > 5
        np.testing.assert_array_equal(table.rows(known), exported[key][at[at > 0]])
        assert table.rows(known).dtype == np.float32
        rare = [value for value, row in zip(seen, at, strict=True) if not row]
        if rare:
            with pytest.raises(KeyError, match="has no row for the id"):
                table.rows(rare[:1])
    np.testing.assert_array_equal(run.tables["city"].rows([None]), in_order(folder / "run", run.step, "city")[[1]])
    assert contents(folder / "run") == before, "nothing is written"


def test_neighbours_are_those_of_the_exported_table(shop):
    folder, _, run = shop
    table = run.tables["user"]
    all_rows = in_order(folder / "run", run.step, "user")[1:].astype(np.float64)
    similar = all_rows @ all_rows[4] / np.linalg.norm(all_rows, axis=1) / np.linalg.norm(all_rows[4])
    wanted = [at for at in np.argsort(-similar, kind="stable").tolist() if at != 4][:7]
    found = table.nearest(table.ids[4].item(), 7)
    assert [n.id for n in found] == table.ids[wanted].tolist()
    np.testing.assert_allclose([n.similarity for n in found], similar[wanted], rtol=1e-12)
    np.testing.assert_allclose(table.norms(), np.linalg.norm(all_rows, axis=1), rtol=1e-12)


def test_metrics_summary_and_config_are_those_of_the_folder(shop):
    folder, summary, run = shop
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    table = run.metrics
    assert {"step", "split", "loss", "auc", "samples_per_s"} <= set(table.column_names)
    kept = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    assert kept == [{name: value for name, value in line.items() if value is not None} for line in lines]
    assert (str(table.schema.field("step").type), str(table.schema.field("loss").type)) == ("int64", "double")
    assert run.summary | {"out": summary["out"]} == summary and run.config.train.batch_size == 64
    figure = run.curves()
    assert len(figure.axes) == 2 and figure._repr_png_().startswith(b"\x89PNG")
    assert f"eval.auc</td><td>{summary['eval']['auc']:.6g}" in run._repr_html_()


def test_scores_are_those_of_the_command(shop, tmp_path):
    folder, _, run = shop
    file = tmp_path / "rows.jsonl"
    made = [{**row, "mixed": n if n % 2 else f"n{n}"} for n, row in enumerate(rows()[:90])]
    file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    inside("predict", folder / "run", "--input", file, "--out", tmp_path / "scores.jsonl")
    wanted = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert run.predict(file).to_pylist() == wanted and len(wanted) == 90
    more = run.predict(str(file), "mesh.devices=1", columns="user,tags,mixed")
    assert more.column_names == ["row", "logit", "probability", "user", "tags", "mixed"]
    assert more["user"].to_pylist() == [row["user"] for row in made]
    assert more["tags"].to_pylist() == [row["tags"] for row in made]
    assert more["mixed"].to_pylist() == [json.dumps(row["mixed"]) for row in made]
    np.testing.assert_allclose(more["logit"], [line["logit"] for line in wanted], rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match="does not exist"):
        run.predict(tmp_path / "none.jsonl")
    assert run.predict(str(file), "mesh.devices=1", "on_error=skip").num_rows == 90
    assert run.predict(file).to_pylist() == wanted


def test_another_checkpoint(shop):
    folder, summary, _ = shop
    run = recjax.open_run(folder / "run", "newest")
    newest = run.steps[-1]
    assert run.step == newest
    table = run.tables["user"]
    np.testing.assert_array_equal(table.rows(table.ids), in_order(folder / "run", newest, "user")[1:])
    assert recjax.open_run(folder / "run", newest).step == newest
    with pytest.raises(TrainingError, match="no checkpoint of step 99"):
        recjax.open_run(folder / "run", 99).tables  # noqa: B018
    for step in ("latest", True, 1.5):
        with pytest.raises(ConfigError, match='expected a step that has a checkpoint, "newest", or None'):
            recjax.open_run(folder / "run", step)
    with pytest.raises(ConfigError, match="not a run folder"):
        recjax.open_run(folder)


def test_synthetic_data_bfloat16_and_first_order_weights(preset, tmp_path):
    more = ("embedding.dtype=bfloat16", "model=deepfm", "--out", tmp_path / "run")
    assert inside("train", preset, *SMALL, *more).status == 0
    run = recjax.open_run(tmp_path / "run")
    names = [name for name in run.tables if not name.endswith(".linear")]
    assert len(run.tables) == 2 * len(names) == 6
    for name, table in run.tables.items():
        truth = in_order(tmp_path / "run", run.step, name).astype(np.float32)
        assert table.rows([0]).dtype == np.float32 and table.ids.tolist() == list(range(len(truth)))
        np.testing.assert_array_equal(table.rows(table.ids), truth)
    assert all(run.tables[f"{name}.linear"].dim == 1 for name in names)


def test_an_interrupted_run_can_be_opened_and_goes_on(preset, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # CI may have started this process ignoring it
    config = recjax.load(preset, {"train.steps": 6, "mesh.devices": 2, "train.eval_every": 2})
    done = itertools.count(1)

    def train_step(*arguments, original=Trainer.train_step):
        if next(done) == 3:  # the stop button of a notebook
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", train_step)
        recjax.fit(config, tmp_path / "run")
    signal.signal(signal.SIGINT, before)
    run = recjax.open_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="the run has not ended"):
        run.summary  # noqa: B018
    assert run.steps and 0 < run.steps[-1] < 6 and run.metrics.num_rows and "settings" in run._repr_html_()
    assert len(run.curves().axes) >= 1 and run.tables["sparse_0"].rows([0]).shape == (1, 8)
    summary = recjax.fit(config, tmp_path / "run")
    assert summary["steps"] == 6 and summary["eval"] == recjax.fit(config, tmp_path / "whole")["eval"]
    assert recjax.open_run(tmp_path / "run").step == summary["eval_step"]


def test_a_table_of_ones_own_with_hashes_and_buckets(tmp_path):
    rng = np.random.default_rng(0)
    shops = np.array([f"shop {i}" for i in rng.integers(0, 200, 400)])
    data = {
        "shop": shops,
        "age": rng.normal(size=400),
        "vip": rng.random(400) < 0.5,
        "clicked": rng.integers(0, 2, 400),
    }
    columns = "shop:id:hash=30,age:id:bucket=4,vip:id"
    file = tmp_path / "rows.jsonl"
    recjax.prepare(data, "clicked", tmp_path / "data", columns=columns)
    encoder, source = open_encoder(tmp_path / "data"), open_prepared(tmp_path / "data")
    ids = {f.name: original_ids(source, f.name, f.rows) for f in encoder.schema.features}
    objects = [dict(zip(data, row, strict=True)) for row in zip(*(c.tolist() for c in data.values()), strict=True)]
    read = table_rows.of_objects(file, objects, np.arange(1, 401), source.about["table"], {}, RowFaults(False))
    (encoded,) = (encoder.encode(part.chunk) for part in read)
    trained = {name: encoded.bags[name].ids[:, 0] for name in ids}
    for name, column in data.items():
        if name != "clicked":
            seen = np.flatnonzero(trained[name] != 0)  # 0: a hash that only the other splits have
            assert len(seen) > 350
            np.testing.assert_array_equal(ids[name].rows_of(column[seen]), trained[name][seen])
    assert len(set(ids["age"].values().tolist())) == 4
    assert ids["age"].rows_of(ids["age"].values()).tolist() == list(range(1, 5))
    assert ids["vip"].rows_of([True]).tolist() == ids["vip"].rows_of([1]).tolist()
    with pytest.raises(ConfigError, match="hashed or reduced"):
        ids["shop"].values()
    with pytest.raises(ConfigError, match="no bucket 'old'. Give a number, or one of .-inf, "):
        ids["age"].rows_of(["old"])
