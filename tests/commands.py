"""Commands for tests: `recjax ...` in this process or in one of its own, on a small preset that the tests write."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import recjax
from recjax.cli import main

# One table of each kind; 40 steps an epoch, the last of 4 samples; every step is logged, every fifth is kept.
PRESET = """
from recjax.data.synthetic import Synthetic
from recjax.embedding.optim import RowWiseAdagrad
from recjax.mesh import MeshConfig
from recjax.models.dlrm import DLRMConfig
from recjax.presets import EmbeddingConfig, RunConfig
from recjax.train.options import DenseAdagrad, TrainConfig

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

# This checkout, whatever is installed.
_HERE = {"PYTHONPATH": str(Path(recjax.__file__).parent.parent)}


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
    """Starts a command in a process of its own; `before` is Python that runs there first."""
    program = f"{before}\nimport sys\nfrom recjax.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | _HERE | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, text=True, env=environment, **pipes)


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
