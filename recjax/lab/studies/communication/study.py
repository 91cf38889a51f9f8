"""Communication of a large DLRM, after Chu et al. (Meta): what travels by size, and how settings change it.

Every case is a training step of model A (or a smaller one) compiled for 128 ranks that nobody needs to own: sizes,
counts and splits are those of the program and its first batch. The same cases of a still smaller model run on the
devices of this machine for times. Each case is kept when it is done, so that the same command goes on after a stop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from recjax.errors import ConfigError
from recjax.lab.formats.calls import calls, imbalance
from recjax.lab.formats.trace import Trace
from recjax.lab.studies.communication import compare, draw
from recjax.lab.studies.communication.shape import BASE, FULL, MEASURED, SMALL, Case, Size, cases, config, facts
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.foresight.published import model_a
from recjax.lab.studies.report import Report
from recjax.lab.trace.kineto import read_timed
from recjax.lab.trace.record import compiled, record
from recjax.lab.trace.statistics import figures
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.planning.machine import open_machine

NAME = "communication"
_STEPS = 5  # measured of each case


def study(
    out: Path,
    full: bool,
    ranks: int,
    devices: int | None,
    say: Callable[[str], None],
    trace: Path | None = None,
    profiles: Path | None = None,
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Report]]:
    """Runs what is left of the study.

    Args:
      out: folder of the parts.
      full: whether model A is compiled whole; minutes.
      ranks: to compile for.
      devices: to measure on; None: all that the machine has, cores where it has no accelerator; 0: nothing is measured.
      say: called with what is being done.
      trace: folder of an execution trace that somebody else recorded; None: there is none.
      profiles: folder of the profiler's files of the same steps; None: the trace itself has times.

    Returns:
      all figures, as JSON has them: "size", "facts", "compiled" and "measured" (case -> see `_figures`), "published"
      (what `published.model_a` predicts), "traced" (None, or what `statistics.figures` gives); and what makes the
      report of `report.provenance`.

    Raises:
      ConfigError, DataError, DeviceError: as for a training, or `out` holds another study.
    """
    size = FULL if full else SMALL
    traced = figures(read_timed(trace, profiles)) if trace else None
    if traced and not traced["time"]:
        raise ConfigError(f"--trace {trace}: it says what was sent and not when. Give the profiler's files (--kineto).")
    make_mesh(MeshConfig(ranks, "cpu"))  # the largest first: host devices are made once
    on = _devices() if devices is None else devices
    kept = Finished(out, {"full": full, "ranks": ranks, "devices": on}, NAME)
    result: dict[str, Any] = {"full": full, "ranks": ranks, "devices": on, "facts": facts(), "traced": traced}
    result["compiled"] = {
        case.name: kept.get(f"compiled {case.name}", functools.partial(_compiled, size, ranks, case, out, say))
        for case in cases(size, ranks)
    }
    result["measured"] = {
        case.name: kept.get(f"measured {case.name}", functools.partial(_measured, MEASURED, on, case, out, say))
        for case in (cases(MEASURED, on) if on else ())
    }
    say("predicting model A on 128 V100")
    result["published"] = kept.get("published", model_a)
    more = {"jax": jax.__version__, "ranks": f"{ranks} compiled, {on} measured"}
    return result, lambda about: compare.report(result, about | more, draw.pictures(result))


def _devices() -> int:
    """Devices to measure on: accelerators if there are any, else one for each core, two at least."""
    if jax.config.values["jax_platforms"] in (None, "", "cpu") and jax.default_backend() == "cpu":
        return max(2, min(8, os.cpu_count() or 2))
    return jax.device_count() if jax.device_count() > 1 else 0


def _compiled(size: Size, ranks: int, case: Case, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"compiling for {ranks} ranks: {case.name}")
    timed = case.variation in (BASE, "buckets")  # what is hidden depends on these
    wanted = config(size, ranks, case, out, "cpu")
    found = _figures(compiled(wanted, open_machine("v100") if timed else None))
    return found | {"variation": case.variation}


def _measured(size: Size, devices: int, case: Case, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"measuring on {devices} devices: {case.name}")
    return _figures(record(config(size, devices, case, out), _STEPS)) | {"variation": case.variation}


def _figures(trace: Trace) -> dict[str, Any]:
    """The figures of a trace that the study keeps.

    Returns:
      "collectives", "sizes", "count", "padded_bytes", "useful_bytes", "time", "counted_ranks" as `statistics.figures`
      has them; "phases": for each phase with all-to-alls "sent" and "received", useful bytes of each rank in a step,
      and "imbalance": for both ways that of the phase and the largest of a single call.
    """
    found = figures(trace)
    keys = ("collectives", "sizes", "count", "padded_bytes", "useful_bytes", "time", "counted_ranks", "batch_size")
    phases: dict[str, Any] = {}
    for call in calls(trace):
        if call.first.kind != "all_to_all":
            continue
        of = phases.setdefault(
            call.first.phase, {way: [0.0] * trace.world for way in ("sent", "received")} | {"calls": []}
        )
        ways = {"sent": call.sent(), "received": call.received()}
        of["calls"].append({way: imbalance([*values.values()]) for way, values in ways.items()})
        for way, values in ways.items():
            for rank, value in values.items():
                of[way][rank] += value / trace.steps
    for of in phases.values():
        single = of.pop("calls")
        of["imbalance"] = {
            way: {"phase": imbalance(of[way]), "call": max(one[way] for one in single)} for way in ("sent", "received")
        }
    return {key: found[key] for key in keys} | {"phases": phases}
