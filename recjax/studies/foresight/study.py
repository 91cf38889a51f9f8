"""`recjax study foresight`: predictions against measurements on this machine, and against published figures."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recjax.bench.machine_load import Others
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.planning import calibrate as calibration
from recjax.planning import report
from recjax.planning.machine import Machine, open_machine, shipped, write
from recjax.studies.foresight import analysis, campaign, draw, published
from recjax.studies.foresight.cases import cases
from recjax.utils.files import write_json
from recjax.utils.text import aligned

MACHINE = "machine.json"
QUIET = 0.05  # of the CPU, for other processes: above it a measurement says so


@dataclasses.dataclass(frozen=True)
class Size:
    """Amount of a campaign.

    Attributes:
      configs: number of devices -> random configs.
      changed: configs of which changes are measured.
      plans, workloads, plan_devices: plans for each workload on so many devices.
      passes: over everything.
      seconds: of a case in a pass.
      quick: whether the machine is measured quickly, where no file is given.
    """

    configs: dict[int, int]
    changed: int
    plans: int
    workloads: int
    plan_devices: tuple[int, ...]
    passes: int
    seconds: float
    quick: bool


SMALL = Size({1: 6, 2: 2}, 1, 6, 1, (2,), 2, 1.0, True)
FULL = Size({1: 60, 2: 10, 4: 10, 8: 10}, 10, 20, 5, (2, 8), 3, 3.0, False)


def study(
    out: Path, size: Size, machine: str, seed: int, minutes: float, with_published: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Goes on with the campaign in a folder, or begins one, and reports what there is.

    Args:
      out: the folder.
      size: of the campaign.
      machine: file to predict on; "": the one of the folder, which is measured if there is none.
      seed: of the random configs.
      minutes: after which it stops; 0: when all is done.
      with_published: whether published figures are predicted, too.
      tell: called with what is being done.

    Returns:
      JSON values: "about", with "complete", "cases", "done" and "caveat"; "errors", see `analysis.errors`; "rankings",
      see `analysis.rankings`; "signs", see `analysis.signs`; "refused", cases with the reason; "published", None if it
      was not asked for; "lin", what Lin et al. report; "figures", files.

    Raises:
      ConfigError, DataError: the folder or the machine is another one's.
    """
    most = max(*size.configs, *size.plan_devices)
    on_cpu = jax.config.values["jax_platforms"] in (None, "", "cpu")
    mesh = make_mesh(MeshConfig(most if on_cpu else 0, "cpu" if on_cpu else "auto"))  # the largest first: see there
    device = mesh.devices.flat[0]
    campaign.begin(out, {"seed": seed, "machine": machine})
    others = Others([])
    known = _machine(out, machine, size.quick, tell)
    all_cases = [
        case
        for case in cases(
            size.configs, size.changed, size.plans, size.workloads, size.plan_devices, str(out / MACHINE), seed
        )
        if case.config.mesh.devices <= len(jax.devices())
    ]
    complete = campaign.run(out, all_cases, known, size.passes, size.seconds, minutes, tell)
    found, refused = campaign.found(out, all_cases)
    busy = [one["others"] for case in found for one in case.passes if one["others"] is not None]
    share = float(np.median(busy)) if busy else others.share()
    caveat = ""
    if share is not None and share > QUIET:
        caveat = f"MEASURED UNDER LOAD: other processes took {share:.0%} of the CPU"
    configs = [one for one in found if one.kind == "config"]
    result: dict[str, Any] = {
        "about": {
            "machine": known.name, "measured_machine": known.measured, "calibration": known.where, "seed": seed,
            "complete": complete, "cases": len(all_cases), "done": len(found), "caveat": caveat,
            "device": device.device_kind, "cores": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
        },
        "errors": analysis.errors(configs),
        "rankings": analysis.rankings([one for one in found if one.kind == "plan"]),
        "signs": analysis.signs(found),
        "refused": refused,
        "published": None,
        "lin": published.LIN,
    }  # fmt: skip
    if with_published:
        tell("predicting published figures")
        result["published"] = published.model_a()
    result["figures"] = draw.figures(result, found, out)
    write_json(out / "foresight.json", result)
    return result


def _machine(out: Path, given: str, quick: bool, tell: Callable[[str], None]) -> Machine:
    path = out / MACHINE
    if not path.is_file():
        if given:
            known = shipped()
            shutil.copyfile(known.get(given, Path(given)), path)
        else:
            tell("measuring this machine")
            calibration.wait_for_each()
            others, began = Others([]), time.monotonic()
            mesh = make_mesh(MeshConfig(2))
            made = calibration.calibrate(mesh, calibration.QUICK if quick else calibration.FULL, tell, "")
            write(report.with_note(made, others.share(), quick), path)
            tell(f"measured the machine in {time.monotonic() - began:.0f} s")
    return open_machine(str(path))


def to_text(result: dict[str, Any], out: Path) -> str:
    """The report for people."""
    about = result["about"]
    note = about["calibration"].get("note", "")
    on = f"{about['machine']}{f' ({note})' if note else ''}"
    lines = [f"predicted on {on}; {about['done']} of {about['cases']} cases done"]
    lines += [about["caveat"] + ": say so with every figure"] if about["caveat"] else []
    lines += [] if about["complete"] else ["not complete: the same command goes on from here"]
    lin = result["lin"]
    lines += ["", *aligned(_error_rows(result["errors"]))]
    lines.append(
        f"Lin et al. on V100: GMAE {lin['end_to_end_gmae']:.2%} from end to end, kernels alone up to "
        f"{lin['kernels_alone_worst']:.0%} off"
    )
    for row in result["rankings"]:
        text = f"{row['workload']}: best plan {row['best']}; tau {row['tau']:.2f}"
        text += f", from sizes alone {row['tau_sketch']:.2f}"
        if "planner" in row:
            text += f"; the planner's plan takes {row['planner']:.2f} of the best one's time"
            text += f" and {row['auto']:.2f} of the plain rule's" if "auto" in row else ""
        lines.append(f"{text} (largest repeat error {row['noise']:.2f})")
    signs = result["signs"]
    if signs["changes"]:
        counts = f"{signs['right']} right, {signs['wrong']} wrong, {signs['within_noise']} within the noise"
        lines.append(f"signs of changes: {counts}")
    lines += _published_text(result["published"]) if result["published"] else []
    lines += [f"refused: {name}: {why}" for name, why in result["refused"].items()]
    return "\n".join([*lines, "", f"in {out}: foresight.json, {', '.join([*result['figures'], campaign.RECORDS])}"])


_VARIANTS = {"step_ms": "full prediction", "kernels_ms": "kernels alone", "no_overhead_ms": "without overheads",
             "sketch_ms": "from sizes alone", "cpu_ms": "CPU time"}  # fmt: skip


def _error_rows(errors: dict[str, Any]) -> list[list[str]]:
    table = [["devices", "prediction", "cases", "ratio, mean", "p50", "p90", "worst", "GMAE", "too short"]]
    for devices, variants in errors.items():
        for key, name in _VARIANTS.items():
            if key in variants:
                of = variants[key]
                ratios = [f"{of[ratio]:.3f}" for ratio in ("ratio_mean", "ratio_p50", "ratio_p90", "worst")]
                table.append([devices, name, str(of["points"]), *ratios, f"{of['gmae']:.1%}", f"{of['low']:.0%}"])
        table.append([devices, "repeat error of the measurement", "", f"{variants['repeat']:.3f}", *[""] * 5])
    return table


def _published_text(found: dict[str, Any]) -> list[str]:
    table = [["model A on 128 V100", "ms a step", "samples/s", "exposed"]]
    speed = found["published"]["samples_per_s"]
    exposed = f"about {found['published']['exposed_share']:.0%}"
    table.append(["published (Chu et al.)", f"{65_536 / speed * 1e3:.3g}", f"{speed:,.0f}", exposed])
    for row in found["rows"]:
        cells = ["no plan fits", "", ""]
        if row["step_ms"] is not None:
            cells = [f"{row['step_ms']:.3g}", f"{row['samples_per_s']:,.0f}", f"{row['exposed_share']:.0%}"]
        table.append([row["what"], *cells])
    mflop = found["mflop_per_sample"]
    assumed = [f"assumed: {text}" for text in found["assumptions"]]
    return ["", *aligned(table), f"forward products of the preset: {mflop:,.0f} MFLOP a sample", *assumed]
