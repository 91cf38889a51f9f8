"""A config's step, predicted in some ways and measured for a short time."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

from recjax.bench.in_training import References
from recjax.bench.machine_load import Others
from recjax.bench.prediction import predicted
from recjax.bench.stepping import Stepping
from recjax.config.run import RunConfig
from recjax.planning.costs import Costs
from recjax.planning.machine import Machine, Quantity
from recjax.planning.planner import Planner, exact_sizes
from recjax.planning.predict import DEVICES, Prediction, predict
from recjax.planning.reach import outside
from recjax.planning.schedule import node_cost
from recjax.train.planned import question
from recjax.train.step_inputs import StepInputs
from recjax.train.trainer import build_trainer

_WARM = 4  # steps that compile and fill the pipeline
_TURNS = 2  # in which a step is measured, the references before, between and after them
_LEAST = 1e-6  # us, of an overhead that is left out


def foreseen(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Predicted times of a step, ms.

    Returns:
      "step_ms" in full; "cpu_ms" of all threads and devices, where they share cores; "kernels_ms", kernels and
      collectives one after the other and nothing else (of devices that share cores: of all of these, over the cores);
      "no_overhead_ms", in full but for the overheads of starting kernels and loops; "sketch_ms", from sizes alone, as
      the planner sees it; "outside", classes far outside of what was measured, see `recjax.planning.reach`; "program",
      the same for equal programs of a device on equal input.
    """
    full = predicted(config, machine)
    overheads = {n: Quantity(_LEAST, q.unit, "left out") for n, q in machine.overheads.items() if q.unit == "us"}
    bare = dataclasses.replace(machine, overheads=overheads)
    without = predict(full.graph, bare, full.host)
    found: dict[str, Any] = {
        "step_ms": full.step_us / 1e3,
        "kernels_ms": _kernels_us(full, bare) / 1e3,
        "no_overhead_ms": without.step_us / 1e3,
        "sketch_ms": _sketched(config, machine) / 1e3,
        "devices_ms": full.bounds[DEVICES] / 1e3,
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


def _sketched(config: RunConfig, machine: Machine) -> float:
    trainer = build_trainer(config, weights=False)
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
    steps: list[float] = []
    shares: list[float | None] = []
    cpu_s = wall_s = 0.0
    with contextlib.closing(training.trainer.train_inputs()) as stream:
        for _ in range(_TURNS):
            if references is not None:
                references.round()
            training.warm(stream, _WARM)
            others, began, cpu = Others([]), time.perf_counter(), time.process_time()
            turn = list(_steps(training, stream, seconds / _TURNS))
            cpu_s, wall_s = cpu_s + time.process_time() - cpu, wall_s + time.perf_counter() - began
            steps += turn[1:]
            shares.append(others.share())
        if references is not None:
            references.round()
    count = len(steps) + _TURNS
    middle, mean = statistics.median(steps), wall_s / count
    known = [share for share in shares if share is not None]
    found = {
        "step_ms": (middle if math.isclose(middle, mean, rel_tol=0.5) else mean) * 1e3,
        "mean_ms": mean * 1e3,
        "cpu_ms": cpu_s / count * 1e3,
        "steps": count,
        "others": statistics.mean(known) if known else None,
    }
    return found if references is None else found | {"slower": references.slower(_TURNS + 1)}


def _steps(training: Stepping, stream: Iterator[StepInputs], seconds: float) -> Iterator[float]:
    """Trains for so long, 5 steps at least, and yields the time of each, s."""
    last = began = time.perf_counter()
    for count, _ in enumerate(training.steps(stream), 1):
        now = time.perf_counter()
        yield now - last
        last = now
        if count >= 5 and now - began > seconds:
            break
    training.wait()
