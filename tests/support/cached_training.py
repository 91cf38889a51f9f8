"""Trainings with rows on the host: batches whose rows go and come back, all optimizers, and what a run ends with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np

from recjax.config.run import TierConfig
from recjax.config.train import DenseAdagrad
from recjax.data.batch import Bags, Batch
from recjax.embedding.optim import Adagrad, Adam, Ftrl, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.tiers.stage import homes_by_owner
from recjax.train.inputs import InputStream
from recjax.train.state import HostState, TrainState
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load
from support.contract import OPTIONS, Net
from support.problems import Problem, trainer_of

B, V, D, STEPS = 12, 600, 4, 50
OPTIMIZERS: dict[str, Any] = {
    "adagrad": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "elements": Adagrad(0.2),
    "momentum": Sgd(0.5, momentum=0.9, nesterov=True),
    "adam": Adam(0.05),
    "partial": PartialRowWiseAdam(0.05),
    "ftrl": Ftrl(0.1, l1=0.001),
}
DATA = {"one": (1, False), "three": (3, True), "jagged": (None, False)}
POOLINGS = ("sum", "mean", "none")


def make_batch(step: int, rows: int = V) -> Batch:
    """Ids around a place that moves on, so that rows go and some come back; and some that are anywhere."""
    rng = np.random.default_rng(step)
    bags = {}
    for name, (bag, weighted) in DATA.items():
        lengths = rng.integers(0, 4, B).astype(np.int32)
        shape = (B, bag) if bag is not None else (int(lengths.sum()),)
        near, anywhere = (rng.integers(0, 30, shape) + step % 9 * 25) % rows, rng.integers(0, rows, shape)
        ids = np.where(rng.random(shape) < 0.8, near, anywhere)
        bags[name] = Bags(
            ids, lengths if bag is None else None, rng.uniform(0.5, 1.5, shape).astype(np.float32) if weighted else None
        )
    labels, weights = (rng.random(B) < 0.4).astype(np.float32), rng.integers(0, 3, B).astype(np.float32)
    return Batch(rng.normal(size=(B, 2)).astype(np.float32), bags, labels, weights)


@functools.cache
def make(names: tuple[str, ...], reduced: bool = False, rows: int = V) -> Problem:
    """With `reduced` the first table is bfloat16, rounded at random."""
    tables, features = [], []
    for k, name in enumerate(names):
        dtype: Any = "bfloat16" if reduced and not k else "float32"
        tables.append(TableSpec(name, rows + 7 * k, D, OPTIMIZERS[name], dtype=dtype))
        for j, (source, (bag, weighted)) in enumerate(DATA.items()):
            if j != k % 3:
                how = POOLINGS[(k + j) % 3]
                features.append(FeatureSpec(f"{name} {source}", name, bag, how, weighted, source))  # type: ignore[arg-type]
    batches, tx = [make_batch(step, rows) for step in range(STEPS)], DenseAdagrad(0.1).build()
    return Problem(batches, B, tuple(tables), tuple(features), Net(), 2, tx, options=OPTIONS)


def stream_of(problem: Problem, trainer: Trainer, host: HostState, first: int = 0) -> InputStream:
    routed = [trainer.route(batch, B) for batch in problem.batches]
    stream = InputStream(lambda p: iter(routed[p // B :]), trainer.router, B, B * STEPS, None, trainer.stages(host))
    largest = {
        name: max(batch.routed.required_capacities[name] for batch in routed)
        for name in routed[0].routed.required_capacities
    }
    stream.load_state_dict({"position": first * B, "capacities": largest, "peaks": {}})
    return stream


def trained(
    problem: Problem, trainer: Trainer, state: TrainState, first: int, last: int
) -> tuple[TrainState, list[bytes]]:
    losses = []
    stream = stream_of(problem, trainer, state.host, first)
    for _ in range(last - first):
        inputs = next(stream)
        state = trainer.admit(state, stream.latest)
        state, metrics = trainer.train_step(state, inputs)
        assert bool(metrics["ok"])
        losses.append(np.asarray(metrics["loss"]).tobytes())
    return state, losses


def bits(arrays: Any) -> Any:
    return jax.tree.map(np.ndarray.tobytes, load(arrays))


def in_order(saved: Any) -> Any:
    """The bits of a checkpoint, its written rows by position."""
    for of in saved["written"].values():
        order = np.argsort(of["positions"])
        of |= {name: x[order] for name, x in of.items() if name not in ("table", "initial")}
    return bits(saved)


@functools.cache
def whole(names: tuple[str, ...], devices: int, reduced: bool, plan: str, rows: int = V) -> tuple[Any, Any, Any]:
    """The bits of a training with all rows on the devices: its losses, its middle and its end."""
    problem = make(names, reduced, rows)
    trainer = trainer_of(problem, devices, plan)
    state, before = trained(problem, trainer, trainer.init_state(), 0, STEPS // 2)
    middle = load(trainer.export(state))
    state, after = trained(problem, trainer, state, STEPS // 2, STEPS)
    return before + after, middle, bits(trainer.export(state))


def ends(problem: Problem, trainer: Trainer, start: TrainState | None = None, steps: int = 20) -> tuple[Any, ...]:
    """The bits of the losses of some steps, of all arrays after them, and of predictions then."""
    state, losses = trained(problem, trainer, start or trainer.init_state(), 0, steps)
    logits = [found for _, found in trainer.predict(state, trainer.inputs_of(problem.batches[:3], B, state.host))]
    return losses, bits(trainer.export(state)), [found.tobytes() for found in logits]


def with_rows(problem: Problem, devices: int, share: float, plan: str | Plan = "row_wise", **host: Any) -> Trainer:
    """A trainer of which each cache holds a share of its rows, and at least as few as two batches ask for."""
    trainer = trainer_of(problem, devices, plan)
    whole = {g.name: dataclasses.replace(g, homes=g.rows) for g in trainer.bound.groups if g.spread}
    bound, rows = trainer.bound.with_groups(whole), {}
    homes = [homes_by_owner(bound, trainer.route(batch, B).routed) for batch in problem.batches]
    for name, group in whole.items():
        pairs = (
            np.union1d(*owners) for a, b in itertools.pairwise(homes) for owners in zip(a[name], b[name], strict=True)
        )
        rows[name] = max(math.ceil(share * group.rows), *map(len, pairs))
    bound = bound.with_groups({name: dataclasses.replace(group, rows=rows[name]) for name, group in whole.items()})
    config = dataclasses.replace(trainer.config, tier=TierConfig(1, **host))
    return dataclasses.replace(trainer, bound=bound, config=config)
