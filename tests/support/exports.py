"""Small models to export, and the truth about what an export gives: decoded tables, pooled by the dense oracle."""

import dataclasses

import jax
import numpy as np

import recjax
from recjax.data.pipeline import batches
from recjax.serving import loader
from recjax.serving.export import write
from recjax.train.build import build_trainer
from recjax.train.module import ModuleDef
from recjax.train.table_specs import specs
from support.dense_reference import bag_matrix

BAGS = ("data.rows=30,20,25,9", "data.ids_per_bag=1,0,3,0", "data.weighted=false,true,true,false", "data.dense=3")
ROWS = ("data.train_rows=64", "data.validation_rows=32", "data.test_rows=50")
TASKS = (
    "model=mmoe",
    "model.batch_norm=true",
    "model.dropout=0.5",
    "data.labels=binary,number",
    "embedding.pooling=mean",
)


def untrained(*overrides):
    """A trainer of a small model with one bag of each kind, and a state in which nothing is 0 or 1 by chance."""
    config = recjax.load("synthetic_multihot", [*BAGS, *ROWS, "embedding.dim=4", "mesh.devices=1", *overrides])
    trainer = build_trainer(config)
    state = trainer.init_state()
    rng = np.random.default_rng(0)
    changed = jax.tree.map(lambda x: x + np.float32(rng.uniform(0.1, 0.5, x.shape)), (state.dense, state.module))
    return trainer, dataclasses.replace(state, dense=changed[0], module=changed[1])


def rows_of(trainer):
    """The test split as one batch, and as the loader takes it."""
    (batch,) = batches(trainer.source, "test", 50, epochs=1)
    given = {"ids": {}, "lengths": {}, "weights": {}, "dense": batch.dense}
    for name, bags in batch.bags.items():
        for kind in ("ids", "lengths", "weights"):
            if getattr(bags, kind) is not None:
                given[kind][name] = getattr(bags, kind)
    return batch, given


def decoded(folder, entry):
    """The rows of an exported table by the formulas of its encoding, in NumPy."""
    raw = np.load(folder / entry["file"])
    if entry["held"] == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if entry["held"] in ("int8", "int4"):
        scale, bias = np.ascontiguousarray(raw[:, -8:]).view(np.float32).T
        levels = raw[:, :-8]
        if entry["held"] == "int4":
            levels = np.stack([levels % 16, levels // 16], axis=2).reshape(len(raw), -1)[:, : entry["dim"]]
        return levels * scale[:, None] + bias[:, None]
    return raw


def by_oracle(trainer, state, batch, tables):
    """Outputs of the module for bags that the dense oracle has pooled from whole tables."""
    _, features = specs(trainer.config, trainer.source.schema)
    pooled = {
        f.name: np.float32(
            bag_matrix(batch.bags[f.reads], batch.size, len(tables[f.table]), f.pooling) @ tables[f.table]
        )
        for f in features
    }
    found = ModuleDef.of(trainer.model).merge(state.dense, state.module)(batch.dense, pooled)
    return np.stack(list(found.values()), axis=1) if isinstance(found, dict) else np.asarray(found)


def truth_of(trainer, state, batch, folder):
    """`by_oracle` with the tables of an export."""
    tables = loader.read_manifest(folder)["tables"]
    return by_oracle(trainer, state, batch, {name: decoded(folder, entry) for name, entry in tables.items()})


def exported(trainer, state, out, *how, **more):
    """Exports, and opens what was written."""
    write(trainer, state, 0, out, *how, **more)
    return loader.load(out)
