"""Tests that need a GPU: `JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/test_gpu.py`, on one GPU or several.

Elsewhere the same is shown for CPUs, and compiled programs for GPUs are read (test_aot.py). One H100 has run them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.commands import inside, lines_of
from support.contract import DATA, OPTIONS, STEPS, B, Net, V, make_batch
from support.problems import (
    ON_ONE_HOST,
    Placed,
    Problem,
    Result,
    compare,
    problem,
    run_oracle,
    run_sharded,
    to_host,
    trainer_of,
)
from support.routing import apart

from recjax import kernels
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import Adagrad, Adam, Ftrl, OptimizerContext, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.pooling import sum_bags
from recjax.embedding.segment_sums import segment_sums
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.gpu_kernels.row_update import RowRule, update_in_place
from recjax.models.dense import THREE_PASSES, Precision, Rounding, dense
from recjax.models.dlrm import DLRMConfig
from recjax.models.layers import dot_interaction
from recjax.parallel.mesh import Share
from recjax.train.routers import DeviceRouter, HostRouter, InFlight

pytestmark = [pytest.mark.gpu, pytest.mark.full, pytest.mark.fresh_compile]

OPTIMIZERS: dict[str, Any] = {
    "sgd": Sgd(0.5, l2=0.01),
    "momentum": Sgd(0.5, momentum=0.9),
    "adagrad": Adagrad(0.2, l2=0.01),
    "rowwise_adagrad": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "adam": Adam(0.05, weight_decay=0.1),
    "partial_rowwise_adam": PartialRowWiseAdam(0.05, l2=0.01),
    "ftrl": Ftrl(0.5, l1=1e-4, l2=0.1),
    "adam_every_row": Adam(0.05, l2=0.01, every_row=True),
}


@pytest.fixture(autouse=True)
def gpus() -> int:
    """Returns how many there are."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU: run with JAX_PLATFORMS=cuda,cpu")
    return len(jax.devices())


@functools.cache
def made(optimizer: str) -> Problem:
    """One table of a rule, looked up by bags of every kind: fixed and jagged, weighted or not, pooled or not."""
    poolings = ("sum", "mean", "none", "sum")
    features = [
        FeatureSpec(name, "table", bag, pooling, weighted, name)  # type: ignore[arg-type]
        for (name, (bag, weighted)), pooling in zip(DATA.items(), poolings, strict=True)
    ]
    table = TableSpec("table", V, 4, OPTIMIZERS[optimizer])
    batches = [make_batch(step) for step in range(STEPS)]
    return Problem(batches, B, (table,), tuple(features), Net(), 2, optax.sgd(0.1), options=OPTIONS)


@functools.cache
def oracle(optimizer: str) -> Result:
    return run_oracle(made(optimizer), np.float64)


@pytest.mark.parametrize("plan", ON_ONE_HOST)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_the_oracle(optimizer: str, plan: str, gpus: int) -> None:
    with jax.enable_x64(True):
        compare(run_sharded(made(optimizer), gpus, plan, np.float64), oracle(optimizer), loss_rtol=1e-9, atol=1e-9)


ON_ONE = (
    "mesh.devices=1",
    "mesh.platform=gpu",
    "train.routing=device",
    "train.steps=12",
    "train.log_every=1",
    "data.rows=90000,37,2000",
    "data.ids_per_bag=1,20,3",
)


@functools.cache
def clicks(dim: int = 16, rows: tuple[int, ...] = (90_000, 37, 2000)) -> Problem:
    """Hot rows: most samples look the same few up, so that their sums have many terms."""
    source = Synthetic(rows=rows, ids_per_bag=(1, 20, 0), weighted=(False, True, False), train_rows=20_000, zipf=1.3)
    model = DLRMConfig(bottom=(32, dim), top=(32, 1))
    return problem(source.open(), model, RowWiseAdagrad(0.05), dim, steps=6, batch_size=4096, tx=optax.sgd(0.1))


def bits(placed: Placed, first: int = 0, start: Any = None) -> tuple[bytes, Any]:
    """The bits of all that a training of the batches from `first` on ends with, and its state."""
    trainer = placed.trainer
    state = placed.steps(trainer.init_state() if start is None else start, first)
    host = to_host(state, trainer.bound)
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(host)), state


@pytest.mark.parametrize("plan", ON_ONE_HOST)
def test_two_runs_are_bit_identical(plan: str, gpus: int) -> None:
    runs = [bits(Placed.of(clicks(), trainer_of(clicks(), gpus, plan)))[0] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("plan", ON_ONE_HOST)
def test_a_resumed_run_ends_with_the_same_bits(plan: str, gpus: int) -> None:
    placed = Placed.of(clicks(), trainer_of(clicks(), gpus, plan))
    whole, _ = bits(placed)
    half = placed.steps(placed.trainer.init_state(), 0, 3)
    saved = to_host(half, placed.trainer.bound)
    assert bits(placed, 3, placed.trainer.restore(saved, 3))[0] == whole


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_a_step_holds_no_second_table(dim: int, gpus: int) -> None:
    made = clicks(dim, (4_000_000, 37, 2000))
    placed = Placed.of(made, trainer_of(made, gpus, "row_wise"))
    memory = placed.compiled.memory_analysis()
    table = 4_000_000 * dim * 4 // gpus
    assert memory.alias_size_in_bytes > table > 2 * memory.temp_size_in_bytes
    state = placed.steps(placed.trainer.init_state(), 0, 2)
    device = jax.local_devices()[0]
    before = (device.memory_stats() or {})["bytes_in_use"]
    state = placed.steps(state, 2, 6)
    jax.block_until_ready(state)
    assert (device.memory_stats() or {})["bytes_in_use"] < before + table / 4


@pytest.mark.parametrize("dedup", [True, False])
def test_routing_on_the_devices_gives_what_the_host_gives(dedup: bool, gpus: int) -> None:
    trainer = trainer_of(clicks(), gpus, "row_wise", dedup=dedup)
    batch, size = clicks().batches[0], clicks().batch_size
    assert Share.of(trainer.mesh).count == gpus
    host, device = (make(trainer.bound, trainer.mesh, np.float32) for make in (HostRouter, DeviceRouter))
    routed = host.route(batch, size, 1)
    sizes = {**routed.required_capacities, "sparse_2": 2**16}
    found, _, _ = apart(device, device.put([InFlight(batch, device.route(batch, size, 1))], sizes))
    none = dict.fromkeys(("order_M", "row_M", "start_U", "slot_M"))  # of the order of ids, which the host does not keep
    sorted_too = {name: dataclasses.replace(of, **none) for name, of in found.routing.groups.items()}
    found = dataclasses.replace(found, routing=dataclasses.replace(found.routing, groups=sorted_too))
    rooms = {name: of.slots_NxOxC.shape[2] for name, of in found.routing.groups.items()}  # on one GPU for all ids
    truth, _, _ = apart(host, host.put([InFlight(batch, routed)], {**sizes, **rooms}))
    jax.tree.map(np.testing.assert_array_equal, found, truth)


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [(Precision.HIGHEST, 0, 1e-5), (THREE_PASSES, 0, 1e-5), (Precision.HIGH, 1e-5, 3e-3)],
)
def test_products_are_as_exact_as_they_say(precision: Rounding, least: float, most: float) -> None:
    """Sums of 512 products of numbers of 24 bits; TensorFloat32 has 11."""
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 1, shape).astype(np.float32) for shape in ((256, 512), (512, 256)))
    y = jax.jit(lambda x, w: dense(x, w, None, False, precision))(jnp.asarray(x), jnp.asarray(w))
    error = np.max(np.abs(np.asarray(y, np.float64) / (x.astype(np.float64) @ w) - 1))
    assert least < error < most


def test_atomic_sums_agree_but_for_rounding(gpus: int) -> None:
    exact = trainer_of(clicks(), gpus, "row_wise")
    groups = tuple(dataclasses.replace(group, atomics=True) for group in exact.bound.groups)
    loose = dataclasses.replace(exact, bound=dataclasses.replace(exact.bound, groups=groups))
    losses = []
    for trainer in (exact, loose):
        placed, state = Placed.of(clicks(), trainer), trainer.init_state()
        for inputs in placed.inputs:
            state, metrics = trainer.train_step(state, inputs)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "tensorfloat32x3"])
def test_a_training_by_kernels_is_one_without(dtype: str, tmp_path: Path) -> None:
    """On one GPU, with small tables beside large ones and bags of one and more: every kernel has a part in it."""
    runs = [("by kernels", 1, False), ("three a call", 3, False), ("again", 3, False), ("without", 1, True)]
    losses = []
    for name, steps_per_call, plain in runs:
        with kernels.switched_off() if plain else contextlib.nullcontext():
            jax.clear_caches()
            changes = [f"compute_dtype={dtype}", f"train.steps_per_call={steps_per_call}", *ON_ONE]
            assert inside("train", "synthetic", *changes, "--out", tmp_path / name).status == 0
        losses.append([line["loss"] for line in lines_of(tmp_path / name, "train")])
    assert len(losses[0]) == 12 and losses[1] == losses[2]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0], losses[3], rtol=1e-4)


@pytest.mark.parametrize("D", [16, 64, 128])
def test_kernels_give_what_plain_forms_give(D: int) -> None:
    rng = np.random.default_rng(0)
    values, vectors = (rng.normal(size=size).astype(np.float32) for size in ((4096, D), (512, 27, D)))
    segment = np.sort(np.concatenate([np.full(10_000, 7), rng.integers(0, 3000, 10_000)])).astype(np.int32)
    source = rng.integers(0, 4096, len(segment)).astype(np.int32)

    def sums(*arrays: Any) -> Any:
        return jax.jit(lambda v, s, t: segment_sums(v, s, t, None, 3000))(*arrays)

    def interact(x: Any) -> Any:
        return jax.jit(jax.vjp(dot_interaction, x)[1])(np.ones((512, 351), np.float32))[0]

    index = rng.integers(-1, 4097, (700, 12)).astype(np.int32)

    def bags(rows: Any, weights: Any) -> Any:
        return jax.jit(lambda r, i, w: sum_bags(r, ((i, w),))[0])(rows, index, weights)

    weights = rng.normal(size=index.shape).astype(np.float32)
    table, slot = rng.normal(size=(5000, D)).astype(np.float32), np.ones(5000, np.float32)
    touched, rate = rng.permutation(5000)[:3000].astype(np.int32), (jnp.float32(0.5), jnp.float32(0.1), jnp.bool_(True))
    found, again = sums(values, source, segment), sums(values, source, segment)
    np.testing.assert_array_equal(found, again)
    operands = [jnp.asarray(x) for x in (table, slot, touched, found)]
    rows, slots = update_in_place(
        operands[0], operands[1], operands[2], operands[3], rate, RowRule("rowwise_adagrad", 1e-8)
    )
    with kernels.switched_off():
        jax.clear_caches()
        plain, square = sums(values, source, segment), interact(vectors)
        pooled = [bags(values, weights), bags(values, None)]
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)
    jax.clear_caches()
    for by_kernel, w in zip((bags(values, weights), bags(values, None)), (weights, None), strict=True):
        np.testing.assert_array_equal(by_kernel, bags(values, w))
        np.testing.assert_allclose(by_kernel, pooled[w is None], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(interact(vectors), square, rtol=1e-4, atol=1e-4)
    at = OptimizerContext(jnp.int32(0), jnp.float32(1), lambda x: jnp.mean(x, axis=1))
    expected, moved = RowWiseAdagrad(0.1, eps=1e-8).apply(
        jnp.asarray(table[touched]), {"sum_of_squares": jnp.asarray(slot[touched])}, found * 0.5, at
    )
    np.testing.assert_allclose(np.asarray(rows)[touched], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(slots)[touched], moved["sum_of_squares"], rtol=1e-5)
