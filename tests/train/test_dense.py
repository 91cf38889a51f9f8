"""How dense parameters are held and reduced: the oracle's numbers, and the collectives and memory that are claimed."""

import collections
import dataclasses
import functools
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hlo_text import ancestors
from support.problems import Placed, Problem, Result, by_row, compare, mesh_of, problem, run_oracle, trainer_of

from recjax.config.optax_rules import DenseOptax
from recjax.config.run import FREE_ON_RESUME, RunConfig
from recjax.config.train import DenseAdagrad, DenseSharding, TrainConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad
from recjax.errors import ConfigError
from recjax.lab.bench.breakdown import part_of, scopes
from recjax.models.dlrm import DLRMConfig
from recjax.planning.compiled_collectives import collectives
from recjax.settings.overrides import config_hash
from recjax.train.dense import REPLICATED, Flat, Sharded, buckets, flattened, order_made
from recjax.train.module import parameters
from recjax.train.routers import StepInputs
from recjax.train.state import TrainState
from recjax.train.step import StepOptions
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

KIB = 1 / 1024  # MiB
# Numbers in the kernels and biases of the top and bottom MLP, between which one row is multiplied with one vector.
SIZES = (16, 1, 9 * 16, 16, 16 * 8, 8, 4 * 16, 16)


@functools.cache
def make() -> Problem:
    source = Synthetic(rows=(50,), dense=4, train_rows=300).open()
    model = DLRMConfig(bottom=(16, 8), top=(16, 1))
    tx = DenseAdagrad(0.02, weight_decay=0.1).build()
    made = problem(source, model, RowWiseAdagrad(0.05), 8, steps=3, batch_size=97, tx=tx)
    return dataclasses.replace(made, options=StepOptions(clip_norm=0.05))


@functools.cache
def truth() -> Result:
    with jax.enable_x64(True):
        return run_oracle(make(), np.float64)


@dataclasses.dataclass
class Trained:
    result: Result
    compiled: jax.stages.Compiled
    state: TrainState
    inputs: list[StepInputs]
    host: dict[str, Any]


Held = DenseSharding | Literal["flat"]  # flat: replicated as on a GPU


def placed(held: Held, bucket_mib: float, devices: int, clip_norm: float = 0.05) -> Placed:
    """The problem on a mesh, in float64."""
    config: DenseSharding = "replicated" if held == "flat" else held
    of = dataclasses.replace(make(), options=StepOptions(clip_norm=clip_norm))
    trainer = trainer_of(of, devices, dtype=np.float64, held=config, bucket_mib=bucket_mib)
    if held == "flat":
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float64), parameters(trainer.model))
        trainer = dataclasses.replace(trainer, dense=flattened(trainer.dense, params, trainer.tx, "gpu"))
        assert isinstance(trainer.dense, Flat)
    return Placed.of(of, trainer)


@functools.cache
def train(held: Held, bucket_mib: float, devices: int, clip_norm: float = 0.05) -> Trained:
    on_mesh = placed(held, bucket_mib, devices, clip_norm)
    trainer, inputs = on_mesh.trainer, on_mesh.inputs
    state = on_mesh.start()
    compiled = trainer.step_program.lower(state, inputs[0]).compile()
    losses = []
    for each in inputs:
        state, metrics = compiled(state, each)
        losses.append(float(metrics["loss"]))
    return Trained(Result(losses, *by_row(trainer, state)), compiled, state, inputs, load(trainer.export(state)))


CASES = [
    ("replicated", KIB, 8),
    ("sharded", 0.0, 8),
    ("sharded", KIB, 3),
    pytest.param("sharded", KIB, 2, marks=pytest.mark.wide),
    ("sharded", 0.0, 1),
    ("flat", 0.0, 1),
    ("flat", 0.0, 8),
]


@pytest.mark.parametrize(("held", "bucket_mib", "devices"), CASES)
def test_float64_equals_the_oracle(held: Held, bucket_mib: float, devices: int) -> None:
    """Clipped to a norm that they exceed, so the norm counts each value once."""
    with jax.enable_x64(True):
        trained = train(held, bucket_mib, devices)
    assert min(truth().norms) > make().options.clip_norm
    compare(trained.result, truth(), loss_rtol=1e-9, atol=1e-9)


def dense_collectives(trained: Trained) -> list[tuple[str, str, int]]:
    found = collectives(trained.compiled.as_text())
    return sorted((c.phase, c.kind, c.result_bytes // 8) for c in found if c.phase.startswith("dense"))


def test_each_bucket_is_one_all_reduce() -> None:
    with jax.enable_x64(True):
        trained = train("replicated", KIB, 8)
    found = [c for c in collectives(trained.compiled.as_text()) if c.kind == "all-reduce" and c.phase != "finite_check"]
    arrays = [
        dims for c in found for _, dims in c.shapes if dims
    ]  # the rest are single numbers, which XLA may add to one
    sizes = [size for (size,) in arrays]
    assert 2 <= len(sizes) < len(SIZES)
    assert len(sizes) == sum(any(dims for _, dims in c.shapes) for c in found)
    assert sum(sizes) == sum(SIZES) + 2 + (len(sizes) - 1)  # the sums of w*l and w; and a link to each bucket but one
    assert sorted(sizes)[1] >= 128  # numbers in 1 KiB: all buckets but the last are full


def test_nothing_in_the_program_keeps_apart_what_may_overlap() -> None:
    with jax.enable_x64(True):
        hlo = train("replicated", KIB, 8).compiled.as_text() or ""
    needs, scope = ancestors(hlo), scopes(hlo)
    phases = {c.name: c.phase for c in collectives(hlo)}
    (rows,), (grads,) = ([n for n, p in phases.items() if p == f"{x}_exchange"] for x in ("row", "grad"))
    dense = [n for n in needs if part_of(scope[n]) == "dense_forward"]
    assert not needs[rows].intersection(dense)  # the forward exchange waits for no layer,
    assert [n for n in dense if "dot" in n and rows not in needs[n]]  # the bottom MLP not for it,
    assert [n for n in dense if "dot" in n and rows in needs[n]]  # while the top MLP does
    sent = [n for n, p in phases.items() if p == "dense_grads"]
    assert len(sent) >= 2 and not needs[grads].intersection(sent)
    assert not any(grads in needs[n] for n in sent)


def test_one_vector_holds_all_parameters_and_their_gradients_travel_as_one() -> None:
    with jax.enable_x64(True):
        whole, trained = train("replicated", 0.0, 8, 0.0), train("flat", 0.0, 8, 0.0)
    assert [x.shape for x in jax.tree.leaves((trained.state.dense, trained.state.opt))] == [(sum(SIZES),)] * 2
    (vector,) = (x for x in dense_collectives(trained) if x[2] >= sum(SIZES))
    assert vector[:2] == ("dense_grads", "all-reduce") and vector[2] <= sum(SIZES) + 2
    assert trained.result.losses == whole.result.losses  # to the bit, as nothing but a norm would join all values
    jax.tree.map(np.testing.assert_array_equal, trained.host["dense"], whole.host["dense"])
    jax.tree.map(np.testing.assert_array_equal, trained.host["opt"], whole.host["opt"])


def test_sharded_gathers_once_scatters_once_and_holds_a_share() -> None:
    with jax.enable_x64(True):
        whole, trained = train("replicated", KIB, 8), train("sharded", 0.0, 8)
        one = train("sharded", 0.0, 1)
    leaves = jax.tree.leaves(trained.state.dense)
    shard = sum(-(-size // 8) for size in SIZES)
    assert {len(x.addressable_shards) for x in leaves} == {8}
    assert sum(x.addressable_shards[0].data.size for x in leaves) == shard
    assert dense_collectives(trained) == [
        ("dense_gather", "all-gather", 8 * shard),
        ("dense_grads", "all-reduce", 2),
        ("dense_grads", "reduce-scatter", shard),
    ]
    assert {c.group_size for c in collectives(one.compiled.as_text())} == {1}
    # parameters and Adagrad's sums, 8 bytes each
    saved = [t.compiled.memory_analysis().argument_size_in_bytes for t in (whole, trained)]
    assert saved[0] - saved[1] == 2 * 8 * (sum(SIZES) - shard)


def test_buckets_of_shards_stay_apart() -> None:
    with jax.enable_x64(True):
        found = dense_collectives(train("sharded", KIB, 3))
    count = collections.Counter((phase, kind) for phase, kind, _ in found)
    assert count.pop(("dense_grads", "all-reduce")) == 1
    assert len(count) == 2 and count["dense_gather", "all-gather"] == count["dense_grads", "reduce-scatter"] >= 2


def test_what_is_not_finite_is_counted_once() -> None:
    def bad(held: Held, bucket_mib: float) -> dict[str, int]:
        trained = train(held, bucket_mib, 8)
        first = trained.inputs[0]
        state = placed(held, bucket_mib, 8).trainer.restore(trained.host, 0)
        spoilt = StepInputs(first.dense_BxK.at[5, 1].set(np.nan), first.labels_B, first.weights_B, first.routing)
        after, metrics = placed(held, bucket_mib, 8).trainer.counting.train_step(state, spoilt)
        assert not bool(metrics["ok"]) and int(after.step) == 0
        return {name: int(metrics[name]) for name in ("bad_dense", "bad_tables", "bad_norm")}

    with jax.enable_x64(True):
        assert bad("replicated", KIB) == bad("sharded", 0.0) == bad("flat", 0.0)
        assert 0 < bad("sharded", 0.0)["bad_dense"] <= sum(SIZES)


def test_a_checkpoint_does_not_know_who_wrote_it() -> None:
    with jax.enable_x64(True):
        host = train("sharded", KIB, 3).host
        logits = []
        kinds = (
            placed("replicated", 0.0, 2),
            placed("sharded", 0.0, 8),
            placed("sharded", KIB, 3),
            placed("flat", 0.0, 3),
        )
        for other in kinds:
            state = other.trainer.restore(host, 0)
            jax.tree.map(np.testing.assert_array_equal, load(other.trainer.export(state)), host)
            prediction = other.trainer.predict_program(state, other.inputs[0])
            logits.append(np.asarray(prediction)[: make().batch_size])
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(logits[2], logits[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(logits[3], logits[0], rtol=0, atol=1e-12)
    config = RunConfig()
    changed = dataclasses.replace(config, train=TrainConfig(dense="sharded", bucket_mib=4.0))
    assert config_hash(changed, FREE_ON_RESUME) == config_hash(config, FREE_ON_RESUME)


@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4),
    devices=st.sampled_from([1, 2, 3, 8]),
)
def test_any_shape_survives_any_number_of_devices(shapes: list[tuple[int, ...]], devices: int) -> None:
    params = [np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) for shape in shapes]
    tx = DenseAdagrad().build()
    opt = jax.tree.map(np.asarray, tx.init(params))
    held = Sharded.of(params, tx, devices, 0)
    flat = held.hold(params, opt)
    assert [len(x) for x in flat[0]] == [-(-x.size // devices) * devices for x in params]
    jax.tree.map(np.testing.assert_array_equal, held.whole(*flat), (params, opt))


OPTIMIZERS = typing.get_args(typing.get_type_hints(TrainConfig)["optimizer"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_of_the_config_works_on_shards_and_on_one_vector(kind: Any) -> None:
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        rule = DenseOptax(arguments=("weight_decay=0.1",)) if kind is DenseOptax else kind(l2=0.1, weight_decay=0.1)
        tx = rule.build()
        whole = {"kernel": jnp.linspace(-1, 1, 10).reshape(2, 5)}
        held = Sharded.of(whole, tx, 3, 0)
        grads = jax.tree.map(lambda w: w + 2, whole)
        expected, _ = tx.update(grads, tx.init(whole), whole)
        shards, opt = held.hold(whole, tx.init(whole))
        updates, opt = tx.update(held.hold(grads, tx.init(whole))[0], opt, shards)
        found, _ = held.whole(updates, opt)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        whole = {"a": jnp.ones(3), "b": whole["kernel"], "c": jnp.ones(())}
        vector = Flat.of(whole, tx)
        assert vector is not None
        grads = jax.tree.map(lambda w: w + 2, whole)
        start_opt = tx.init(whole)
        jax.tree.map(np.testing.assert_array_equal, vector.whole(*vector.hold(whole, start_opt)), (whole, start_opt))
        both = vector.hold(whole, start_opt)
        assert both[0].shape == (14,)
        found = vector.whole(*tx.update(vector.hold(grads, start_opt)[0], both[1], both[0]))
        # XLA for CPUs rounds Adam's quotients otherwise in an array of another length.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-7), found, tx.update(grads, start_opt, whole)
        )


@pytest.mark.parametrize("tx", [optax.clip_by_global_norm(1.0), optax.scale_by_trust_ratio(), optax.adafactor(0.1)])
def test_an_optimizer_that_looks_at_several_values_is_refused(tx: Any) -> None:
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ConfigError, match="updates each value by itself"):
        Sharded.of({"kernel": jnp.ones((256, 256))}, tx, 2, 0)
    with jax.numpy_dtype_promotion("standard"):
        assert flattened(REPLICATED, {"kernel": jnp.ones((256, 256))}, tx, "gpu") == REPLICATED


@pytest.mark.parametrize(
    ("size", "groups"),
    [(1, [[3], [1], [0], [2]]), (5, [[3, 1], [0], [2]]), (6, [[3, 1, 0], [2]]), (100, [[3, 1, 0, 2]])],
)
def test_a_bucket_closes_when_it_is_full(size: int, groups: list[list[int]]) -> None:
    assert buckets([6, 3, 1, 2], [3, 1, 0, 2], size) == groups


def test_gradients_are_ordered_as_the_backward_pass_makes_them() -> None:
    def loss(w: dict[str, jax.Array]) -> jax.Array:  # uses c, then a, then b
        return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(w["c"]) * w["a"]) * w["b"]))

    like = {name: jax.ShapeDtypeStruct((2,), jnp.float32) for name in "abc"}
    orders = []

    def inside(x: jax.Array) -> jax.Array:
        orders.append(order_made(jax.grad(loss), like))
        return x

    mesh = mesh_of(2)
    spec = jax.sharding.PartitionSpec(("host", "device"))
    jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec), jnp.ones(2))
    assert orders == [[1, 0, 2]]  # of a, b, c
