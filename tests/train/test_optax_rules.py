"""Optimizers and schedules of optax by name: the same numbers as optax's own, and what is said of wrong names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.commands import inside, lines_of

from recjax.config.optax_rules import DenseOptax, OptaxSchedule
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.settings import from_json, override, to_json

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it() -> Iterator[None]:
    """The tests are stricter than optax's own code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


RATES = ["name=lion", "learning_rate=0.1", "arguments=b1=0.8,weight_decay=0.01"]
CONTRIB = optax.contrib
MOMENTUM = ["name=sgd", "learning_rate=0.5", "arguments=momentum=0.9,nesterov=true"]


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (RATES, lambda: optax.lion(0.1, 0.8, weight_decay=0.01)),
        (MOMENTUM, lambda: optax.sgd(0.5, 0.9, True)),
        (["name=lamb"], lambda: optax.lamb(1e-3)),
        (["name=nadam"], lambda: optax.nadam(1e-3)),
        (["name=muon", "learning_rate=0.01"], lambda: CONTRIB.muon(0.01)),
        (
            ["name=prodigy", "learning_rate=1", "arguments=weight_decay=0.1"],
            lambda: CONTRIB.prodigy(1, weight_decay=0.1),
        ),
    ],
)
def test_an_optimizer_of_optax(settings: list[str], theirs: Any) -> None:
    chosen = ["train.optimizer=optax", *(f"train.optimizer.{text}" for text in settings)]
    config = override(RunConfig(), chosen)
    assert from_json(RunConfig, to_json(config)) == config
    tx, rng = config.train.optimizer.build(), np.random.default_rng(0)
    ours = other = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    state, its_state = tx.init(ours), theirs().init(other)
    for _ in range(3):
        grads = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
        step, state = tx.update(grads, state, ours)
        its_step, its_state = theirs().update(grads, its_state, other)
        ours, other = optax.apply_updates(ours, step), optax.apply_updates(other, its_step)
    np.testing.assert_array_equal(ours["w"], other["w"])


def test_a_schedule_of_optax() -> None:
    text = "train.schedule.arguments=init_value=1,boundaries_and_scales=10:0.5;20:0.1"
    config = override(RunConfig(), ["train.schedule=optax", "train.schedule.name=piecewise_constant_schedule", text])
    found = [float(config.train.schedule.factor(jnp.int32(step))) for step in (0, 9, 15, 25)]
    assert found == pytest.approx([1, 1, 0.5, 0.05])
    cosine = override(RunConfig(), ["train.schedule=optax"]).train.schedule
    assert float(jax.jit(cosine.factor)(jnp.int32(5000))) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DenseOptax("lino"), r"train\.optimizer\.name=lino: optax .* Did you mean lion"),
        (lambda: DenseOptax("adam", arguments=("beta1=0.9",)), r"optax\.adam takes no 'beta1'.*b1"),
        (lambda: DenseOptax("adam", arguments=("learning_rate=1",)), r"of its own: train\.optimizer\.learning_rate"),
        (lambda: DenseOptax("adam", arguments=("b1",)), r"'b1' is not NAME=VALUE"),
        (lambda: DenseOptax("moun"), r"Did you mean muon"),
        (lambda: DenseOptax("muon", arguments=("momentum=0.9",)), r"optax\.contrib\.muon takes no 'momentum'"),
        (lambda: DenseOptax("schedule_free_adamw"), r"evaluates other parameters than it trains"),
        (lambda: DenseOptax("momo").build(), r"name=momo cannot be used here"),
        (lambda: DenseOptax("lbfgs").build(), r"name=lbfgs cannot be used here.*gradients and parameters"),
        (lambda: DenseOptax("adam", arguments=("b1=x",)).build(), "cannot be used here|refuses"),
        (lambda: OptaxSchedule("cosine_decay"), r"Did you mean cosine_decay_schedule"),
        (lambda: OptaxSchedule("linear_schedule", ("init_value=1",)), r"also needs end_value, transition_steps"),
        (lambda: OptaxSchedule("scale_by_schedule", ()), "has none of that name"),
    ],
)
def test_what_optax_does_not_have(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.full
def test_a_run_with_optax(tmp_path: Any) -> None:
    how = (
        "train",
        "synthetic",
        "data.rows=50,30",
        "data.train_rows=1280",
        "data.validation_rows=200",
        "data.test_rows=200",
        "train.batch_size=128",
        "model.bottom=8,16",
        "model.top=8,1",
        "train.optimizer=optax",
        "train.log_every=1",
        "train.optimizer.name=radam",
        "train.schedule=optax",
        "train.schedule.arguments=init_value=1,decay_steps=9",
        "train.epochs=1",
        "compute_dtype=float64",
    )
    assert inside(*how, "mesh.devices=2", "--out", tmp_path / "a").status == 0
    assert inside(*how, "mesh.devices=3", "train.steps=4", "--out", tmp_path / "b").status == 0
    assert inside(*how, "mesh.devices=1", "train.dense=sharded", "--out", tmp_path / "b").status == 0
    losses = [[line["loss"] for line in lines_of(tmp_path / name, "train")] for name in "ab"]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    refused = inside(
        *how, "mesh.devices=2", "train.dense=sharded", "train.optimizer.name=lamb", "--out", tmp_path / "c"
    )
    assert refused.status == 2 and "looks at others" in refused.err
    refused = inside(
        *how, "mesh.devices=2", "train.dense=sharded", "train.optimizer.name=muon", "--out", tmp_path / "d"
    )
    assert refused.status == 2 and "looks at others" in refused.err  # a matrix has other state than a vector
