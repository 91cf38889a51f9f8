"""DIN on requests: a row has a history and candidates, each with a label; from a table to a server."""

import json

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import inside
from support.processes import assert_equal, train_together

import recjax
from recjax.train.build import build_trainer

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


def lines_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_numbers_are_those_of_one_device_on_any_mesh_and_after_a_resume(table, tmp_path):
    losses = {}
    for name, settings in {
        "one": ("mesh.devices=1",),
        "two": ("mesh.devices=2", "plan=column_wise", "train.steps_per_call=3"),
        "three": ("mesh.devices=3", "train.accumulate=2"),
        "eight": ("mesh.devices=8", "plan=row_wise", "embedding.hot.rows=3"),
        "device": ("mesh.devices=2", "train.routing=device"),
    }.items():
        config = config_of(table, "compute_dtype=float64", *settings)
        first = recjax.override(config, ["train.steps=3", "train.checkpoint_every=3"])
        recjax.fit(first, tmp_path / name)
        recjax.fit(recjax.override(first, ["train.steps=0"]), tmp_path / name)
        lines = lines_of(tmp_path / name)
        losses[name] = [line["loss"] for line in lines if line["split"] == "train"]
        losses[name] += [line["auc"] for line in lines if line["split"] in ("validation", "test")]
    assert len(losses["one"]) > 5
    for found in losses.values():
        np.testing.assert_allclose(found, losses["one"], rtol=1e-9)
