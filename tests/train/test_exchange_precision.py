"""Reduced precision on the way between devices: each direction is rounded as it says, and the other one is not.

The oracle rounds what travels: the looked-up vectors forward, their gradients backward. Each device names a row once
at most, so that a gradient that travels is that of one sample, and samples weigh 1 by a power of two, so that to divide
by the weights does not change how a number is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.exactness import NetRun, Rows, net_logits, problem_of, train, write_plan
from support.problems import Result, compare, run_oracle

from recjax.config.run import EmbeddingConfig
from recjax.config.train import DenseSgd, TrainConfig
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, Segment
from recjax.parallel.mesh import MeshConfig
from recjax.planning.compiled_collectives import collectives

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs]

B, V, D, STEPS = 16, 20, 6, 2
WIRE = {"float32": "f32", "bfloat16": "u16", "int8": "u8"}
BAGS = {"rows": 1, "columns": 1, "vectors": 2}  # ids a bag of each table's feature; a table that is pooled sends sums


def to_bfloat16(x: Any) -> Any:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def to_int8(x: Any) -> Any:
    """The nearest of 256 values from the smallest to the largest of a row."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = jnp.where(high > low, high - low, 1) / 255
    return low + jnp.round((x - low) / step) * step


def by_halves(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of a table whose columns lie on two devices, each of which sends its own."""
    return lambda x: jnp.concatenate([rounded(x[..., : D // 2]), rounded(x[..., D // 2 :])], axis=-1)


ROUNDED: dict[str, Callable[[Any], Any]] = {"float32": lambda x: x, "bfloat16": to_bfloat16, "int8": to_int8}


def travelled(x: Any, forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Any:
    """X after the way forth, whose gradient comes back by the way back."""

    @jax.custom_vjp
    def way(x: Any) -> Any:
        return forward(x)

    way.defvjp(lambda x: (forward(x), None), lambda _, gradient: (backward(gradient),))
    return way(x)


def source() -> Rows:
    blocks = []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        halves = [rng.permutation(V) for _ in range(2 * len(BAGS))]
        ids = {name: np.concatenate([halves.pop()[: B // 2 * bag] for _ in range(2)]) for name, bag in BAGS.items()}
        ids["vectors"] = rng.integers(0, V, (B, 2))  # of which sums travel, whoever names a row
        bags = {name: Bags(ids[name].reshape(B, bag)) for name, bag in BAGS.items()}
        labels = (rng.random(B) < 0.5).astype(np.float32)
        dense = rng.normal(size=(B, 2)).astype(np.float32)
        blocks.append(Batch(dense, bags, labels, np.ones(B, np.float32), B * step))
    features = tuple(Feature(name, V, bag) for name, bag in BAGS.items())
    return Rows(Schema(("x", "y"), features), tuple(blocks))


def config_of(forward: Any, backward: Any, folder: Path) -> NetRun:
    rows, vectors = (Exchange(forward, backward, kind) for kind in ("rows", "pooled"))
    plan = {"rows": Segment("row_wise", exchange=rows), "columns": Segment("column_wise", exchange=rows)}
    plan["vectors"] = Segment("table_wise", owners=0, exchange=vectors)
    return NetRun(
        embedding=EmbeddingConfig(dim=D, optimizer=Sgd(1.0), init_scale=1.0),
        train=TrainConfig(B, steps=STEPS, optimizer=DenseSgd(0.1), shuffle=False, log_every=1, workers=1),
        mesh=MeshConfig(2),
        plan=write_plan(Plan({name: (segment,) for name, segment in plan.items()}), folder),
    )


def truth(config: NetRun, forward: str, backward: str) -> Result:
    """The oracle, in float32 as the run is: what is nearly halfway between two numbers is rounded alike."""
    ways = {"vectors": (ROUNDED[forward], ROUNDED[backward]), "rows": (ROUNDED[forward], ROUNDED[backward])}
    ways["columns"] = by_halves(ROUNDED[forward]), by_halves(ROUNDED[backward])

    def loss(params: Any, kept: Any, x: Any, looked_up: Any, y: Any, w: Any, step: Any) -> Any:
        z = net_logits(params, [x, *(travelled(looked_up[name], *ways[name]) for name in BAGS)])
        return jnp.sum(w * (jnp.logaddexp(0, z) - y * z)) / jnp.sum(w), (kept, [])

    with jax.numpy_rank_promotion("allow"):
        return run_oracle(problem_of(config, source(), truth=loss), np.float32)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("int8", "bfloat16"), ("float32", "int8")],
)
def test_each_direction_is_rounded_as_it_says(forward: str, backward: str, tmp_path: Path) -> None:
    config = config_of(forward, backward, tmp_path)
    trained = train(config, source())
    expected = truth(config, forward, backward)
    compare(trained.result(), expected, loss_rtol=2e-6, atol=2e-6)
    for other in sorted({(forward, "float32"), ("float32", backward), (backward, forward)} - {(forward, backward)}):
        elsewhere = truth(config, *other)
        for name in BAGS:  # so that each table shows which of them it was
            apart = np.abs(expected.tables[name]["rows"] - elsewhere.tables[name]["rows"]).max()
            assert apart > 1e-5, (name, other, apart)
    trainer = trained.trainer
    program = trainer.step_program.lower(trainer.init_state(), trainer.first_inputs(trained.sizes)).compile()
    sent = {c.phase: c.shapes[0][0] for c in collectives(program.as_text() or "") if c.kind == "all-to-all"}
    assert {phase: kind for phase, kind in sent.items() if phase != "id_exchange"} == {
        "row_exchange": WIRE[forward],
        "pooled_exchange": WIRE[forward],
        "grad_exchange": WIRE[backward],
        "pooled_grad_exchange": WIRE[backward],
    }
