"""The one train loop: step, log, evaluate, checkpoint, stop; and resume where a checkpoint says."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from recjax import settings
from recjax.config.run import FREE_ON_RESUME
from recjax.embedding import row_order
from recjax.embedding.routing import capacity, host
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.parallel import distributed, waiting, watchdog
from recjax.parallel.stopping import Stop
from recjax.train import evaluation, routers
from recjax.train import state as states
from recjax.train.agreement import AskedToStop, never
from recjax.train.checkpoint.array_store import size_bytes
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.due import Due
from recjax.train.finite import explain
from recjax.train.run.writers import MetricsFile, NoMetrics, Progress
from recjax.train.setup import Setup
from recjax.utils.host_memory import available_bytes
from recjax.utils.lazy_arrays import load


@dataclasses.dataclass
class Cursor:
    """Where a run is, beside its weights: what a checkpoint carries so that the run can go on.

    Attributes:
      step: steps done.
      position: global sample index of the next sample.
      capacities: sizes of the routing arrays, for one layout of the tables; see `capacity.py`.
      peaks: what the batches of this period needed of these at most.
      best_step: step with the best validation metric so far, None before the first evaluation.
      best_value: that metric.
      misses: evaluations since then.
      stopped: whether the run stopped early.
      unevaluated: whether the evaluation due at this step was broken off, as the run was asked to stop.
      end: None, or what the last step of a run did for being the last: "lines", the splits whose lines in
        metrics.jsonl are due to that, and the four attributes above as they would be without its evaluation.
    """

    step: int = 0
    position: int = 0
    capacities: dict[str, int] = dataclasses.field(default_factory=dict)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    best_step: int | None = None
    best_value: float | None = None
    misses: int = 0
    stopped: bool = False
    unevaluated: bool = False
    end: dict[str, Any] | None = None

    def extend(self) -> list[str]:
        """Lets a run that had ended here go on as if it had not: gives the splits whose lines of this step go."""
        if self.end is None:
            return []
        self.best_step, self.best_value, self.misses, self.stopped = (self.end[name] for name in _CHOICE)
        lines, self.end = self.end["lines"], None
        return list(lines)


_CHOICE = ("best_step", "best_value", "misses", "stopped")


@dataclasses.dataclass
class Outcome:
    """A finished training.

    Attributes:
      state: after the last step.
      cursor: where it ended.
      steps: that this process trained.
      compilations: training programs that this process compiled.
      samples_per_s: mean throughput of this process, without compilation, evaluation and checkpoints; None if it
        trained too few steps to know.
      asked: the signal that asked it to end early, or 0.
    """

    state: states.TrainState
    cursor: Cursor
    steps: int
    compilations: int
    samples_per_s: float | None
    asked: int = 0


class Loop:
    """Trains one run. `fit` may be called once."""

    def __init__(
        self,
        setup: Setup,
        checkpoints: Checkpoints,
        log: MetricsFile | NoMetrics,
        stop: Stop | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the parts; nothing runs yet.

        Args:
          setup: the run's fixed parts.
          checkpoints: where states go.
          log: metrics.jsonl.
          stop: whether this process has been asked to stop; all then do so after the next step, or before the next
            batch of an evaluation, with a checkpoint.
          clock: seconds, monotonic; tests pass their own.
        """
        self.setup, self.checkpoints, self.log, self.stop = setup, checkpoints, log, stop or Stop()
        train = setup.config.train
        self.samples_per_epoch = int(setup.source.row_counts("train").sum())
        self.steps_per_epoch = -(-self.samples_per_epoch // train.batch_size)
        self.total = total_steps(setup)
        self.progress = Progress(self.total, None if distributed.is_main() else open(os.devnull, "w"), clock)
        self.due = Due(train, lambda: self.progress.trained_s)
        self.eval_every = train.eval_every or self.steps_per_epoch
        self.copies: bool | None = None  # whether a save copies the tables; decided at the first one
        self.has_validation = int(setup.source.row_counts("validation").sum()) > 0

    def fit(self, state: states.TrainState, cursor: Cursor) -> Outcome:
        """Trains from `cursor` to the last step, or to an early stop.

        Raises:
          TrainingError: a step's loss or gradient was not finite, or a checkpoint cannot be written.
          DataError: all samples of a step have weight 0.
        """
        setup = self.setup
        pending: Callable[[bool], None] | None = None
        programs: set[tuple[tuple[str, int], ...]] = set()  # one compilation for each set of capacities
        first, began = cursor.position, cursor.step
        asked = self._conclude(state, cursor) if cursor.unevaluated else 0
        if asked or cursor.step >= self.total or cursor.stopped:
            self._saved()
            return Outcome(state, cursor, 0, 0, None, asked)
        with self.progress, contextlib.ExitStack() as self.starting:
            devices = setup.mesh.devices.size
            on = f" on {devices:,} devices" if devices > 1 else ""
            self.starting.enter_context(waiting.saying(f"compiling the step and running it once{on}"))
            for trained, batch, result in training(setup, state, cursor, self.stop, self.due.by_time):
                state = trained
                program = tuple(sorted(cursor.capacities.items()))
                if program not in programs:
                    programs.add(program)
                    self.progress.compiled()
                if pending:
                    pending(False)  # the metrics of the step before: this step is already under way
                pending = self._reader(cursor.step, first, cursor.position - first, result)
                first = cursor.position
                last = cursor.step == self.total
                due = cursor.step % self.eval_every == 0 or self.due.by_steps(cursor.step) or batch.save
                asked = 0 if last else batch.stop
                if last or due or asked:
                    pending(True)
                    pending = None
                    asked = self._conclude(state, cursor) or asked
                if last or asked or cursor.stopped:
                    break
        self._saved()
        rate = self.progress.mean_samples_per_s
        known = None if math.isnan(rate) else rate
        return Outcome(state, cursor, cursor.step - began, len(programs), known, 0 if cursor.stopped else asked)

    def _conclude(self, state: states.TrainState, cursor: Cursor) -> int:
        """Evaluates, if this step is one for it, and saves; the signal that broke the evaluation off, or 0."""
        last, due = cursor.step == self.total, cursor.step % self.eval_every == 0
        before = {name: getattr(cursor, name) for name in _CHOICE}
        asked = self._evaluate(state, cursor) if last or due else 0
        cursor.unevaluated = bool(asked)
        if last and not cursor.unevaluated:
            cursor.end = self._end(cursor, before, due)
        self._save(state, cursor)
        return asked

    def _reader(self, step: int, first: int, size: int, result: dict[str, jax.Array]) -> Callable[[bool], None]:
        """Reads the metrics of a step, whose samples begin at position `first`, when it is called.

        It is told whether no later step is under way.
        """

        def read(alone: bool) -> None:
            watchdog.phase("wait")
            ok = bool(result["ok"])
            self.stop.training = True
            self.starting.close()
            if not ok:
                place = _place(first, size, self.samples_per_epoch)
                if float(result["weight"]) == 0:
                    raise DataError(
                        f"step {step} has no loss: all its samples have weight 0. It covers {place}. Leave such "
                        "samples out when preparing the data, or raise train.batch_size."
                    ).in_all()
                raise TrainingError(explain(self.setup.config.train, self.setup.bound, step, place, result)).in_all()
            loss = float(result["loss"])
            self.progress.update(step, first + size, loss, alone)
            if step % self.setup.config.train.log_every == 0 or step == self.total:
                rate = self.progress.samples_per_s
                line = {"step": step, "split": "train", "loss": loss, "samples": first + size, "samples_per_s": rate}
                self.log.write(line)

        return read

    def _evaluate(self, state: states.TrainState, cursor: Cursor) -> int:
        """Evaluates and chooses; the signal that broke it off, or 0."""
        if not self.has_validation:
            return 0
        try:
            with self.progress.paused():
                result = evaluation.measure(self.setup, state, "validation", self.stop)
        except AskedToStop as asked:
            return asked.number
        self.log.write({"step": cursor.step, "split": "validation", "loss": result["logloss"], **result})
        by = self.setup.config.train.choose_by
        value = float(distributed.from_main("the measure that chooses", repr(float(result[by]))))  # to the last bit
        if math.isnan(value):
            self.progress.note(
                f"step {cursor.step:,}: the validation {by} has no value (are all labels equal?), so it chooses nothing"
            )
            return 0
        better = cursor.best_value is None or (value > cursor.best_value if by == "auc" else value < cursor.best_value)
        if better:
            cursor.best_step, cursor.best_value, cursor.misses = cursor.step, value, 0
        else:
            cursor.misses += 1
            cursor.stopped = 0 < self.setup.config.train.patience <= cursor.misses
        text = f"step {cursor.step:,}: validation AUC {result['auc']:.4f}, log loss {result['logloss']:.4f}"
        self.progress.note(text + (", best so far" if better else "") + (", stopping early" if cursor.stopped else ""))
        return 0

    def _end(self, cursor: Cursor, before: dict[str, Any], due: bool) -> dict[str, Any]:
        """`Cursor.end` of a run that ends now; `before` is its choice before the evaluation, if that was not `due`."""
        lines = [] if due else ["validation"]
        if cursor.step % self.setup.config.train.log_every:
            lines.append("train")
        choice = {name: getattr(cursor, name) for name in _CHOICE} if due else before
        return {"lines": lines, **choice}

    def _save(self, state: states.TrainState, cursor: Cursor) -> None:
        # A run that is extended forgets an evaluation that was only due to its end, so the best before it stays too.
        best = cursor.end["best_step"] if cursor.end else cursor.best_step
        with self.progress.paused(), watchdog.during("checkpoint"):
            self.checkpoints.wait()  # its arrays go first: the host never holds two copies of the tables
            arrays = states.export(state, self.setup.bound, self.setup.dense)
            if self.copies is None:
                self.copies = self._copies(size_bytes(arrays))
            if self.copies:
                arrays = load(arrays)
            self.checkpoints.save(cursor.step, arrays, meta=describe(self.setup, cursor), pinned=best)
            if not self.copies:
                self.checkpoints.wait_for_arrays()  # they are the devices' own, which the next step changes
        self.due.saved()

    def _saved(self) -> None:
        with watchdog.during("checkpoint"):
            self.checkpoints.wait()

    def _copies(self, needed_bytes: int) -> bool:
        """Whether checkpoints are written from a copy in host memory, while training goes on."""
        choice, left = self.setup.config.train.checkpoint_copy, available_bytes()
        if choice != "auto":
            return choice == "always"
        if left is not None and needed_bytes <= left / 2:
            return True
        self.progress.note(
            f"checkpoints ({needed_bytes / 2**30:.1f} GiB) are written straight from the devices while training waits: "
            f"a copy would take more than half of the {(left or 0) / 2**30:.1f} GiB of memory that are available "
            "(train.checkpoint_copy)"
        )
        return False


def training(
    setup: Setup,
    state: states.TrainState,
    cursor: Cursor,
    stop: Callable[[], int] = never,
    save: Callable[[], int] = never,
) -> Iterator[tuple[states.TrainState, host.Counted, dict[str, jax.Array]]]:
    """The steps of a training from `cursor` on, which moves along; it never ends.

    What a step needs is read and counted ahead by worker threads, laid out and sent off; its results are not awaited.
    `stop` and `save` are asked before each step; what any process's says, `Counted.stop` and `save` of that step's
    batch say in all.
    In a profile the host's part of a step is called input, place (with route in it) and dispatch.

    Yields:
      The state after each step, which the next step takes; the step's batch; its metrics, see `make_train_step`.
    """
    train = setup.config.train
    stream = counted(setup, cursor.position, stop, save)
    samples = int(setup.source.row_counts("train").sum())

    def sizes(needs: Sequence[dict[str, int]]) -> dict[str, int]:
        found = cursor.capacities, cursor.peaks
        for step, needed in enumerate(needs, cursor.step):
            found = capacity.advance(step, *found, needed)
        return found[0]

    for begun in routers.ahead(setup.router, stream, sizes):
        cursor.capacities, cursor.peaks = capacity.advance(cursor.step, cursor.capacities, cursor.peaks, begun.needs)
        watchdog.phase("dispatch")
        with jax.profiler.TraceAnnotation("place"):
            inputs = setup.router.finish(begun, cursor.capacities)
        with jax.profiler.TraceAnnotation("dispatch"):
            state, result = setup.train_step(state, inputs)
            cursor.step += 1
            if setup.averages and cursor.step % train.average_every == 0:
                state = setup.averaged(state)
        cursor.position += min(train.batch_size, samples - cursor.position % samples)
        yield state, begun.counted, result


def counted(
    setup: Setup, position: int = 0, stop: Callable[[], int] = never, save: Callable[[], int] = never
) -> Iterator[host.Counted]:
    """The counted batches of a training from a sample on, without end; `stop` and `save` as for `Setup.counted`."""
    train = setup.config.train
    return setup.counted(
        "train",
        train.batch_size,
        parts=train.accumulate,
        seed=setup.config.seed,
        shuffle=train.shuffle,
        shuffle_blocks=train.shuffle_blocks,
        position=position,
        stop=stop,
        save=save,
    )


def total_steps(setup: Setup) -> int:
    """Steps of a whole run: `train.steps`, or as many as `train.epochs` hold."""
    train = setup.config.train
    samples = int(setup.source.row_counts("train").sum())
    return train.steps or train.epochs * -(-samples // train.batch_size)


def describe(setup: Setup, cursor: Cursor) -> dict[str, Any]:
    """What a checkpoint says of itself, beside its arrays."""
    bound, groups = setup.bound, setup.bound.groups
    layout = {"devices": bound.devices, "groups": {g.name: [t.spec.name for t in g.tables] for g in groups}}
    if bound.hosts > 1:
        layout["hosts"] = bound.hosts
    if bound.replicas > 1:
        layout["replicas"] = bound.replicas
    return {
        "cursor": dataclasses.asdict(cursor),
        "config_hash": settings.config_hash(setup.config, ignore=FREE_ON_RESUME),
        "row_order": row_order.NAME,
        "layout": layout,
        "tables": {
            table.spec.name: {
                "rows": table.spec.rows,
                "dim": table.spec.dim,
                "optimizer": table.spec.optimizer.kind,
                "slots": sorted(group.slots()),
            }
            for group in groups
            for table in group.tables
        },
        "data": setup.source.fingerprint,
    }


def resume(setup: Setup, restored: Restored) -> tuple[states.TrainState, Cursor]:
    """The state and cursor that a checkpoint holds, on the present mesh and plan.

    Raises:
      ConfigError: the checkpoint was written by a run of another config.
      DataError: the data have changed since.
      TrainingError: it stores rows in an order that this version does not know.
    """
    meta, place = restored.meta, f"checkpoint {restored.step}"
    now = describe(setup, Cursor())
    if meta["data"] != now["data"]:
        raise DataError(
            f"{place} was trained on data with fingerprint {meta['data'][:12]}, but the data now have "
            f"{now['data'][:12]}. Point data.path at the data it was trained on, or start anew in another --out."
        )
    if meta["config_hash"] != now["config_hash"]:
        raise ConfigError(
            f"{place} was written by a run of config {meta['config_hash']}, but this is {now['config_hash']}. "
            "Use the config.json beside it, or start anew in another --out."
        )
    if meta["row_order"] != row_order.NAME:
        raise TrainingError(
            f"{place} stores rows in the order {meta['row_order']!r}, but this version of recjax knows "
            f"{row_order.NAME!r}. Resume it with the version that wrote it."
        )
    cursor = Cursor(**meta["cursor"])
    if meta.get("layout") != now["layout"]:
        cursor.capacities, cursor.peaks = {}, {}  # those of fewer devices or other groups would pad every exchange
    return setup.saved_state(restored), cursor


def _place(first: int, size: int, samples_per_epoch: int) -> str:
    epoch, offset = divmod(first, samples_per_epoch)
    return f"samples {offset} to {offset + size - 1} in the order of epoch {epoch}"
