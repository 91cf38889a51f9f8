"""How much memory does a run with large tables take? Prints the peak of each phase beside the tables' own size.

    python benchmarks/memory.py [--gib 12] [--devices 8] [--steps 20] [--folder DIR]

Three processes: one trains, evaluates, saves and tests; one resumes it, trains on and saves again; one evaluates the
newest checkpoint. All go through the product's own `train` and `evaluate`. The bound is 1.25 times tables and slots,
plus 2 GiB; the exit status is 1 if a process exceeds it. The disk needs room for two checkpoints. Linux only.
"""

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from recjax import main as runs
from recjax.config.presets import load
from recjax.train import callbacks
from recjax.train.metrics import measures
from recjax.train.trainer import Trainer

GIB = 2**30
SHARES = (10, 3, 2, 1)  # of the tables, in sixteenths: one has over half of all bytes
BYTES_A_ROW = 17 * 4  # 16 columns and row-wise Adagrad's sum


def status(field: str) -> float:
    """VmRSS or VmHWM, its highest value so far, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(field))


class Phases:
    """Peak and time of each phase of this process; what lies between them is "other"."""

    def __init__(self) -> None:
        """Begins with "other"."""
        self.peaks: dict[str, list[float]] = {}
        self._stack = ["other"]
        self._began = time.perf_counter()

    def end(self) -> None:
        """Ends the current part of a phase."""
        peak, seconds = self.peaks.get(self._stack[-1], (0.0, 0.0))
        now = time.perf_counter()
        self.peaks[self._stack[-1]] = [max(peak, status("VmHWM")), seconds + now - self._began]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._began = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to `name`."""
        self.end()
        self._stack.append(name)
        try:
            yield
        finally:
            self.end()
            self._stack.pop()

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Makes every call of a function a phase."""
        original: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(original)
        def watched(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return jax.block_until_ready(original(*arguments, **options))

        setattr(owner, function, watched)


def settings(options: argparse.Namespace) -> list[str]:
    """The run as overrides of the preset `synthetic`."""
    rows = int(options.gib * GIB / BYTES_A_ROW)
    return [
        "data.rows=" + ",".join(str(rows * share // 16) for share in SHARES),
        "data.train_rows=1000000",
        "data.validation_rows=8192",
        "data.test_rows=8192",
        "train.batch_size=4096",
        f"train.eval_every={options.steps}",
        f"mesh.devices={options.devices}",
        "mesh.platform=cpu",
        "plan=row_wise",
        f"train.checkpoint_copy={options.copy}",
    ]


def run(what: str, folder: Path, options: argparse.Namespace) -> None:
    """One process: prints its phases as JSON."""
    phases = Phases()
    phases.watch(Trainer, "init_state", "initialise")
    phases.watch(runs, "resume", "restore")
    phases.watch(runs, "_chosen", "choose")
    phases.watch(callbacks.SaveCheckpoint, "_save", "save")
    phases.watch(callbacks.Evaluate, "_evaluate", "evaluate")
    phases.watch(runs, "fit", "train")
    phases.watch(measures, "evaluate", "evaluate")
    if what == "evaluate":
        runs.evaluate(folder)
    else:
        steps = options.steps if what == "train" else 2 * options.steps
        runs.train(load("synthetic", [*settings(options), f"train.steps={steps}"]), folder)
    phases.end()
    print(json.dumps(phases.peaks))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=12.0, help="size of tables and slots together")
    parser.add_argument("--devices", type=int, default=8, help="host devices")
    parser.add_argument("--steps", type=int, default=20, help="steps of 4096 samples before each of the two saves")
    parser.add_argument("--copy", default="auto", help="train.checkpoint_copy: auto, always or never")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        run(options.process[0], Path(options.process[1]), options)
        return
    bound, worst = 1.25 * options.gib + 2, 0.0
    print(f"tables and slots {options.gib} GiB on {options.devices} host devices; the bound is {bound:.2f} GiB")
    print(f"{'process':10} {'phase':12} {'peak GiB':>9} {'of tables':>9} {'seconds':>9}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for what in ("train", "resume", "evaluate"):
            command = [sys.executable, __file__, *sys.argv[1:], "--process", what, f"{folder}/run"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"the process {what} ended with status {done.returncode}")
            for phase, (peak, seconds) in json.loads(done.stdout.splitlines()[-1]).items():
                print(f"{what:10} {phase:12} {peak:9.2f} {peak / options.gib:9.2f} {seconds:9.1f}", flush=True)
                worst = max(worst, peak)
    print(f"peak {worst:.2f} GiB: {'within' if worst <= bound else 'ABOVE'} the bound of {bound:.2f} GiB")
    sys.exit(worst > bound)


if __name__ == "__main__":
    main()
