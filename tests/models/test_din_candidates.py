"""DIN on requests: a row has a history and candidates, each with a label; from a table to a server."""

import json

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import inside
from support.meshes import assert_alike_on_meshes
from support.processes import assert_equal, train_together

import recjax
from recjax.serving.example_rows import Examples
from recjax.serving.loader import load
from recjax.serving.requests import BadRequestError
from recjax.serving.service import Service, ServiceConfig

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

COLUMNS = "u:id,price:dense,hist:list(item:like=cands.item,kind),cands:list(item,author,y,w)"
SETTINGS = (
    "model=din",
    "data.label=y:weight=w",
    f"data.columns={COLUMNS}",
    "data.split=random:0.6,0.2,0.2",
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


def requests(rows=150, seed=0):
    """As JSON has them."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        history = [{"item": int(i), "kind": "ab"[i % 2]} for i in rng.integers(0, 12, rng.integers(0, 6))]
        candidates = [
            {
                "item": int(i),
                "author": int(i) % 5,
                "y": int(rng.random() < 0.3 + 0.04 * i),
                "w": float(rng.integers(0, 3)),
            }
            for i in rng.integers(0, 12, rng.integers(0, 7))
        ]
        made.append({"u": int(rng.integers(0, 9)), "price": float(rng.normal()), "hist": history, "cands": candidates})
    return made


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return tables.write(pa.Table.from_pylist(requests()), tmp_path_factory.mktemp("requests") / "requests.parquet")


def config_of(table, *settings):
    return recjax.load("table", [f"data.from={table}", *SETTINGS, *settings])


def test_numbers_are_those_of_one_device_on_any_mesh_and_after_a_resume(table, tmp_path):
    assert_alike_on_meshes(config_of(table, "compute_dtype=float64"), tmp_path)


def measured(labels, logits, weights):
    """AUC by all pairs, log loss and calibration, in float64."""
    p = 1 / (1 + np.exp(-logits))
    loss = -np.sum(weights * (labels * np.log(p) + (1 - labels) * np.log1p(-p))) / weights.sum()
    ones, zeros = labels == 1, labels == 0
    pair_weights = weights[ones][:, None] * weights[zeros][None]
    apart = logits[ones][:, None] - logits[zeros][None]
    auc = np.sum(pair_weights * ((apart > 0) + (apart == 0) / 2)) / pair_weights.sum() if pair_weights.any() else np.nan
    return {"auc": auc, "logloss": loss, "calibration": np.sum(weights * p) / np.sum(weights * labels)}


def test_measures_and_scores_are_those_of_each_candidate(table, tmp_path):
    """Metrics of all, by user and by author, and within each user, equal NumPy's on the scores that predict writes."""
    recjax.fit(config_of(table, "mesh.devices=2", "embedding.init_scale=1.0"), tmp_path / "run")
    rows = requests(80, seed=1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = inside("predict", tmp_path / "run", "--input", tmp_path / "rows.jsonl", "--out", tmp_path / "scores.jsonl")
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [len(line["cands.y.logit"]) for line in lines] == [len(row["cands"]) for row in rows]
    flat = [(row["u"], c["author"], c["y"], c["w"], x) for row, line in zip(rows, lines, strict=True)
            for c, x in zip(row["cands"], line["cands.y.logit"], strict=True)]  # fmt: skip
    user, author, labels, weights, logits = map(np.array, zip(*flat, strict=True))
    found = recjax.evaluate(tmp_path / "run", input=tmp_path / "rows.jsonl", by=("u", "cands.author"), group="u")
    expected = measured(labels, logits, weights)
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"cands.y.{name}"], value, rtol=1e-5)
    assert found["samples"] == (weights > 0).sum()
    for feature, values in (("u", user), ("cands.author", author)):
        for part in found["by"][feature]:
            at = values == int(part["value"])
            assert part["samples"] == (weights[at] > 0).sum()
            for name, value in measured(labels[at], logits[at], weights[at]).items():
                np.testing.assert_allclose(part[f"cands.y.{name}"], value, rtol=1e-5, err_msg=f"{feature} {part}")
    pairs = []
    for u in set(user):
        of_user = [x[user == u] for x in (labels, logits, weights)]
        pairs.append((measured(*of_user)["auc"], of_user[2].sum()))
    aucs, shares = np.array([pair for pair in pairs if not np.isnan(pair[0])]).T
    np.testing.assert_allclose(found["grouped"]["cands.y"]["gauc"], aucs @ shares / shares.sum(), rtol=1e-5)


def test_a_request_is_one_row_whose_scores_are_those_of_predict(table, tmp_path):
    """100 candidates, in their order; several requests at once; by the loader alone; and mistakes."""
    recjax.fit(config_of(table, "mesh.devices=2", "embedding.init_scale=1.0"), tmp_path / "run")
    assert inside("export", tmp_path / "run", "--out", tmp_path / "export").status == 0
    rows = requests(6, seed=2)
    rng = np.random.default_rng(3)
    rows[1] |= {"cands": [{"item": int(i), "author": int(i) % 5} for i in rng.integers(0, 12, 100)]}
    rows[1] |= {"hist": [{"item": int(i), "kind": "a"} for i in rng.integers(0, 12, 30)]}
    rows = [row for row in rows if row["cands"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = inside("predict", tmp_path / "run", "--input", tmp_path / "rows.jsonl", "--out", tmp_path / "scores.jsonl")
    assert done.status == 0, done.err
    expected = [json.loads(line)["cands.y.logit"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    service = Service(tmp_path / "export", ServiceConfig(most_candidates=256))
    made = []
    for row, scores in zip(rows, expected, strict=True):
        candidates = [{"item": each["item"], "author": each["author"]} for each in row["cands"]]
        body = {"user": {name: row[name] for name in ("u", "price", "hist")}, "candidates": candidates}
        found = json.loads(service.answer_now(json.dumps(body).encode()))["scores"]["cands.y.logit"]
        np.testing.assert_allclose(found, scores, rtol=1e-5, atol=1e-6)
        made.append(service.reader.read(json.dumps(body).encode()))
    assert len(set(expected[1])) > 10 and [request.size for request in made][1] == 100
    for found, scores in zip(service.scorer(made), expected, strict=True):
        np.testing.assert_allclose(found[:, 0], scores, rtol=1e-5, atol=1e-6)
    bags, dense = made[1].bags, made[1].dense
    ids, lengths = ({n: getattr(b, kind) for n, b in bags.items()} for kind in ("ids", "lengths"))
    alone = load(tmp_path / "export")(ids, {n: x for n, x in lengths.items() if x is not None}, dense=dense)
    np.testing.assert_allclose(alone[:, 0], expected[1], rtol=1e-5, atol=1e-6)
    service.scorer.warm_up()
    Examples(service).request(rng, 5)
    for candidate, words in (
        ({"item": 3}, r"candidates\[0\]: .*'author'"),
        ({"item": 3, "author": 1, "x": 1}, "key 'x'"),
    ):
        with pytest.raises(BadRequestError, match=words):
            service.reader.read(json.dumps({"user": body["user"], "candidates": [candidate]}).encode())


@pytest.mark.multiprocess
def test_two_processes_give_the_numbers_of_one(table, tmp_path):
    settings = [f"data.from={table}", *SETTINGS, "compute_dtype=float64", "mesh.devices=4", "plan=row_wise"]
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", "table", settings)
    assert_equal(tmp_path / "by 1", tmp_path / "by 2", 1e-9)
