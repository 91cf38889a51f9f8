"""The compiled step on paper, against closed forms and against the step that a training really takes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.commands import assert_refused, inside

from recjax.config.run import EmbeddingConfig, FeatureConfig, RunConfig, TableConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import Adam, RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.plan_report import describe_plan
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.sharded import exchange_of
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.planning.compiled_collectives import collectives
from recjax.settings.values import Named
from recjax.train import compile_report, first_batch
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_batches, abstract_state, compile_step

N, D, B = 4, 8, 512
DENSE = (13 * 16 + 16) + (16 * D + D) + (14 * 16 + 16) + (16 + 1)  # the top MLP sees D + 3 * 4 / 2 values
CONFIG = RunConfig(
    data=ZipfStream(rows=(3, 5000, 3002), ids_per_bag=(1, 4, 2), train_rows=5000, distinct_blocks=1),
    model=DLRMConfig(bottom=(16, D), top=(16, 1)),
    embedding=EmbeddingConfig(D, optimizer=RowWiseAdagrad()),
    train=TrainConfig(batch_size=B, optimizer=DenseAdagrad(), shuffle=False),
    mesh=MeshConfig(devices=N),
)


@pytest.fixture(scope="module", autouse=True)
def all_devices() -> None:
    """Starts the back end with all host devices, before a mesh of fewer does."""
    jax.devices()


@pytest.fixture(scope="module")
def found(all_devices: None) -> dict[str, Any]:
    return compile_report.on_paper(CONFIG, memory_gib=1)


def test_memory_is_that_of_closed_forms(found: dict[str, Any]) -> None:
    rows = 1250 + 751 + 3  # the fullest device has of 5000 / 4 and 3002 / 4, and a copy
    memory = found["memory"]
    assert memory["tables"] == rows * D * 4
    assert memory["slots"] == rows * 4
    assert memory["dense"] == memory["dense_optimizer"] == DENSE * 4
    (spread,) = (c for name, c in found["capacities"].items() if name.startswith("row_wise"))
    (copied,) = (c for name, c in found["capacities"].items() if name.startswith("data_parallel"))
    ids = (B // N) * (1 + 4 + 2)
    assert memory["batch"] == 4 * ((B // N) * (13 + 1 + 1) + ids + (N * spread + copied) + (N + 1))
    assert memory["fetched_rows"] == (N * spread + copied) * D * 4
    assert memory["pooled"] == (B // N) * 3 * D * 4
    given = sum(memory[k] for k in ("tables", "slots", "dense", "dense_optimizer", "batch"))
    given += 4 * (1 + 2)  # learning rates of the dense part and of two groups
    # 5 true counts are not read and leave the program; step, ok and the metrics join it, with an address each
    assert memory["total"] - memory["temporaries"] == pytest.approx(given, abs=288)
    assert memory["temporaries"] > memory["fetched_rows"] + memory["pooled"]
    assert found["fits"] is True


def test_tables_in_segments_take_what_the_plan_says(tmp_path: Path) -> None:
    """By columns, by rows, with hot rows apart, on 8 devices: what the compiler counts beside the plan's own figure."""
    hot = RowIds(tuple(range(0, 600, 3)))
    plan = Plan(
        {
            "sparse_0": (Segment("data_parallel"),),
            "sparse_1": (
                Segment("table_wise", columns=(0, 4), owners=3),
                Segment("row_wise", columns=(4, D), owners=(5, 0, 6)),
            ),
            "sparse_2": (Segment("data_parallel", hot), Segment("row_wise", "rest", columns=(0, 4)))
            + (Segment("column_wise", "rest", columns=(4, D)),),
        }
    )
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(devices=8), plan=str(file))
    memory = compile_report.on_paper(config)["memory"]
    trainer = build_trainer(config, weights=False)
    tables = tuple({s.spec.name: s.spec for g in trainer.bound.groups for s in g.segments}.values())
    told = describe_plan(plan, tables, trainer.bound.features, 8, B)["buffer_bytes_per_device"]
    rest = 3002 - 200
    columns_of_4 = 5000 + rest // 8  # the fullest device, 3, has half of the columns of sparse_1
    assert told == 4 * ((3 + 200) * (D + 1) + columns_of_4 * (4 + 1) + rest * (1 + 1))
    assert memory["tables"] + memory["slots"] == told
    others = sum(memory[kind] for kind in ("dense", "dense_optimizer", "batch"))
    assert memory["total"] - memory["temporaries"] - others == pytest.approx(told, abs=500)


def test_a_step_compiled_for_its_kernels_reads_as_the_one_that_runs() -> None:
    trainer = build_trainer(CONFIG, weights=False)
    sizes = first_batch.sample(trainer).capacities
    runs = trainer.step_program.lower(abstract_state(trainer), abstract_batches(trainer, sizes)).compile().as_text()
    assert compile_step(trainer, sizes, kernels=True).as_text() == runs
    plain = compile_step(trainer, sizes).as_text()
    assert sorted(map(str, collectives(plain))) == sorted(map(str, collectives(runs)))


def test_bytes_of_collectives_are_those_of_closed_forms(found: dict[str, Any]) -> None:
    (spread,) = (c for name, c in found["capacities"].items() if name.startswith("row_wise"))
    away = (N - 1) / N
    lines = {(line["phase"], line["kind"]): line for line in found["collectives"]}
    assert {line["group_size"] for line in lines.values()} == {N}
    assert lines["id_exchange", "all-to-all"]["padded_bytes"] == pytest.approx(away * N * spread * 4)
    for phase in ("row_exchange", "grad_exchange"):
        assert lines[phase, "all-to-all"]["padded_bytes"] == pytest.approx(away * N * spread * D * 4)
        assert lines[phase, "all-to-all"]["count"] == 1
    reduced = sum(line["padded_bytes"] for line in lines.values() if line["kind"] == "all-reduce")
    # dense gradients; sums of loss and of weights; the copied table with a column of touches; whether all is finite
    assert reduced == pytest.approx(2 * away * 4 * (DENSE + 2 + 3 * (D + 1) + 1))
    assert found["sent"]["padded_bytes"] == pytest.approx(sum(p["padded_bytes"] for p in found["phases"].values()))

    ids = CONFIG.data.open().read("train", 0).bags  # useful: distinct rows of a device's samples that others have
    tables = {t.spec.name: t for g in build_trainer(CONFIG, weights=False).bound.groups for t in g.segments}
    asked = set()
    for n in range(N):
        for name in ("sparse_1", "sparse_2"):
            rows = ids[name].ids[n * B // N : (n + 1) * B // N].ravel().astype(np.int64)
            asked |= {(n, int(o), name, int(r)) for r, o in zip(rows, tables[name].locate(rows)[0], strict=True)}
    remote = sum(n != owner for n, owner, _, _ in asked)
    assert lines["id_exchange", "all-to-all"]["useful_bytes"] == pytest.approx(remote * 4 / N)
    assert lines["row_exchange", "all-to-all"]["useful_bytes"] == pytest.approx(remote * 4 * D / N)


def test_of_a_large_batch_the_shares_of_the_first_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(CONFIG, weights=False)
    whole = first_batch.sample(trainer)
    assert (whole.devices, whole.samples, whole.ids) == (N, B, B * 7)
    monkeypatch.setattr(first_batch, "COUNTED_IDS", 2 * (B // N) * 7 + 1)
    some = first_batch.sample(trainer)
    assert (some.devices, some.samples, some.ids) == (2, B // 2, B // 2 * 7)
    for name, counts in whole.counts.items():
        np.testing.assert_array_equal(some.counts[name].counts_NxO, counts.counts_NxO[:2])
        if (group := trainer.bound.group(name)).spread:
            exchange = exchange_of(group)
            for event in exchange.events(whole.capacities, B // N, 4):
                all_NxN = exchange.sent_bytes(event, counts, B // N, 4)
                assert all_NxN is not None
                known = all_NxN[:, :2] if event.phase == "row_exchange" else all_NxN[:2]
                np.testing.assert_array_equal(exchange.sent_bytes(event, some.counts[name], B // N, 4), known)
    monkeypatch.setattr(first_batch, "COUNTED_IDS", 1)
    assert first_batch.sample(trainer).devices == 1


def test_the_shapes_are_those_of_a_training() -> None:
    config = RunConfig(
        data=Synthetic(rows=(40, 3000, 700, 90), ids_per_bag=(1, 3, 0, 0), weighted=(False, True, False, True)),
        model=DLRMConfig(bottom=(16, D), top=(16, 1), interaction="cat"),
        embedding=EmbeddingConfig(
            D,
            "mean",
            tables=Named(
                {
                    "sparse_0": TableConfig(placement="grid"),
                    "sparse_1": TableConfig(placement="row_wise"),
                    "sparse_2": TableConfig(dim=5, optimizer=Adam(), placement="column_wise"),
                    "sparse_3": TableConfig(placement="data_parallel"),
                }
            ),
            features=Named({"sparse_0": FeatureConfig(pooling="sum")}),
        ),
        train=TrainConfig(batch_size=101, accumulate=2),
        mesh=MeshConfig(devices=4, hosts=2),
    )
    trainer = build_trainer(config)
    stream = trainer.train_inputs()
    real = trainer.init_state(), next(stream)
    paper = abstract_state(build_trainer(config, weights=False)), abstract_batches(trainer, stream.capacities)
    for (path, x), (same, y) in zip(jax.tree.leaves_with_path(real), jax.tree.leaves_with_path(paper), strict=True):
        assert (path, x.shape, x.dtype) == (same, y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path


def test_the_command() -> None:
    options = ("data.rows=300,40000", "train.batch_size=64", "mesh.devices=2", "train.optimizer=sgd")
    done = inside(
        "plan", "bench_kaggle16", *options, "model.bottom=16", "model.top=1", "--compile", "--memory-gib", "1e-3"
    )
    assert done.status == 0
    assert "compiled for 2 device(s)" in done.out and "does not fit into 0.001 GiB: " in done.out
    assert "row_exchange (all-to-all)" in done.out and "sparse_1  row_wise" in done.out


@pytest.mark.parametrize(
    ("options", "status", "patterns"),
    [
        (("synthetic", "mesh.devices=-1", "--compile"), 2, ["devices is -1; give a positive number"]),
        (("synthetic", "mesh.devices=64", "--compile"), 4, ["mesh.devices=64, but JAX sees 8"]),
        (("dlrm_criteo_kaggle", "--compile"), 3, ["recjax data prepare criteo_kaggle"]),
        (("synthetic", "--memory-gib", "8"), 2, ["--compile finds: give both"]),
        (("synthetic", "--compile", "--memory-gib", "0"), 2, ["--memory-gib is 0.0; give what one device has"]),
    ],
)
def test_mistakes(options: tuple[str, ...], status: int, patterns: list[str]) -> None:
    assert_refused(inside("plan", *options), status, *patterns)


def test_the_presets_shape_is_the_published_one() -> None:
    from recjax.config import presets

    config = presets.load("bench_model_a")
    schema = config.data.open().schema
    dims = [config.embedding.tables[f.name].dim or 0 for f in schema.features]
    assert sum(f.rows * d for f, d in zip(schema.features, dims, strict=True)) == pytest.approx(793e9, rel=1e-4)
    assert (len(dims), min(dims), max(dims)) == (1000, 4, 384)
    assert sum(f.bag or 0 for f in schema.features) == 15 * 1000
    layers = (*config.model.bottom, *config.model.top)
    assert len(layers) == 20 and sum(layers) / 20 == pytest.approx(3375, abs=1)
    inputs = [512, *config.model.bottom[:-1], config.model.bottom[-1] + sum(dims), *config.model.top[:-1]]
    assert sum(2 * i * o for i, o in zip(inputs, layers, strict=True)) == pytest.approx(638e6, rel=1e-3)
    assert config.train.batch_size == 65_536 and config.mesh.devices == 128
