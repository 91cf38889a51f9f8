"""`recjax plan PRESET --predict`: a training step predicted on a machine, and with --measure the one that is here.

The step is compiled as it trains, for as many devices as the config says, and not run. Its sizes come from the first
batch, see `recjax.train.first_batch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from recjax.config.run import RunConfig
from recjax.lab.bench.breakdown import part_of, scopes
from recjax.lab.bench.run import Options, bench
from recjax.lab.predict import draw, targets
from recjax.planning.machine import Machine
from recjax.planning.predict import Prediction, figures, outside_text
from recjax.train.build import build_trainer, of_trainer
from recjax.train.first_batch import sample
from recjax.train.trainer import Trainer
from recjax.utils import log
from recjax.utils.files import write_json, write_whole
from recjax.utils.text import aligned

ROUNDS, STEPS = 5, 20  # of --measure


def predicted(config: RunConfig, machine: Machine, target: str = "") -> Prediction:
    """The training step of a config on a machine.

    Args:
      config: of the run.
      machine: to predict it on.
      target: device that the program is compiled for, see `recjax.lab.predict.targets`; "": the one that is here.

    Raises:
      ConfigError, DataError, DeviceError: as `build_trainer`, or nothing here compiles for the target.
    """
    if target:  # nothing runs on it, and JAX takes a plugin without its libraries where it is asked for the CPU alone
        config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, platform="cpu"))
    return predicted_of(build_trainer(config, splits=("train",), weights=False), machine, target)


def predicted_of(trainer: Trainer, machine: Machine, target: str = "") -> Prediction:
    """The training step of a trainer, of which shapes suffice, as for `predicted`."""
    log.info("counting distinct rows")
    found = sample(trainer)
    if target:
        trainer = targets.moved(trainer, target)
    log.info(f"compiling for {trainer.bound.all_devices} device(s)")
    return of_trainer(trainer, found, machine, _parts)


def _parts(text: str) -> Mapping[str, str]:
    return {name: part_of(scope) for name, scope in scopes(text).items()}


def on_machine(
    config: RunConfig, machine: Machine, measure: bool, out: Path | None, target: str = ""
) -> dict[str, Any]:
    """Predicts, measures if that is asked for, and draws.

    Args:
      config: of the run.
      machine: to predict it on.
      measure: whether to train here, as `recjax bench` does, and compare.
      out: folder for prediction.json, prediction.png and trace.json; None writes nothing.
      target: as for `predicted`.

    Returns:
      JSON values: those of `recjax.planning.predict.figures`; "devices", "batch_size"; "compiled_for" and
      "predicted_for", the platform that the program was compiled for and that of the machine; and with `measure`
      "measured": "step_ms", its quartiles "step_ms_q1" and "step_ms_q3", "samples_per_s", "parts_ms" and "host_ms" from
      a profile, "cpu_share_of_others", "cpu_ms" of all threads, and "ratio", predicted over measured step time.

    Raises:
      ConfigError, DataError, DeviceError: as `build_trainer`.
    """
    prediction = predicted(config, machine, target)
    result = figures(prediction) | {
        "devices": prediction.host.devices,
        "batch_size": prediction.host.samples,
        "compiled_for": targets.PLATFORM.get(target) or _platform(config),
        "predicted_for": machine.platform,
    }
    if measure:
        result["measured"] = _measured(config, result["step_ms"])
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "prediction.json", result)
        write_json(out / "trace.json", draw.trace(prediction))
        write_whole(out / "prediction.png", draw.picture(prediction, result))
        result["out"] = str(out)
    return result


def _platform(config: RunConfig) -> str:
    return jax.default_backend() if config.mesh.platform == "auto" else config.mesh.platform


def _measured(config: RunConfig, predicted_ms: float) -> dict[str, Any]:
    """Measures the step as `recjax bench` does."""
    found = bench(config, Options(rounds=ROUNDS, steps=STEPS))
    (speed,), (step,) = found["speed"].values(), found["steps"].values()
    batch = config.train.batch_size
    q1, q3 = (batch / speed[name] * 1e3 for name in ("q3", "q1"))
    return {
        "step_ms": step["step_ms"],
        "step_ms_q1": q1,
        "step_ms_q3": q3,
        "samples_per_s": speed["median"],
        "parts_ms": step["profile"]["device_ms"],
        "host_ms": step["profile"]["host_ms"],
        "cpu_share_of_others": found["setup"]["cpu_share_of_others"],
        "cpu_ms": next(iter(found["cpu_ms_per_step"].values()), None),
        "ratio": predicted_ms / step["step_ms"],
    }


def to_text(result: dict[str, Any]) -> str:
    """The result for people."""
    measured = result.get("measured")
    where = result["machine_from"]
    about = ", ".join(f"{where[key]}" for key in ("versions", "date", "note") if key in where)
    kind = "measured" if result["measured_machine"] else "NOT measured"
    lines = [
        f"a training step of {result['batch_size']:,} samples on {result['devices']} device(s), predicted for "
        f"{result['machine']} ({kind}: {about})"
    ]
    if result["compiled_for"] not in (result["predicted_for"], "auto"):
        lines.append(
            f"compiled for {result['compiled_for']}, whose compiler fuses otherwise than that of "
            f"{result['predicted_for']}: take it for an order of magnitude"
        )
    table = [["part of the step, on a device", "ms", *(["measured"] if measured else [])]]
    for part in _order(result["parts_ms"], measured["parts_ms"] if measured else {}):
        table.append(
            [
                part,
                _ms(result["parts_ms"].get(part, 0.0)),
                *([_ms(measured["parts_ms"].get(part, 0.0))] if measured else []),
            ]
        )
    device, path = result["device"], result["critical_path"]
    lines += ["", *aligned(table), ""]
    lines.append(
        f"{device['kernels']} kernels ({device['gflop']:.3g} GFLOP), {device['collectives']} collectives, of which "
        f"{_ms(device['exposed_ms'])} ms are not hidden; {path['nodes']} nodes on the critical path, the longest being"
    )
    nodes = [["node", "part", "at ms", "ms"]]
    nodes += [[one["name"], one["part"], _ms(one["start_ms"]), _ms(one["ms"])] for one in path["longest"][:6]]
    lines += [*aligned(nodes, left=(0, 1)), ""]
    host = [f"{stage} {_ms(ms)}" for stage, ms in result["host_ms"].items() if stage not in result["missing"]]
    lines.append(f"host, ms: {', '.join(host)}")
    if result["missing"]:
        lines.append(f"the machine file says nothing of {', '.join(result['missing'])}: taken for nothing")
    if result["unknown"]:
        lines.append(f"work that the program's text does not tell: {', '.join(result['unknown'][:5])}")
    if far := outside_text(result["outside"]):
        lines.append(f"{far}; take the prediction for a rough one, or calibrate without --quick")
    lines.append("bounds, ms: " + ", ".join(f"{name} {_ms(ms)}" for name, ms in result["bounds_ms"].items()))
    lines.append(
        f"predicted: {_ms(result['step_ms'])} ms a step, {result['samples_per_s']:,.0f} samples/s, bound by "
        f"{result['bound_by']}"
    )
    if measured:
        busy = measured["cpu_share_of_others"]
        lines.append(
            f"measured: {_ms(measured['step_ms'])} ms ({_ms(measured['step_ms_q1'])} - {_ms(measured['step_ms_q3'])}), "
            f"{measured['samples_per_s']:,.0f} samples/s; predicted / measured {measured['ratio']:.2f}"
            + ("" if busy is None else f"; other processes took {busy:.0%} of the CPU meanwhile")
        )
        if measured["cpu_ms"] and result["cpu_ms"]:
            lines.append(
                f"CPU time of a step: predicted {_ms(result['cpu_ms'])} ms, measured {_ms(measured['cpu_ms'])} ms, "
                f"predicted / measured {result['cpu_ms'] / measured['cpu_ms']:.2f} (other processes change it less)"
            )
    if "out" in result:
        lines.append(f"wrote prediction.json, prediction.png and trace.json (for ui.perfetto.dev) to {result['out']}")
    return "\n".join(lines)


def _order(one: dict[str, float], other: dict[str, float]) -> list[str]:
    return sorted(one | other, key=lambda part: -max(one.get(part, 0.0), other.get(part, 0.0)))


def _ms(ms: float) -> str:
    return f"{ms:,.3f}" if ms < 10 else f"{ms:,.1f}"
