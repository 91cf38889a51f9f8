"""Whole trainings by the public parts (config, plan file, `build_trainer`, the loop, export), and the dense oracle's.

One model holds a table for each optimizer, so that a placement is one program. Data lie in memory: each lookup reads a
data feature of its own, of fixed or jagged bags, weighted or not. What lookups and bags are like is `Content`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from recjax.config.run import EmbeddingConfig, FeatureConfig, RunConfig, TableConfig
from recjax.config.train import DenseAdagrad, Polynomial, TrainConfig
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.embedding.optim import Adagrad, Adam, Ftrl, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.row_order import RowOrder
from recjax.embedding.spec import Pooling
from recjax.parallel.mesh import MeshConfig
from recjax.settings.values import Named
from recjax.train import loop
from recjax.train.build import build_trainer
from recjax.train.progress import TrainProgress
from recjax.train.run.writers import NoMetrics
from recjax.train.step import StepOptions
from recjax.train.step_log import StepLog
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load
from support import contract
from support.problems import Problem, Result, run_oracle

STEPS, B, V = 5, 21, 31
LAST = 13  # samples of the last batch: on many devices some have none
UNNAMED = 4  # rows that no batch names, the last ones
OPTIMIZERS: dict[str, Any] = {
    "sgd": Sgd(0.5, l2=0.01),
    "nesterov": Sgd(0.5, momentum=0.8, nesterov=True, weight_decay=0.1),
    "adagrad": Adagrad(0.2, l2=0.01),
    "rowwise_adagrad": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "adam": Adam(0.05, weight_decay=0.1),
    "partial_rowwise_adam": PartialRowWiseAdam(0.05, l2=0.01),
    "ftrl": Ftrl(0.5, l1=1e-4, l2=0.1),
    "rowwise_adagrad_every_row": RowWiseAdagrad(0.2, l2=0.01, every_row=True),
    "adam_every_row": Adam(0.05, l2=0.01, every_row=True),
}
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "none")
KINDS: tuple[tuple[int | None, bool], ...] = ((1, False), (None, True), (3, True), (None, False))  # bag, weighted


@dataclasses.dataclass(frozen=True)
class NetConfig(contract.Net):
    """The small model of support/contract.py, which takes sequences too."""

    sequences: ClassVar[bool] = True


def net_logits(params: Mapping[str, Any], columns: Sequence[Any]) -> Any:
    """What that model makes of pooled lookups, written out: dense features first, then the lookups in their order."""
    hidden = jnp.tanh(jnp.concatenate(columns, axis=1) @ params["hidden.kernel.value"] + params["hidden.bias.value"])
    return (hidden @ params["out.kernel.value"] + params["out.bias.value"])[:, 0]


@dataclasses.dataclass(frozen=True)
class NetRun(RunConfig):
    """A run of that model."""

    model: NetConfig = NetConfig()


@dataclasses.dataclass(frozen=True)
class Content:
    """What a training reads.

    Attributes:
      turn: which pooling and which kind of bag each lookup has; of twelve turns each lookup meets each pair once.
      seed: of all numbers.
      lengths: how long jagged bags of each step but the first are.
      ids: which ids such a step names.
    """

    turn: int
    seed: int = 0
    lengths: tuple[str, ...] = ("some",) * (STEPS - 1)
    ids: tuple[str, ...] = ("skewed",) * (STEPS - 1)


def contents(turn: int) -> st.SearchStrategy[Content]:
    """The first drawn is plain; others have steps of empty bags, of long ones, of one id, of ids of no order."""
    steps = STEPS - 1
    return st.builds(
        Content,
        st.just(turn),
        st.integers(0, 2**16),
        st.tuples(*[st.sampled_from(("some", "none", "long", "one bag"))] * steps),
        st.tuples(*[st.sampled_from(("skewed", "any", "one"))] * steps),
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """A source of rows in memory, of which a block is a batch of the training: the first one says how long bags are."""

    schema: Schema
    blocks: tuple[Batch, ...]
    name: ClassVar[str] = "rows in memory"
    fingerprint: ClassVar[str] = "rows in memory"

    def row_counts(self, split: str) -> np.ndarray:
        """See `BlockSource`."""
        return np.array([block.size for block in self.blocks if split == "train"], np.int64)

    def read(self, split: str, index: int) -> Batch:
        """See `BlockSource`."""
        assert split == "train"
        return self.blocks[index]


class Lookup(NamedTuple):
    """A lookup, and the data feature of its own that it reads."""

    table: str
    pooling: Pooling
    bag: int | None
    weighted: bool


@functools.cache
def lookups(content: Content) -> dict[str, Lookup]:
    """All lookups by name: one of each table, which has its name, and one more of every third.

    They are twelve, one of each pooling and kind of bag.
    """
    tables = {name: name for name in OPTIMIZERS}
    tables |= {f"{name}.more": name for number, name in enumerate(OPTIMIZERS) if (number + content.turn) % 3 == 0}
    by_name = {}
    for number, name in enumerate(sorted(tables), content.turn):
        bag, weighted = KINDS[number % len(KINDS)]
        by_name[name] = Lookup(tables[name], POOLINGS[number % len(POOLINGS)], bag, weighted)
    return by_name


def _bags(rng: np.random.Generator, size: int, lookup: Lookup, lengths: str, ids: str) -> Bags:
    lengths_B = None
    if lookup.bag is None:
        lengths_B = {
            "some": rng.integers(0, 4, size),
            "none": np.zeros(size),
            "long": np.full(size, 3),
            "one bag": 5 * (np.arange(size) == rng.integers(size)),
        }[lengths].astype(np.int32)
    shape = (size, lookup.bag) if lookup.bag is not None else (int(lengths_B.sum()),)
    drawn = {"skewed": rng.random(shape) ** 2, "any": rng.random(shape), "one": np.full(shape, rng.random())}[ids]
    weights = rng.uniform(0.5, 1.5, shape).astype(np.float32) if lookup.weighted else None
    return Bags((drawn * (V - UNNAMED)).astype(np.int64), lengths_B, weights)


@functools.cache
def source_of(content: Content) -> Rows:
    """`STEPS` batches, of which the first depends on the turn alone and the last is short. Some samples weigh 0."""
    kinds, blocks = lookups(content), []
    laws = zip(("some", *content.lengths), ("any", *content.ids), strict=True)
    for step, (lengths, ids) in enumerate(laws):
        rng = np.random.default_rng((step, content.seed if step else 0))
        size = B if step < STEPS - 1 else LAST
        bags = {name: _bags(rng, size, lookup, lengths, ids) for name, lookup in kinds.items()}
        labels, weights = (rng.random(size) < 0.4).astype(np.float32), rng.integers(0, 3, size).astype(np.float32)
        weights[0] = 1
        blocks.append(Batch(rng.normal(size=(size, 2)).astype(np.float32), bags, labels, weights, B * step))
    features = tuple(Feature(name, V, lookup.bag, lookup.weighted) for name, lookup in kinds.items())
    return Rows(Schema(("x", "y"), features), tuple(blocks))


SCHEDULE = Polynomial(warmup_steps=2, decay_start=3, decay_steps=4, end=0.1)
TRAIN = TrainConfig(
    batch_size=B,
    steps=STEPS,
    optimizer=DenseAdagrad(0.1, l2=0.01, weight_decay=0.1),
    schedule=SCHEDULE,
    clip_norm=0.4,
    shuffle=False,
    log_every=1,
    workers=1,
)


def dim_of(table: str) -> int:
    """Columns of a table: two widths, neither of which most numbers of devices divide."""
    return (5, 3)[list(OPTIMIZERS).index(table) % 2]


@functools.cache
def config_of(content: Content) -> NetRun:
    """The run on one device, in float64."""
    tables = {name: TableConfig(dim=dim_of(name), optimizer=rule) for name, rule in OPTIMIZERS.items()}
    features = {
        name: FeatureConfig(lookup.pooling, None if name == lookup.table else lookup.table)
        for name, lookup in lookups(content).items()
    }
    embedding = EmbeddingConfig(tables=Named(tables), features=Named(features))
    return NetRun(embedding=embedding, train=TRAIN, mesh=MeshConfig(1), plan="row_wise", compute_dtype="float64")


@dataclasses.dataclass
class Trained:
    """What a training left.

    Attributes:
      losses: of all steps.
      of_tasks: label -> its losses of all steps.
      arrays: as a checkpoint holds them, in host memory.
      sizes: of its routing arrays.
      trainer: of it.
    """

    losses: list[float]
    of_tasks: dict[str, list[float]]
    arrays: dict[str, Any]
    sizes: dict[str, int]
    trainer: Trainer

    def result(self) -> Result:
        """Tables in row order, and parameters, as the oracle has them."""
        tables, _ = specs(self.trainer.config, self.trainer.source.schema)
        held = self.arrays["tables"]
        by_row = {
            t.name: {key: x[RowOrder(t.rows).position(np.arange(t.rows))] for key, x in held[t.name].items()}
            for t in tables
        }
        return Result(self.losses, by_row, self.arrays["dense"] | self.arrays.get("module", {}))


def in_row_order(tables: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """Rows and slots of tables as a checkpoint has them, by row."""
    orders = {name: RowOrder(len(arrays["rows"])) for name, arrays in tables.items()}
    return {
        name: {key: x[orders[name].position(np.arange(len(x)))] for key, x in arrays.items()}
        for name, arrays in tables.items()
    }


class _Lines(NoMetrics):
    """In place of metrics.jsonl."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []

    def write(self, line: Mapping[str, object]) -> None:
        """Keeps the line."""
        self.lines.append(line)


def train(
    config: RunConfig,
    source: Rows,
    start: Mapping[str, Any] | None = None,
    step: int = 0,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Trained:
    """Trains as a run does, to `train.steps`, from the initial state or from what a training left after `step` steps.

    With the `sizes` of arrays that another training of this plan ended with, the programs are the same.
    """
    trainer, lines = build_trainer(config, source), _Lines()
    state = trainer.init_state() if start is None else trainer.restore(dict(start), step)
    epochs, rest = divmod(step, trainer.steps_per_epoch)
    position = epochs * trainer.samples_per_epoch + rest * config.train.batch_size
    progress = TrainProgress(step, position, dict(sizes))
    state = loop.fit(trainer, state, progress, StepLog(trainer, lines)).state
    arrays = load(trainer.export(state))
    state.host.close()
    of_tasks = {task.name: [line[f"{task.name}.loss"] for line in lines.lines] for task in trainer.tasks}
    return Trained([line["loss"] for line in lines.lines], of_tasks, arrays, progress.capacities, trainer)


@functools.cache
def new_weights(content: Content) -> dict[str, Any]:
    """The state before the first step, by one device: to make it on each mesh takes compiling as long as a step."""
    trainer = build_trainer(config_of(content), source_of(content))
    return load(trainer.export(trainer.init_state()))


def problem_of(config: RunConfig, source: Rows, **more: Any) -> Problem:
    """The same training for the oracle."""
    tables, features = specs(config, source.schema)
    train = config.train
    return Problem(
        [source.blocks[step % len(source.blocks)] for step in range(train.steps)],
        train.batch_size,
        tables,
        features,
        config.model,
        len(source.schema.dense),
        train.optimizer.build(),
        config.seed,
        StepOptions(train.clip_norm, schedule=train.schedule.factor),
        **more,
    )


@functools.cache
def truth_of(content: Content) -> Result:
    """The oracle's training."""
    with jax.enable_x64(True):
        return run_oracle(problem_of(config_of(content), source_of(content)), np.float64)


def write_plan(plan: Plan, folder: Path) -> str:
    """Writes a plan file; gives what `plan` of a config is then."""
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    return str(path)
