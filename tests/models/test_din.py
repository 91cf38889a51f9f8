"""DIN and all that it stands on: histories of a log, packed, on any mesh, saved, exported and served."""

import json

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import inside
from support.meshes import assert_alike_on_meshes
from support.problems import by_row
from support.processes import assert_equal, train_together

import recjax
from recjax.data.storage.blocks import open_prepared
from recjax.errors import ConfigError
from recjax.serving.service import Service, ServiceConfig
from recjax.train.build import build_trainer

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

SETTINGS = (
    "data.label=y",
    "data.user=u",
    "data.item=i",
    "data.time=t",
    "data.history=kind",
    "data.ages=3",
    "data.max_length=4",
    "embedding.dim=4",
    "embedding.optimizer=adagrad",
    "model.attention=5",
    "model.top=6-1",
    "train.epochs=1",
    "train.log_every=1",
    "train.batch_size=16",
    "small.below_rows=0",
    "mesh.platform=cpu",
)


def write_log(folder, rows=90):
    rng = np.random.default_rng(0)
    columns = {"u": rng.integers(0, 9, rows), "i": rng.integers(0, 12, rows), "t": 1e9 + 60.0 * np.arange(rows)}
    columns |= {"kind": rng.choice(["a", "b"], rows), "price": rng.normal(size=rows), "y": rng.integers(0, 2, rows)}
    return tables.write(pa.table(columns), folder / "log.parquet")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log"))


def config_of(log, *settings):
    return recjax.load("din", [f"data.from={log}", *SETTINGS, *settings])


def logits_by_loops(trainer, state, batch, softmax):
    """Row by row and event by event, in NumPy."""
    rows, dense = by_row(trainer, state)
    table = {name: of["rows"].astype(np.float64) for name, of in rows.items()}
    layer = {name.removesuffix(".kernel.value"): w for name, w in dense.items() if name.endswith(".kernel.value")}
    bias = {name.removesuffix(".bias.value"): w for name, w in dense.items() if name.endswith(".bias.value")}
    assert len(layer) == len(bias) == 4

    def mlp(name, x):
        layers = sorted(key for key in layer if key.startswith(name))
        for at, key in enumerate(layers):
            x = x @ layer[key] + bias[key]
            x = np.maximum(x, 0) if at < len(layers) - 1 else x
        return x

    found, starts = [], dict.fromkeys(("i", "kind", "age"), 0)
    for row in range(batch.size):
        vectors = [table[name][batch.bags[name].ids[row, 0]] for name in ("u", "i", "kind")]
        n = int(batch.bags["history.i"].lengths[row])
        events = {}
        for name, held in (("i", "i"), ("kind", "history.kind"), ("age", "history.age")):
            events[name] = table[held][batch.bags[f"history.{name}"].ids[starts[name] : starts[name] + n]]
            starts[name] += n
        scores, rows_of_events = [], []
        for e in range(n):
            q, k, rest = vectors[1], events["i"][e], [events["kind"][e], events["age"][e]]
            scores.append(mlp("attended", np.concatenate([q, k, q - k, q * k, *rest]))[0])
            rows_of_events.append(np.concatenate([k, *rest]))
        weights = np.exp(scores) / np.exp(scores).sum() if softmax else np.array(scores)
        attended = weights @ np.array(rows_of_events) if n else np.zeros(12)
        found.append(mlp("top", np.concatenate([batch.dense[row], *vectors, attended]))[0])
    return np.array(found)


@pytest.mark.parametrize("softmax", [False, True])
def test_logits_are_those_of_loops(log, softmax):
    trainer = build_trainer(
        config_of(log, "compute_dtype=float64", "mesh.devices=2", f"model.softmax={softmax}".lower())
    )
    state, batch = trainer.init_state(), trainer.source.read("train", 0)
    assert by_row(trainer, state)[0].keys() == {"u", "i", "kind", "history.kind", "history.age"}
    (found,) = [logits for _, logits in trainer.predict(state, trainer.inputs_of([batch], batch.size))]
    assert max(batch.bags["history.i"].lengths) == 4 and min(batch.bags["history.i"].lengths) == 0
    np.testing.assert_allclose(found, logits_by_loops(trainer, state, batch, softmax), rtol=1e-9)


def test_numbers_are_those_of_one_device_on_any_mesh_and_after_a_resume(log, tmp_path):
    assert_alike_on_meshes(config_of(log, "compute_dtype=float64", "model.softmax=false"), tmp_path)


def test_a_request_gets_the_scores_of_predict(log, tmp_path):
    """One user's history under "user", and many candidates in their order; by the export and by the run."""
    config = config_of(log, "mesh.devices=2", "embedding.init_scale=1.0")
    recjax.fit(config, tmp_path / "run")
    assert inside("export", tmp_path / "run", "--out", tmp_path / "export").status == 0
    history = [{"i": n, "kind": "ab"[n % 2], "age": 60.0 * n} for n in range(5)]
    user, candidates = {"u": 3, "history": history}, [{"i": n % 12, "kind": "a", "price": n / 10} for n in range(40)]
    service = Service(tmp_path / "export", ServiceConfig(most_candidates=64))
    answer = service.answer_now(json.dumps({"user": user, "candidates": candidates}).encode())
    rows = [user | candidate for candidate in candidates]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = inside("predict", tmp_path / "run", "--input", tmp_path / "rows.jsonl", "--out", tmp_path / "scores.jsonl")
    assert done.status == 0, done.err
    scores = [json.loads(line)["logit"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert len(set(scores)) > 12
    np.testing.assert_allclose(json.loads(answer)["scores"]["logit"], scores, rtol=1e-5, atol=1e-6)


def test_rows_without_a_label_are_refused(log):
    """There would be nothing to tell apart, and a training would make a model that says yes to everything."""
    config = recjax.override(config_of(log), {"data.label": ""})
    with pytest.raises(ConfigError, match="each row is a u and a i that belong together, with no label, and model=din"):
        build_trainer(config)


@pytest.mark.multiprocess
def test_two_processes_give_the_numbers_of_one(log, tmp_path):
    settings = [f"data.from={log}", *SETTINGS, "compute_dtype=float64", "mesh.devices=4", "plan=row_wise"]
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", "din", settings)
    assert_equal(tmp_path / "by 1", tmp_path / "by 2", 1e-9)


def test_a_run_goes_on_with_later_events_whose_histories_reach_back(tmp_path):
    """`since`: earlier events of the log are in histories alone; new items get rows after the known ones."""
    events = {"u": [1, 2, 1, 2, 1, 1], "i": [5, 6, 6, 5, 7, 5], "t": [1.0, 2, 3, 4, 5, 6], "y": [0, 1, 1, 0, 1, 0]}
    first, whole = (
        tables.write(pa.table({k: v[:n] for k, v in events.items()}), tmp_path / f"{n}.parquet") for n in (4, 6)
    )
    settings = ["data.user=u", "data.item=i", "data.time=t", "data.label=y", "data.ages=0", "data.split=time:1,0,0"]
    more = ["embedding.dim=4", "mesh.devices=1", "mesh.platform=cpu", "train.epochs=1", "train.batch_size=2"]
    recjax.fit(recjax.load("din", [f"data.from={first}", *settings, *more]), tmp_path / "run")
    asked = [text.removeprefix("data.") for text in settings]
    kept = [f"base={tmp_path / 'run'}", "base_values=keep", "since=5"]
    done = inside("data", "prepare", "sequences", "--from", whole, "--out", tmp_path / "later", *asked, *kept)
    assert done.status == 0, done.err
    block = open_prepared(tmp_path / "later").read("train", 0)
    assert block.bags["history.i"].lengths.tolist() == [2, 3]
    old, new = block.bags["history.i"].ids[[0, 4]]  # of items 5 and 7
    assert block.bags["i"].ids[:, 0].tolist() == [new, old] and new == 3
    done = inside("train", tmp_path / "run", "--more", tmp_path / "later")
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] > 2
