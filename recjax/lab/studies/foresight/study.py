"""`recjax study foresight`: predictions against measurements on this machine, and against published figures.

Cases are predicted and measured in passes, each result a part of the study: what was done is not done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recjax.errors import RecjaxError, TrainingError
from recjax.lab.bench.machine_load import Others
from recjax.lab.calibrate import calibrate as calibration
from recjax.lab.calibrate import report
from recjax.lab.predict.in_training import References, ReferencesEnded
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.foresight import analysis, draw, measure, published
from recjax.lab.studies.foresight.analysis import Found
from recjax.lab.studies.foresight.cases import Case, cases
from recjax.lab.studies.report import Picture
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.planning.machine import Machine, open_machine, shipped, write
from recjax.utils.paths import expanded

MACHINE = "machine.json"  # in the folder: measured at the beginning, or a copy of the one that was given
ROUNDS = 4  # of a pass over what is compared
QUIET = 0.05  # of the CPU, for other processes: above it a measurement says so


@dataclasses.dataclass(frozen=True)
class Size:
    """Amount of a campaign.

    Attributes:
      configs: number of devices -> random configs.
      benched: presets for speed.
      changed: configs of which changes are measured.
      plans, workloads, plan_devices: plans for each workload on so many devices.
      passes: over everything.
      seconds: of a case in a pass; what is compared is measured in turns of a part of it.
      quick: whether the machine is measured quickly, where no file is given.
    """

    configs: dict[int, int]
    benched: int
    changed: int
    plans: int
    workloads: int
    plan_devices: tuple[int, ...]
    passes: int
    seconds: float
    quick: bool


SMALL = Size({1: 6, 2: 2}, 0, 1, 6, 1, (2,), 2, 1.0, True)
FULL = Size({1: 60, 2: 10, 4: 10, 8: 10}, 3, 10, 20, 5, (2, 8), 3, 3.0, False)


def study(
    out: Path, size: Size, machine: str, seed: int, minutes: float, with_published: bool, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Picture]]:
    """Goes on with the campaign in a folder, or begins one.

    Args:
      out: the folder.
      size: of the campaign.
      machine: file to predict on; "": the one of the folder, which is measured if there is none.
      seed: of the random configs.
      minutes: after which it stops; 0: when all is done.
      with_published: whether published figures are predicted, too.
      tell: called with what is being done.

    Returns:
      JSON values of what there is: "about", with "complete", "cases", "done", "caveat" and "slower", speeds of the
      references, see `measure.measured`; "errors", see
      `analysis.errors`; "outside", see `analysis.outside`; "rankings", see `analysis.rankings`; "signs", see
      `analysis.signs`; "refused", cases with the reason; "published", None if it was not
      asked for; "lin", what Lin et al. report. And its pictures.

    Raises:
      ConfigError, DataError: the folder or the machine is another one's.
    """
    if machine and not (out / MACHINE).is_file():
        open_machine(machine)  # or refused, before the folder is this machine's
    most = max(*size.configs, *size.plan_devices)
    on_cpu = jax.config.values["jax_platforms"] in (None, "", "cpu")
    mesh = make_mesh(MeshConfig(most if on_cpu else 0, "cpu" if on_cpu else "auto"))  # the largest first: see there
    device = mesh.devices.flat[0]
    kept = Finished(out, {"seed": seed, "machine": machine, "full": not size.quick}, "foresight")
    others = Others([])
    known = _machine(out, machine, size.quick, tell)
    all_cases = [
        case
        for case in cases(
            size.configs,
            size.benched,
            size.changed,
            size.plans,
            size.workloads,
            size.plan_devices,
            str(out / MACHINE),
            seed,
        )
        if case.config.mesh.devices <= len(jax.devices())
    ]
    with References.of(known) or contextlib.nullcontext() as references:
        complete = run(kept, all_cases, known, size.passes, size.seconds, minutes, tell, references)
    found, refused = measured_cases(kept, all_cases)
    busy = [one["others"] for case in found for one in case.passes if one["others"] is not None]
    share = float(np.median(busy)) if busy else others.share()
    caveat = ""
    if share is not None and share > QUIET:
        caveat = f"MEASURED UNDER LOAD: other processes took {share:.0%} of the CPU"
    configs = [one for one in found if one.kind == "config"]
    result: dict[str, Any] = {
        "about": {
            "machine": known.name,
            "measured_machine": known.measured,
            "calibration": known.where,
            "seed": seed,
            "complete": complete,
            "cases": len(all_cases),
            "done": len(found),
            "caveat": caveat,
            "slower": [one["slower"] for case in found for one in case.passes if "slower" in one],
            "device": device.device_kind,
            "cores": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
        },
        "errors": analysis.errors(configs),
        "outside": analysis.outside(found),
        "rankings": analysis.rankings([one for one in found if one.kind == "plan"]),
        "signs": analysis.signs(found),
        "refused": refused,
        "published": None,
        "lin": published.LIN,
    }
    if with_published:
        tell("predicting published figures")
        result["published"] = published.model_a()
    return result, draw.pictures(result, found)


def run(
    kept: Finished,
    cases: Sequence[Case],
    machine: Machine,
    passes: int,
    seconds: float,
    minutes: float,
    tell: Callable[[str], None],
    references: References | None,
) -> bool:
    """Runs the rest of a campaign: in every pass each config, then what is compared with each other by turns.

    Args:
      kept: what is done of the campaign.
      cases: all of it.
      machine: to predict on.
      passes: over all cases.
      seconds: that a case is timed in a pass.
      minutes: after which it stops; 0: when all is done.
      tell: called with what is being done.
      references: trained by turns with every config that is measured alone; None for none.

    Returns:
      Whether all is done.
    """
    began = time.monotonic()

    def do(part: str, doing: str, make: Callable[[], Any]) -> bool:
        if part not in kept.results:
            if minutes and time.monotonic() - began > 60 * minutes:
                return False
            tell(f"{doing}: {part.rpartition(', ')[0]}")
            kept.get(part, make)
        return True

    for number in range(passes):
        for place, case in enumerate(cases, 1):  # predicted before it is measured
            of = f"case {place} of {len(cases)}"
            if not number and not do(
                f"{case.name}, -1", f"predicting {of}", functools.partial(_figures, case, machine, -1, seconds, None)
            ):
                return False
            if case.kind == "config" and not do(
                f"{case.name}, {number}",
                f"pass {number + 1} of {passes}, {of}",
                functools.partial(_figures, case, machine, number, seconds, references),
            ):
                return False
        compared = comparisons(cases)
        for place, (name, own) in enumerate(compared.items(), 1):
            programs = _programs(kept, own)
            if programs and not do(
                f"{name} by turns, {number}",
                f"pass {number + 1} of {passes}, comparison {place} of {len(compared)}",
                functools.partial(_compared, programs, number, seconds),
            ):
                return False
    return True


def comparisons(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases that are compared with each other: plans of a workload, and a config and its changes, by their name."""
    of: dict[str, list[Case]] = {}
    named = {case.name: case for case in cases}
    for case in cases:
        if case.kind == "plan":
            of.setdefault(case.name.partition(": ")[0], []).append(case)
        elif case.kind == "change":
            of.setdefault(case.base, [named[case.base]]).append(case)
    return of


def _programs(kept: Finished, cases: Sequence[Case]) -> list[Case]:
    """The first case of each program, without those that are refused; none where nothing can be compared."""
    of: dict[str, Case] = {}
    for case in cases:
        prediction = kept.results[f"{case.name}, -1"]
        if "refused" not in prediction:
            of.setdefault(prediction.get("program", case.name), case)
        elif case.kind == "config":
            return []
    return list(of.values()) if len(of) > 1 else []


def _figures(case: Case, machine: Machine, turn: int, seconds: float, references: References | None) -> dict[str, Any]:
    """Result of a prediction or a pass, or why it was refused.

    Raises:
      ReferencesEnded: no reason of this case's; the campaign goes on from here when it is started again.
    """
    head = {"case": case.name, "pass": turn}
    try:
        if turn < 0:
            return head | measure.foreseen(case.config, machine)
        return head | measure.measured(case.config, seconds, references)
    except ReferencesEnded:
        raise
    except RecjaxError as error:
        return head | {"refused": str(error)}


def _compared(cases: Sequence[Case], turn: int, seconds: float) -> dict[str, Any]:
    """Result of a pass over cases that are compared: "by_turns", case -> what each round measured.

    Changes also have "over_base", the time of a step over that of their base in the same round.
    """
    measured = measure.by_turns([case.config for case in cases], ROUNDS, seconds / ROUNDS)
    of = {case.name: rounds for case, rounds in zip(cases, measured, strict=True)}
    for case in cases:
        if case.kind == "change":
            for one, base in zip(of[case.name], of[case.base], strict=True):
                one["over_base"] = one["step_ms"] / base["step_ms"]
    return {"pass": turn, "by_turns": {case.name: of[case.name] for case in cases if case.kind != "config"}}


def measured_cases(kept: Finished, cases: Sequence[Case]) -> tuple[list[Found], dict[str, str]]:
    """The cases that were predicted and measured at least once, and why others were refused.

    A plan with the program of another one has no pass of its own. Rounds by turns of several passes have speeds of all
    of them, see `measure.with_speeds`.
    """
    predicted: dict[str, dict[str, Any]] = {}
    passes: dict[str, list[dict[str, Any]]] = {}
    refused: dict[str, str] = {}
    alone = {case.name for case in cases if case.kind == "config"}
    by_turns: dict[str, list[dict[str, Any]]] = {}  # comparison -> each pass over it
    for part, record in kept.results.items():
        if "by_turns" in record:
            by_turns.setdefault(part.rpartition(", ")[0], []).append(record["by_turns"])
        elif "refused" in record:
            refused[record["case"]] = record["refused"]
        elif record["pass"] < 0:
            predicted[record["case"]] = record
        elif record.get("case") in alone:
            passes.setdefault(record["case"], []).append(record)
    for of_passes in by_turns.values():
        names = [name for name in of_passes[0] if all(name in of_pass for of_pass in of_passes)]
        if not names:
            continue
        rounds = measure.with_speeds([[one for of_pass in of_passes for one in of_pass[name]] for name in names])
        passes |= dict(zip(names, rounds, strict=True))
    for own in comparisons(cases).values():
        known = {predicted[case.name].get("program") for case in own if case.name in {*passes} & {*predicted}}
        for case in own:
            if case.kind == "plan" and predicted.get(case.name, {}).get("program") in known - {None}:
                passes.setdefault(case.name, [])
    found = [
        Found(case.kind, case.name, case.base, case.config.mesh.devices, predicted[case.name], passes[case.name])
        for case in cases
        if case.name in predicted and case.name in passes and case.name not in refused
    ]
    return found, refused


def _machine(out: Path, given: str, quick: bool, tell: Callable[[str], None]) -> Machine:
    path = out / MACHINE
    if not path.is_file():
        if given:
            known = shipped()
            shutil.copyfile(known.get(given) or expanded(given), path)
        else:
            tell("measuring this machine")
            began = time.monotonic()
            _calibrate(path, quick, tell)
            tell(f"measured the machine in {time.monotonic() - began:.0f} s")
    return open_machine(str(path))


def _calibrate(path: Path, quick: bool, tell: Callable[[str], None]) -> None:
    """Measures this machine; a CPU by a process of its own, as `recjax calibrate` does.

    In this one the back end has started, and runs programs in threads whose waking up takes longer than most kernels.
    Other devices belong to this process.
    """
    if jax.default_backend() != "cpu":
        others = Others([])
        made = calibration.calibrate(make_mesh(MeshConfig()), calibration.QUICK if quick else calibration.FULL, tell)
        write(report.with_note(made, others.share(), quick), path)
        return
    command = [sys.executable, "-m", "recjax", "calibrate", "--platform", "cpu", "--out", str(path)]
    done = subprocess.run([*command, "--quick"] if quick else command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise TrainingError(
            f"the machine could not be measured: `recjax calibrate` ended with status {done.returncode}, and said why "
            "above. Measure it, and name its file by --machine."
        )
