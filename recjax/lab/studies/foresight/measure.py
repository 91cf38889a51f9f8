"""Steps of configs, predicted in some ways and measured for a short time, one config alone or some by turns."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.config.run import RunConfig
from recjax.lab.bench.machine_load import Others
from recjax.lab.predict.in_training import References
from recjax.lab.predict.prediction import predicted_of
from recjax.lab.predict.stepping import Stepping
from recjax.planning.costs import Costs
from recjax.planning.machine import Machine, Quantity
from recjax.planning.planner import Planner, exact_sizes
from recjax.planning.predict import Prediction, outside, predict
from recjax.planning.schedule import node_cost
from recjax.train.build import build_trainer
from recjax.train.planned import question
from recjax.train.trainer import Trainer

_WARM = 4  # steps that compile and fill the pipeline
_TURNS = 2  # in which a step is measured, the references before, between and after them
_FEWEST = 5  # steps of a turn
_LEAST = 1e-6  # us, of an overhead that is left out


def foreseen(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Predicted times of a step, ms.

    Returns:
      "step_ms" in full; "cpu_ms" of all threads and devices, where they share cores; "kernels_ms", kernels and
      collectives one after the other and nothing else (of devices that share cores: of all of these, over the cores);
      "no_overhead_ms", in full but for all overheads, those of starting kernels and loops and those of
      trainings; "sketch_ms", from sizes alone, as the planner sees it; "outside", classes far outside of what was
      measured, see `recjax.planning.predict.Outside`; "program", the same for equal programs of a device on equal
      input.
    """
    trainer = build_trainer(config, splits=("train",), weights=False)
    full = predicted_of(trainer, machine)
    overheads = {n: Quantity(_LEAST, q.unit, "left out") for n, q in machine.overheads.items() if q.unit == "us"}
    bare = dataclasses.replace(machine, overheads=overheads)
    without = predict(full.graph, bare, full.host)
    found: dict[str, Any] = {
        "step_ms": full.step_us / 1e3,
        "kernels_ms": _kernels_us(full, bare) / 1e3,
        "no_overhead_ms": without.step_us / 1e3,
        "sketch_ms": _sketched(trainer, machine) / 1e3,
        "outside": [dataclasses.asdict(one) for one in outside(full.graph, machine)],
        "program": hashlib.sha256(repr((full.graph, full.host)).encode()).hexdigest()[:16],
    }
    return found if full.cpu_us is None else found | {"cpu_ms": full.cpu_us / 1e3}


def _kernels_us(full: Prediction, bare: Machine) -> float:
    known = Costs(bare, full.host.devices)
    costs = [node_cost(node, known) for node in full.graph.nodes]
    if bare.shared:
        return full.host.devices * sum(cost.us * cost.cores for cost in costs) / bare.cores
    return sum(cost.us for cost in costs)


def _sketched(trainer: Trainer, machine: Machine) -> float:
    asked = question(trainer.config, trainer.source, machine, tuple(trainer.mesh.shape.values()))
    return Planner(asked).predicted(exact_sizes(asked.demand, trainer.plan)).step_us


def measured(config: RunConfig, seconds: float, references: References | None) -> dict[str, Any]:
    """Trains for a short time, by turns with the references of a calibration.

    Args:
      config: of the run.
      seconds: to time, in steps of which there are 10 at least.
      references: of a machine; None trains none.

    Returns:
      "step_ms" of the clock, the median over steps; "cpu_ms", CPU time of all threads over the steps; "steps";
      "others", the share of the CPU that other processes took meanwhile, None where the system does not tell; and with
      references "slower", how many times as long as in the calibration these took.
    """
    training = Stepping(config)
    turns: list[_Turn] = []
    for _ in range(_TURNS):
        if references is not None:
            references.round()
        turns.append(_turn(training, seconds / _TURNS))
    found = _figures(turns)
    if references is None:
        return found
    references.round()
    return found | {"slower": references.slower(_TURNS + 1)}


def by_turns(configs: Sequence[RunConfig], rounds: int, seconds: float) -> list[list[dict[str, Any]]]:
    """Trains some configs by turns, so that the speed of the machine in a round is that of all.

    Args:
      configs: that are compared. One at a time has its state in memory.
      rounds: of a turn of each.
      seconds: of a turn.

    Returns:
      For each config what `measured` gives without references, for each round, and "round_slower": how many times as
      long as in the median of all rounds steps took in this one, the geometric mean over configs.
    """
    trainings = []
    for config in configs:
        trainings.append(Stepping(config))
        trainings[-1].release()
    times: list[list[dict[str, Any]]] = [[] for _ in configs]
    for _ in range(rounds):
        for training, of in zip(trainings, times, strict=True):
            training.begin()
            of.append(_figures([_turn(training, seconds)]))
            training.release()
    return with_speeds(times)


def with_speeds(times: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Adds to each round by turns how fast the machine was in it.

    Args:
      times: for each of the cases that are compared what each round measured, the same rounds of all.

    Returns:
      the same with "round_slower", see `by_turns`.
    """
    logs_CxR = np.log([[one["step_ms"] for one in of] for of in times])
    speeds_R = np.exp(np.mean(logs_CxR - np.median(logs_CxR, axis=1, keepdims=True), axis=0))
    return [[one | {"round_slower": float(speed)} for one, speed in zip(of, speeds_R, strict=True)] for of in times]


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Steps that were trained one after the other: times, s; `count` of them; CPU time, s; and the share of others."""

    steps: list[float]
    count: int
    wall: float
    cpu: float
    others: float | None


def _turn(training: Stepping, seconds: float) -> _Turn:
    """Trains for so long, 5 steps at least, after some that compile and fill the pipeline."""
    with contextlib.closing(training.trainer.train_inputs(host=training.state.host)) as stream:
        training.warm(stream, _WARM)
        others, began, cpu, steps = Others([]), time.perf_counter(), time.process_time(), [time.perf_counter()]
        for _ in training.steps(stream):
            steps.append(time.perf_counter())
            if len(steps) > _FEWEST and steps[-1] - began > seconds:
                break
        training.wait()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        share = others.share()
    return _Turn(np.diff(steps[1:]).tolist(), len(steps) - 1, wall, cpu, share)


def _figures(turns: Sequence[_Turn]) -> dict[str, Any]:
    """Figures of a step, see `measured`. The median of the clock is not taken where it is not the mean's like."""
    count = sum(turn.count for turn in turns)
    middle, mean = statistics.median(s for turn in turns for s in turn.steps), sum(turn.wall for turn in turns) / count
    known = [turn.others for turn in turns if turn.others is not None]
    return {
        "step_ms": (middle if math.isclose(middle, mean, rel_tol=0.5) else mean) * 1e3,
        "cpu_ms": sum(turn.cpu for turn in turns) / count * 1e3,
        "steps": count,
        "others": statistics.mean(known) if known else None,
    }
