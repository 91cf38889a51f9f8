"""Does a training with rows on disk survive kill -9? Kills one again and again, and compares with a run left alone.

    python benchmarks/tier_kills.py --kills 20

The run left alone has all rows on the devices. The other one has caches, a little host memory and a file; it is killed
at random moments, resumed by the same command, and killed again, until it has been killed so often; then it may end.
Its lines of metrics.jsonl and its last checkpoint must be those of the first, to the bit. Takes ten seconds a kill.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.state import one_version
from recjax.utils.lazy_arrays import load

SETTINGS = tuple(
    """
    train.batch_size=64 train.log_every=1 train.checkpoint_every=7 data.rows=6000,300,4000 plan=row_wise
    data.ids_per_bag=1,0,3 data.train_rows=65536 data.validation_rows=256 data.test_rows=256 embedding.optimizer=adam
    """.split()
)


def command(out: Path, steps: int, *settings: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "recjax",
        "train",
        "synthetic",
        *SETTINGS,
        f"train.steps={steps}",
        *settings,
        "--out",
        str(out),
    ]


def steps_done(out: Path) -> int:
    """Steps of the newest checkpoint of a run."""
    names = [path.name for path in (out / "checkpoints").glob("*") if path.name.isdigit()]
    return max(map(int, names), default=0)


def end_of(out: Path) -> tuple[list[tuple[int, str, float]], Any]:
    """The lines of a run, and the bits of its last checkpoint."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    with Checkpoints(out / "checkpoints", keep=2) as checkpoints:
        arrays = checkpoints.newest(print, lambda found: load(one_version(found.arrays)))
    flat: dict[str, bytes] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                add(f"{prefix}/{key}", below)
        else:
            flat[prefix] = np.asarray(value).tobytes()

    add("", arrays)
    return [(line["step"], line["split"], line["loss"]) for line in lines], flat


def main() -> int:
    """Returns 1 if the runs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of both runs, such as embedding.hot.rows=200")
    options = parser.parse_args()
    rng, steps = random.Random(options.seed), 60 * options.kills
    both = (f"mesh.devices={options.devices}", *options.settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run(command(folder / "alone", steps, *both), check=True, capture_output=True)
        tiers = (*both, "tier.device_bytes=90kB", "tier.dram_bytes=60kB", f"tier.disk={folder / 'scratch'}")
        killed = 0
        while killed < options.kills:
            process = subprocess.Popen(
                command(folder / "killed", steps, *tiers), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            before = steps_done(folder / "killed")
            while process.poll() is None and steps_done(folder / "killed") == before:
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 1.0))
            if process.poll() is not None:
                print(f"the run ended after {killed} kills")
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            print(f"kill {killed}: resumes from step {steps_done(folder / 'killed')} of {steps}", flush=True)
            left = [path.name for path in (folder / "scratch").iterdir()]
            assert not left, f"scratch files stayed: {left}"
        subprocess.run(command(folder / "killed", steps, *tiers), check=True, capture_output=True)
        same = end_of(folder / "alone") == end_of(folder / "killed")
        print(f"{killed} kills: {'the same to the bit' if same else 'DIFFERENT'}")
        return int(not same)


if __name__ == "__main__":
    sys.exit(main())
