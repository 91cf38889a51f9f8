"""Whole runs of several tasks: trained, resumed elsewhere, evaluated and predicted by the command line."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import inside, lines_of

import recjax

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

SYNTHETIC = tuple(
    """
    train synthetic data.labels=binary,number,class,binary data.masked=true data.rows=50,30 data.train_rows=640
    data.validation_rows=300 data.test_rows=300 embedding.dim=4 train.batch_size=64 tasks.label_1.loss=huber
    tasks.label_3.loss=focal tasks.label_3.weight=0.5 model=mmoe model.experts=2 model.expert=8 model.tower=4
    model.batch_norm=true model.dropout=0.2 train.log_every=1 train.eval_every=3
    train.choose_by=0.7*label_0.auc+0.3*label_3.auc compute_dtype=float64
    """.split()
)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs in the right order, counted one by one; a tie is half a pair."""
    above = scores[labels == 1][:, None] - scores[labels == 0]
    return float(((above > 0) + (above == 0) / 2).mean())


def test_a_run_tells_what_each_label_comes_to(tmp_path: Path) -> None:
    whole = inside(*SYNTHETIC, "train.steps=6", "mesh.devices=2", "--out", tmp_path / "whole", "--json")
    assert whole.status == 0, whole.err
    first = lines_of(tmp_path / "whole", "train")[0]
    each = [first[f"label_{t}.loss"] for t in range(4)]
    assert first["loss"] == pytest.approx(sum(w * loss for w, loss in zip((1, 1, 1, 0.5), each, strict=True)))
    validated = {line["step"]: line for line in lines_of(tmp_path / "whole", "validation")}
    best = max(validated, key=lambda step: 0.7 * validated[step]["label_0.auc"] + 0.3 * validated[step]["label_3.auc"])
    assert whole.result["eval_step"] == best
    result = inside("eval", tmp_path / "whole", "mesh.devices=1", "--json").result
    assert {k: result[k] for k in whole.result["eval"]} == pytest.approx(whole.result["eval"], rel=1e-9)
    assert set(result["tasks"]) == {"label_0", "label_3"}
    assert (tmp_path / "whole" / "calibration.png").stat().st_size > 1000
    # The slices of a feature with one value a sample make up the whole, label by label.
    by = inside("eval", tmp_path / "whole", "mesh.devices=1", "--by", "sparse_0", "--top", "4", "--json").result
    rows = by["by"]["sparse_0"]
    assert len(rows) == 5 and rows[-1]["value"] == "rest"
    assert sum(row["samples"] for row in rows) == by["samples"]
    for name in ("label_0.logloss", "label_1.mse", "label_2.accuracy", "label_3.loss"):
        counts = [row[f"{name.partition('.')[0]}.samples"] for row in rows]
        mean = np.average([row[name] if n else 0.0 for row, n in zip(rows, counts, strict=True)], weights=counts)
        assert mean == pytest.approx(by[name], rel=1e-9)
    text = inside("eval", tmp_path / "whole", "mesh.devices=1", "--by", "sparse_0").out
    assert re.search(r"value +samples +loss +label_0.auc +label_1.mae +label_2.accuracy +label_3.auc", text)
    done = inside("eval", tmp_path / "whole", "--group", "sparse_0", "--json")
    assert set(done.result["grouped"]) == {"label_0", "label_3"} and done.result["grouped"]["label_3"]["groups"] > 5
    assert "test, label_0: AUC within each sparse_0" in inside("eval", tmp_path / "whole", "--group", "sparse_0").out


def test_from_a_table_to_scores(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 20, 2000), rng.integers(0, 30, 2000)
    drawn = rng.normal(size=20)[user] + rng.normal(size=30)[item]
    clicked = drawn + rng.logistic(size=2000) > 0
    stars = np.clip(np.round(drawn), -1, 1).astype(int)
    rows: dict[str, Any] = {
        "user": user,
        "item": item,
        "clicked": clicked,
        "bought": np.where(clicked, drawn > 1, 0),
        "score": drawn,
        "stars": [("bad", "middling", "good")[s + 1] for s in stars],
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    run = tmp_path / "run"
    settings = """
        data.columns=user:id,item:id data.label=clicked,bought:weight=clicked,score:number,stars:class model=ple
        model.expert=16 model.levels=1 train.epochs=8 train.batch_size=128 mesh.devices=2 small.below_rows=0
        """.split()
    done = inside("train", "table", f"data.from={tmp_path / 'rows.parquet'}", *settings, "--out", run, "--json")
    assert done.status == 0, done.err
    assert done.result["eval"]["clicked.auc"] > 0.7 and done.result["eval"]["stars.accuracy"] > 0.6
    # What counting and constants reach stands beside it.
    assert set(done.result["references"]) == {"clicked: naive Bayes", "bought: naive Bayes"}
    assert done.result["eval"]["score.mse"] < done.result["constants"]["score"]["mse"] == pytest.approx(2, rel=0.3)
    assert done.result["eval"]["stars.accuracy"] > done.result["constants"]["stars"]["accuracy"]
    # Rows of one's own with their labels: those of the file, evaluated one by one.
    own = recjax.evaluate(run, input=pa.table(rows), group="user")
    assert own["split"] == "input" and own["samples"] == 2000 and own["bought.samples"] == clicked.sum()
    scored = ("predict", run, "--input", tmp_path / "rows.parquet", "--out")
    told = inside(*scored, tmp_path / "s.csv", "--columns", "user", "--json").result
    with (tmp_path / "s.csv").open() as file:
        scores = list(csv.DictReader(file))
    assert [int(row["user"]) for row in scores] == user.tolist()
    logits = np.array([float(row["clicked.logit"]) for row in scores])
    probabilities = np.array([float(row["clicked.probability"]) for row in scores])
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-logits)), rtol=1e-6)
    assert told["mean_prediction"]["clicked"] == pytest.approx(probabilities.mean(), rel=1e-6)
    assert own["clicked.auc"] == pytest.approx(auc(clicked, logits), abs=1e-6)
    assert own["grouped"]["clicked"]["gauc"] == pytest.approx(
        np.average([auc(clicked[user == u], logits[user == u]) for u in range(20)], weights=np.bincount(user)), abs=1e-6
    )
    predicted = np.array([float(row["score.prediction"]) for row in scores])
    assert own["score.mae"] == pytest.approx(np.abs(predicted - drawn).mean(), rel=1e-5)
    assert np.corrcoef(predicted, drawn)[0, 1] > 0.9
    right = [row["stars.class"] == said for row, said in zip(scores, rows["stars"], strict=True)]
    assert np.mean(right) > 0.6 and {row["stars.class"] for row in scores} <= {"bad", "middling", "good"}
    again = inside(*scored, tmp_path / "s.jsonl")
    assert again.status == 0, again.err
    line = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])
    assert list(line) == ["row", *(key for key in scores[0] if key not in ("row", "user"))]
    assert inside(*scored, tmp_path / "s.jsonl").status == 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_experts_beat_a_shared_bottom_where_tasks_have_little_in_common(seed: int, tmp_path: Path) -> None:
    """Two numbers of uncorrelated signals, and about as many parameters: 818 in the shared bottom, 890 in the MMoE."""

    def loss(kind: str) -> float:
        models = {"shared_bottom": ("model.bottom=16",), "mmoe": ("model.experts=4", "model.expert=4")}
        settings = """
            data.rows=100,100,100 data.dense=8 data.interaction=3 data.signal=3 data.train_rows=40960
            data.validation_rows=0 data.test_rows=20000 data.labels=number,number data.correlation=0
            model.tower=8 embedding.dim=8 train.batch_size=256 train.epochs=3 train.optimizer=adam
            train.optimizer.learning_rate=0.002 mesh.devices=1
            """.split()
        own = (f"model={kind}", *models[kind], f"seed={seed}", f"data.seed={seed}")
        done = inside("train", "synthetic", *own, *settings, "--out", tmp_path / kind, "--json")
        return float(done.result["eval"]["loss"])

    with jax.numpy_dtype_promotion("standard"):  # as optax's Adam needs it
        assert loss("mmoe") < 0.8 * loss("shared_bottom")
