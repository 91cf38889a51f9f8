"""Bytes and seconds of checkpoints of a training with rows on the host, whole ones beside increments.

    python benchmarks/tier_checkpoints.py [a.b=value ...] [--steps 60,1,4,16] [--folder DIR]

Trains the same steps twice, with checkpoints after the same ones: whole each time, and increments after the first. It
prints the rows of each, the bytes of its files, the seconds that training waits for it (rows of the caches come to the
host, arrays go to files), and those until it is complete on the disk; and in the end the seconds of a restore.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from recjax.config import presets
from recjax.train.build import build_trainer
from recjax.train.callbacks import Increments
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils.text import aligned
from recjax.utils.units import size_text

SETTINGS = tuple(
    """
    data.rows=3000000,1000000,300000 data.ids_per_bag=8 data.zipf=0.8 embedding.dim=64 plan=row_wise
    embedding.optimizer=adam train.batch_size=4096 data.train_rows=4194304 tier.device_bytes=256MiB
    """.split()
)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rows_of(arrays: dict[str, Any]) -> int:
    return sum(
        len(table["positions"]) if hasattr(table["positions"], "__len__") else table["positions"].shape[0]
        for table in arrays["written"].values()
    )


def measured(trainer: Trainer, state: TrainState, folder: Path, steps: list[int]) -> list[list[str]]:
    """A line for each checkpoint, and one for a restore of the last."""
    lines, done = [], 0
    with Checkpoints(folder, 99) as checkpoints:
        increments, stream, host = Increments(trainer, checkpoints), trainer.train_inputs(host=state.host), state.host
        stream.load_state_dict({"position": 0, "capacities": {}, "peaks": {}})
        for count in steps:
            for _ in range(count):
                inputs = next(stream)
                state, _ = trainer.train_step(trainer.admit(state, stream.latest), inputs)
            done += count
            jax.block_until_ready(state)
            os.sync()
            start = time.perf_counter()
            arrays, after = increments.arrays(state, done)
            checkpoints.save(done, arrays, {}, after=after)
            checkpoints.wait_for_arrays()
            waited = time.perf_counter() - start
            increments.wait()
            complete = time.perf_counter() - start
            size = bytes_of(folder / f"{done:08}")
            lines.append(
                [
                    f"{done}",
                    f"{count}",
                    "increment" if after else "whole",
                    f"{rows_of(arrays):,}",
                    size_text(size),
                    f"{waited:.2f}",
                    f"{complete:.2f}",
                ]
            )
        stream.close()

        def use(restored: Restored) -> int:
            trainer.restore(restored.arrays, restored.step, restored.chain, host)
            return len(restored.chain)

        start = time.perf_counter()
        links = checkpoints.newest(print, use)
        lines.append([f"{done}", "", f"restored from {links}", "", "", "", f"{time.perf_counter() - start:.2f}"])
    return lines


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--steps", default="60,1,4,16", help="between checkpoints")
    parser.add_argument("--folder", help="for checkpoints; a temporary one by default")
    options = parser.parse_args()
    steps = [int(word) for word in options.steps.split(",")]
    cells = [["after step", "steps", "checkpoint", "rows", "bytes", "training waits s", "complete after s"]]
    for most in (0, len(steps)):
        config = presets.load("synthetic", [*SETTINGS, *options.settings, f"train.checkpoint_increments={most}"])
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            trainer = build_trainer(config)
            state = trainer.init_state()
            tier = state.host.tier
            assert tier is not None
            cells += measured(trainer, state, Path(folder), steps)
            tier.close()
            about = "; ".join(rows.about() for rows in tier.rows.groups.values())
            print(f"{config.train.checkpoint_increments} increments: {about}")
            del trainer, state, tier
    print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
