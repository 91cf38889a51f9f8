"""Commands for tests: `recjax ...` in this process or in one of its own, on a small preset or small prepared data."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recjax.cli.main import main
from recjax.data import given
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.storage import blocks
from support import forked

# One table of each kind; 40 steps an epoch, the last of 4 samples; every step is logged, every fifth is kept.
PRESET = """
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad
from recjax.parallel.mesh import MeshConfig
from recjax.models.dlrm import DLRMConfig
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig

config = RunConfig(
    data=Synthetic(
        rows=(300, 50, 200), ids_per_bag=(1, 0, 3), weighted=(False, True, False), dense=3,
        train_rows=2500, validation_rows=600, test_rows=700,
    ),
    model=DLRMConfig(bottom=(16, 8), top=(16, 1)),
    embedding=EmbeddingConfig(dim=8, optimizer=RowWiseAdagrad(learning_rate=0.05)),
    train=TrainConfig(
        batch_size=64, epochs=2, optimizer=DenseAdagrad(0.05), eval_every=15, checkpoint_every=5, log_every=1
    ),
    mesh=MeshConfig(devices=8, platform="cpu"),
    plan="row_wise",
)
"""

SMALL = ("train.steps=2", "mesh.devices=2")  # the shortest run of the preset

# Settings for a run of the preset on what `prepare` made: one epoch of ten steps in the order of the file.
OWN = ("data=prepared", "train.batch_size=64", "train.shuffle=false", "train.epochs=1", "mesh.devices=2")
SCHEMA = Schema(("d0", "d1"), (Feature("x", 10), Feature("y", 20, None)))


@dataclasses.dataclass
class Done:
    """A command that has ended: its exit status and all that it wrote."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """The one JSON object that `--json` promises on standard output."""
        assert self.status == 0, self.err
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


def write_preset(folder: Path) -> Path:
    """The small preset as a file in `folder`."""
    path = folder / "small.py"
    path.write_text(PRESET)
    return path


def inside(*arguments: object) -> Done:
    """Runs a command in this process, which keeps what it has imported and compiled."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # argparse's own refusals
            status = int(exit.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def start(*arguments: object, before: str = "", **options: Any) -> subprocess.Popen[str]:
    """Starts a command in a process of its own, a fork; `before` is Python that runs there first."""
    program = f"{before}\nimport sys\nfrom recjax.cli.main import main\nsys.exit(main())"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | {"GLIBC_TUNABLES": ""} | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return forked.Popen(command, text=True, env=environment, **pipes)


def outside(*arguments: object, **options: Any) -> Done:
    """Runs a command in a process of its own; options as for `start`."""
    with start(*arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Done(process.returncode, out or "", err or "")


def assert_refused(done: Done, status: int, *patterns: str) -> str:
    """Checks that a command ended as promised: its status, and one paragraph at the end of standard error.

    Args:
      done: the command.
      status: the exit status.
      *patterns: regular expressions that the paragraph must contain.

    Returns:
      The paragraph.
    """
    assert done.status == status, f"exit status {done.status} instead of {status}:\n{done.err}"
    assert done.out == ""
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("recjax: error: ") and done.err.count("recjax: error: ") == 1, done.err
    for pattern in patterns:
        assert re.search(pattern, last), f"no {pattern!r} in: {last}"
    return last


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run that says what was learnt, and its content (throughput differs from run to run)."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("metrics.jsonl", "summary.json", ".lock")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def lines_of(run: Path, split: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about one split."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def steps_of(run: Path, split: str) -> list[int]:
    """The steps of the lines of metrics.jsonl about one split."""
    return [line["step"] for line in lines_of(run, split)]


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its path."""
    from recjax.train.checkpoint.checkpoints import Checkpoints
    from recjax.utils.lazy_arrays import load  # which imports JAX

    found = {}

    def walk(tree: dict[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{path}/{key}")
            else:
                found[f"{path}/{key}"] = value

    walk(Checkpoints(run / "checkpoints", 2).restore(step, lambda restored: load(restored.arrays)), "")
    assert len(found) > 5
    return found


def assert_same_arrays(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    different = [key for key in left if left[key].tobytes() != right[key].tobytes()]
    assert not different
    assert [a.dtype for a in left.values()] == [a.dtype for a in right.values()]


def _block(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    count = 300
    lengths = rng.integers(0, 3, count).astype(np.int32)
    bags = {"x": Bags(rng.integers(0, 10, (count, 1))), "y": Bags(rng.integers(0, 20, lengths.sum()), lengths)}
    dense = rng.normal(size=(count, 2)).astype(np.float32)
    return Batch(dense, bags, (np.arange(count) % 2).astype(np.float32), np.ones(count, np.float32))


def prepare(folder: Path, change: Callable[[Batch], None] = lambda block: None) -> Path:
    """Prepared data of SCHEMA: 600 training rows in two blocks, and two further blocks.

    Args:
      folder: where to.
      change: makes something wrong in the second training block, which no check stands in the way of.
    """
    wrong = _block(1)
    change(wrong)
    splits = {"train": [_block(0), wrong], "validation": [_block(2)], "test": [_block(3)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given, "validate", lambda *_: None)
        blocks.write_prepared(folder, "own", SCHEMA, splits, {})
    return folder
