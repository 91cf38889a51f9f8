"""Files of recjax that a piece of work enters, one a line: `python -m support.entered training` or `... step`.

Each is a process of its own, since what JAX has traced once it does not trace again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

TESTS = Path(__file__).parents[1]
DEVICES = 8


class Entered:
    """Notes, while it is open, which files of a package have a function that is called, in this and in new threads.

    What runs because something is imported does not count, nor do methods that Python writes (those of dataclasses).

    Attributes:
      files: their paths from the folder that holds the package.
    """

    def __init__(self, package: Path) -> None:
        self.files: set[str] = set()
        self._start = f"{package}{os.sep}"
        self._top = len(f"{package.parent}{os.sep}")
        self._importing = threading.local()  # how many imports, one within another, are under way in a thread

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code, depth = frame.f_code, getattr(self._importing, "depth", 0)
        if code.co_name == "_find_and_load" and code.co_filename == "<frozen importlib._bootstrap>":
            self._importing.depth = depth + {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not depth and code.co_filename.startswith(self._start):
            self.files.add(code.co_filename[self._top :].replace(os.sep, "/"))


def training() -> set[str]:
    """Files entered by `recjax.fit` of a small row-wise DLRM: four steps, two evaluations, two checkpoints, the end."""
    import recjax

    small = """
        data.rows=300,50,200 data.ids_per_bag=1,0,3 data.dense=3 data.train_rows=256 data.validation_rows=64
        data.test_rows=64 embedding.dim=8 model.bottom=16,8 model.top=16,1 train.batch_size=64 train.eval_batch_size=64
        train.steps=4 train.eval_every=2 train.checkpoint_every=2 plan=row_wise
    """
    config = recjax.load("synthetic", *small.split(), f"mesh.devices={DEVICES}")
    with tempfile.TemporaryDirectory() as folder, Entered(_package()) as entered:
        recjax.fit(config, folder)
    return entered.files


def step() -> set[str]:
    """Files entered from one batch of one row-wise table to the table after it: routed, laid out, traced, run."""
    import jax
    import optax

    from recjax.data.synthetic.clicks import Synthetic
    from recjax.embedding.optim import RowWiseAdagrad
    from recjax.models.dlrm import DLRMConfig
    from support.problems import problem, trainer_of

    source = Synthetic(rows=(300,), ids_per_bag=(3,), weighted=(False,), train_rows=256).open()
    model = DLRMConfig(bottom=(16, 8), top=(16, 1))
    small = problem(source, model, RowWiseAdagrad(0.05), 8, steps=1, batch_size=64, tx=optax.sgd(0.1))
    trainer = trainer_of(small, DEVICES)
    state = trainer.init_state()
    before = jax.device_get(state.tables)
    with Entered(_package()) as entered:
        stream = trainer.inputs_of(small.batches, small.batch_size)
        inputs = next(stream)
        state, metrics = trainer.train_step(trainer.admit(state, stream.latest), inputs)
        jax.block_until_ready((state, metrics))
    after = jax.device_get(state.tables)
    assert all((before[name] != after[name]).any() for name in before)
    return entered.files


WORK = {work.__name__: work for work in (training, step)}


def _package() -> Path:
    import recjax

    return Path(recjax.__file__).parent


def measure(work: str) -> list[str]:
    """Returns the files that one of WORK enters, in a new process on host devices: no cache, no optional kernels."""
    settings = ("RECJAX_", "JAX_", "XLA_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    environment |= {
        "PYTHONPATH": str(TESTS.parent),  # not this folder, whose sitecustomize.py changes how programs are kept
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "NPROC": str(2 * DEVICES),
        "RECJAX_KERNELS": "off",
    }
    command = [sys.executable, "-m", "support.entered", work]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=TESTS, env=environment, **pipes) as process:
        out, err = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}\n{err}")
    return out.split()


if __name__ == "__main__":
    print("\n".join(sorted(WORK[sys.argv[1]]())))
