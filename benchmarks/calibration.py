"""How well a simulation with measured collectives predicts the communication of training steps on this machine.

    python benchmarks/calibration.py [--devices 2,4] [--passes 30] [--folder DIR]

For each number of host devices one process measures in passes: all plain collectives of a sweep (as `recjax replay
--sweep` does), then some steps of each preset (as `recjax trace --alone` does, since the work of the host would take
the cores from host devices). They take turns because the machine's speed drifts within seconds: it shall drift for both
alike. The sweep of all passes then takes the place of the times in every trace, as by `recjax simulate workload TRACE
--calibration SWEEP`.

What is predicted. A rank's time in a collective is mostly waiting for the rank that comes last, which says how evenly
the ranks compute and not what the collective costs. So the figure is the time of the rank that came last ("last us"):
of a collective's ranks the least time from a rank's own start to its own end. The sweep's `last_us` is the same. Each
collective of a step is the median over the steps, and a step is the sum over its collectives. Three more:

  done   from the last start to the last end, all on the one clock of the process: with the ranks' waking up after it
  p50    the median over ranks of the time in a collective, waiting included, against the simulation's, where waiting
         comes from the trace's times of computing and from how late each rank was, which repeat what the scheduler did
  halves `last` of the odd steps over that of the even ones: what a measurement repeats of itself

An error is max(predicted, measured) / min(predicted, measured) - 1, and the mean of errors is geometric. No number is
fitted to the traces; what kinds of points a sweep measures was chosen with them in sight.

Found on two cores of an Intel Xeon with nothing else on them (Python 3.12, JAX 0.12.0.1, recjax-kernels, 30 passes):
errors of `last`, on 2 / 4 devices, movietweetings 3.8 / 2.5%, synthetic 28 / 17% (too low), synthetic_multihot 8.3 /
6.0%, bench_kaggle16 2.9 / 11%: geometric mean 9.7%; of p50 8.4 / 4.6%, 3.0 / 3.7%, 94 / 20%, 0.0 / 4.2%, together 14%.
With 15 passes a quarter of an hour earlier: 14 / 11%, 28 / 17%, 8.6 / 11%, 5.7 / 18%, together 14% (p50 23%). What
was measured on 2 devices was then up to a third more: most of these times have two modes, as ranks share a core or not,
and the machine drifts. What is off most: all-reduces of several arrays without an exchange before them, and single
exchanges (36 instead of 57 us), whose errors cancel in part. On JAX 0.10.2, where XLA's pool must have 16 threads, it
was not measured since sweeps go in passes; before, without the ranks' being late, the error was 22%, and the exchange
of ids of bench_kaggle16, beside which the devices compute, took 266 us instead of 52.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from recjax.config import presets
from recjax.lab.formats import read_trace
from recjax.lab.replay.microbenchmark import Sweep
from recjax.lab.replay.replay import ranks_mesh
from recjax.lab.simulate.calibrated import play, read_sweep
from recjax.lab.trace.record import Recording
from recjax.lab.trace.verbs import write
from recjax.lab.trace.workload import read_workload
from recjax.parallel.mesh import MeshConfig, make_mesh

PRESETS = {
    "movietweetings": (),
    "synthetic": (),
    "synthetic_multihot": (),
    "bench_kaggle16": ("train.batch_size=1024", "data.max_rows=200000"),
}
SIZES = [2**k for k in range(3, 21)]  # bytes of plain collectives
WARM = 3  # steps of each preset in a pass that do not count
BATCHES = 8  # of each preset, on the devices before the first pass


def measured(folder: Path) -> dict[str, np.ndarray]:
    """Of each collective of a step, in us: "last", "done" and "p50", [steps, collectives]."""
    trace = read_trace(folder)
    by_rank = [[e for e in trace.ranks[r] if e.kind != "compute"] for r in range(trace.world)]
    starts = np.array([[e.start_ns for e in events] for events in by_rank], float)
    ends = np.array([[e.end_ns for e in events] for events in by_rank], float)
    found = {
        "last": (ends - starts).min(axis=0),
        "done": ends.max(axis=0) - starts.max(axis=0),
        "p50": np.median(ends - starts, axis=0),
    }
    return {name: ns.reshape(trace.steps, -1) / 1e3 for name, ns in found.items()}


def predicted(folder: Path, sweep: Path, steps: int) -> tuple[dict[str, np.ndarray], list[Any]]:
    """The same of the simulation, "last" and "p50", and the operations of the first step."""
    played = play(read_workload(folder, None), [read_sweep(sweep)])
    places = [i for i, operation in enumerate(played.workload.operations) if operation.kind == "collective"]
    took = (played.finished - played.started)[places] / 1e3
    found = {"last": took.min(axis=1), "p50": np.median(took, axis=1)}
    operations = [played.workload.operations[i] for i in places]
    return {name: us.reshape(steps, -1) for name, us in found.items()}, operations[: len(places) // steps]


def a_step(us: np.ndarray) -> float:
    """A step's sum of the medians of its collectives."""
    return float(np.median(us, axis=0).sum())


def off(one: float, other: float) -> float:
    """How far two are apart: max / min - 1."""
    return max(one, other) / min(one, other) - 1


def case(preset: str, devices: int, folders: list[Path], sweep: Path) -> dict[str, Any]:
    """The figures of one preset's traces, in us a step."""
    each = [measured(folder) for folder in folders]
    theirs = {name: np.concatenate([found[name] for found in each]) for name in each[0]}
    both = [predicted(folder, sweep, len(found["last"])) for folder, found in zip(folders, each, strict=True)]
    operations = both[0][1]
    ours = {name: np.concatenate([found[name] for found, _ in both]) for name in both[0][0]}
    last, mine = a_step(theirs["last"]), a_step(ours["last"])
    return {
        "preset": preset,
        "devices": devices,
        "measured_last_us": last,
        "predicted_last_us": mine,
        "error": off(mine, last),
        "measured_done_us": a_step(theirs["done"]),
        "measured_p50_us": a_step(theirs["p50"]),
        "predicted_p50_us": a_step(ours["p50"]),
        "p50_error": off(a_step(ours["p50"]), a_step(theirs["p50"])),
        "halves": a_step(theirs["last"][1::2]) / a_step(theirs["last"][::2]),
        "collectives": [
            {
                "collective": operation.collective,
                "phase": operation.layer,
                "bytes": operation.bytes,
                "arrays": len(operation.parts) or 1,
                "measured_last_us": float(np.median(theirs["last"][:, i])),
                "predicted_last_us": float(np.median(ours["last"][:, i])),
            }
            for i, operation in enumerate(operations)
        ],
    }


def measure(folder: Path, devices: int, options: argparse.Namespace) -> None:
    """Writes `folder`/sweep.json and a trace of each preset and pass, all measured in turns in this process."""
    mesh = ranks_mesh(list(make_mesh(MeshConfig(devices=devices, platform="cpu")).devices.flat))
    placed = 0 if options.busy else BATCHES
    recordings = {}
    for preset in options.presets.split(","):
        config = presets.load(preset, [f"mesh.devices={devices}", "mesh.platform=cpu", *PRESETS[preset]])
        recordings[preset] = Recording(config, placed)
        recordings[preset].train(BATCHES)
    sweep = Sweep(mesh, ("all_reduce", "all_to_all"), SIZES)
    for number in range(options.passes):
        print(f"{devices} devices: pass {number + 1} of {options.passes}", file=sys.stderr, flush=True)
        sweep.measure(options.repeats)
        for preset, recording in recordings.items():
            recording.train(WARM)  # other programs ran before
            write(recording.record(options.steps), folder / f"{preset}.{number}", "recjax")
    (folder / "sweep.json").write_text(json.dumps(sweep.result()))


def show(devices: int, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Prints the figures of what `measure` wrote."""
    found = []
    for preset in names:
        folders = sorted(folder.glob(f"{preset}.*"))
        c = case(preset, devices, folders, folder / "sweep.json")
        found.append(c)
        print(
            f"{preset:20}{devices:8}{c['measured_last_us']:10.1f}{c['predicted_last_us']:11.1f}{c['error']:8.1%}"
            f"{c['measured_done_us']:10.1f}{c['measured_p50_us']:10.1f}{c['predicted_p50_us']:11.1f}"
            f"{c['p50_error']:8.1%}{c['halves']:8.2f}"
        )
        for one in c["collectives"]:
            print(
                f"    {one['phase']:14}{one['collective']:15}{one['bytes']:11,.0f} B in {one['arrays']:2}"
                f"{one['measured_last_us']:9.1f}{one['predicted_last_us']:9.1f}",
                flush=True,
            )
    return found


def geometric(errors: list[float]) -> float:
    """The mean of errors."""
    return float(np.exp(np.mean(np.log1p(errors))) - 1)


def main() -> None:
    """Measures and prints; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4", help="numbers of host devices (default: 2,4)")
    parser.add_argument("--presets", default=",".join(PRESETS), help="which (default: all four)")
    parser.add_argument("--passes", type=int, default=30, help="of all collectives and all presets (default: 30)")
    parser.add_argument("--steps", type=int, default=10, help="of each preset in a pass (default: 10)")
    parser.add_argument("--repeats", type=int, default=4, help="of each plain collective in a pass (default: 4)")
    parser.add_argument("--busy", action="store_true", help="traces of steps beside which the host prepares batches")
    parser.add_argument("--folder", type=Path, help="where sweeps and traces go, and are taken from if they are there")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="recjax-calibration-"))
    counts = [int(count) for count in options.devices.split(",")]
    for devices in counts:
        if not (folder / str(devices) / "sweep.json").exists():
            (folder / str(devices)).mkdir(parents=True, exist_ok=True)
            # a process has one number of host devices
            process = multiprocessing.get_context("spawn").Process(
                target=measure, args=(folder / str(devices), devices, options)
            )
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
    print(
        f"{'preset':20}{'devices':>8}{'last us':>10}{'predicted':>11}{'error':>8}{'done us':>10}{'p50 us':>10}"
        f"{'predicted':>11}{'error':>8}{'halves':>8}"
    )
    found = [c for devices in counts for c in show(devices, folder / str(devices), options.presets.split(","))]
    means = {name: geometric([c[name] for c in found]) for name in ("error", "p50_error")}
    print(f"geometric mean of the errors: {means['error']:.1%} (p50: {means['p50_error']:.1%})")
    print(json.dumps({"cases": found, "geometric_mean": means}))


if __name__ == "__main__":
    main()
