"""The peer's side of a comparison: writes what it needs, starts it as a child process, and asks it for rounds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from recjax.config.run import RunConfig
from recjax.config.train import Constant, DenseAdagrad
from recjax.data.batch import Schema
from recjax.data.pipeline import batches
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.row_order import RowOrder
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError, TrainingError
from recjax.lab.bench import peer_torch
from recjax.lab.bench.timing import UNTIMED, Round
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.malloc import passed_on
from recjax.train import state as states
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer
from recjax.utils import processor
from recjax.utils.lazy_arrays import as_lazy

KERNELS = {"torchrec": "fbgemm", "torch": "torch"}  # what --against names -> the peer's tables
_BATCH_BYTES = 2**29  # batches that the peer holds: about this many bytes, 4 to 64 batches


class Peer(contextlib.AbstractContextManager["Peer"]):
    """A child process that trains the same model from the same weights on the same batches."""

    def __init__(self, kind: str, trainer: Trainer, state: states.TrainState, python: str | None = None) -> None:
        """Starts it; it is ready when this returns.

        Args:
          kind: one of KERNELS.
          trainer: ours, which `require_known` has let pass.
          state: weights to start from, on which no step has been taken.
          python: the interpreter to run it with; None takes this one.

        Raises:
          ConfigError: its packages are missing.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="recjax-peer-")
        folder = Path(self._folder.name)
        _write(trainer, state, KERNELS[kind], folder)
        command = [python or sys.executable, peer_torch.__file__, str(folder)]
        with open(folder / "errors", "w") as errors:
            try:
                with passed_on():  # both sides have the same allocator
                    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
                    self._process = subprocess.Popen(command, text=True, env=_environment(), **pipes)
            except OSError as error:
                self._folder.cleanup()
                raise ConfigError(f"--peer-python {python} cannot be started: {error.strerror}.") from error
        self.kind = kind
        try:
            self.about: dict[str, Any] = self._answer()["about"]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def round(self, precision: str, steps: int, untimed: int = UNTIMED) -> Round:
        """Trains as `Ours.round` does."""
        return Round(**self._ask({"precision": precision, "steps": steps, "untimed": untimed}))

    def choose(self, precision: str) -> str:
        """Lets it find out how it is faster: "eager" or "torch.compile". It trains meanwhile."""
        dense: str = self._ask({"choose": precision})["dense"]
        return dense

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: it gives no answer
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        said = (Path(self._folder.name) / "errors").read_text().strip().splitlines() or ["nothing"]
        if "ModuleNotFoundError" in said[-1] or "ImportError" in said[-1]:
            raise ConfigError(
                f"the peer's packages are missing: {said[-1]}. Install them here with pip install -c constraints.txt "
                '-e ".[peers]", or in another environment, whose interpreter --peer-python then names.'
            )
        raise TrainingError(f"the peer ended with status {self._process.returncode}: {' '.join(said[-3:])}")

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.close()

    def close(self) -> None:
        """Ends the process and removes its files."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._folder.cleanup()


def _environment() -> dict[str, str]:
    """Ours without what makes Python find recjax's own packages first."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def require_known(config: RunConfig, schema: Schema) -> None:
    """Refuses what the peer does not know (ConfigError)."""
    if why := _cannot(config, schema):
        raise ConfigError(f"--against cannot compare this config: {why}.")


def _cannot(config: RunConfig, schema: Schema) -> str:
    """Features that the peer lacks for this config; empty if nothing."""
    model, train = config.model, config.train
    tables, features = specs(config, schema)
    if not (
        (isinstance(model, DLRMConfig) and model.interaction == "dot" and not model.interaction_itself)
        or (isinstance(model, DCNv2Config) and model.structure == "stacked" and model.rank and model.bottom)
    ):
        return "it knows model=dlrm with the dot interaction, and model=dcnv2, stacked and of low rank"
    if not schema.dense:
        return "its models have a bottom MLP, and these data no dense features for one"
    if any(f.pooling != "sum" or f.bag is None or f.weighted or f.table != f.name for f in features):
        return "its bags are of fixed size, unweighted and summed, and each feature has its own table"
    if len({t.dim for t in tables}) != 1 or len({t.optimizer for t in tables}) != 1:
        return "its tables have one dimension and one optimizer"
    if any(t.dtype != "float32" for t in tables):
        return "its tables hold float32"
    table, dense = tables[0].optimizer, train.optimizer
    if not isinstance(table, RowWiseAdagrad) or table != RowWiseAdagrad(table.learning_rate, table.eps):
        return "its tables have row-wise Adagrad without decay that starts at 0"
    if not isinstance(dense, DenseAdagrad) or dense.l2 or dense.weight_decay:
        return "its dense part has Adagrad without decay"
    if train.schedule != Constant() or train.clip_norm or train.accumulate > 1:
        return "it has no schedule, clipping or accumulation"
    return ""


def _write(trainer: Trainer, state: states.TrainState, kernel: str, folder: Path) -> None:
    config, schema = trainer.config, trainer.source.schema
    tables, _ = specs(config, schema)
    table_rule: Any = tables[0].optimizer
    dense_rule: Any = config.train.optimizer
    on_gpu = trainer.mesh.devices.flat[0].platform == "gpu"
    model: Any = config.model
    spec = {
        "kernel": kernel,
        "device": "cuda" if on_gpu else "cpu",
        "threads": processor.cores(),
        "batch_size": config.train.batch_size,
        "model": {"kind": model.kind, "bottom": model.bottom, "top": model.top}
        | ({"cross_layers": model.cross_layers} if isinstance(model, DCNv2Config) else {}),
        "tables": [{"rows": f.rows, "dim": t.dim, "bag": f.bag} for f, t in zip(schema.features, tables, strict=True)],
        "table_optimizer": {"learning_rate": table_rule.learning_rate, "eps": table_rule.eps},
        "dense_optimizer": {
            "learning_rate": dense_rule.learning_rate,
            "eps": dense_rule.eps,
            "initial_accumulator": dense_rule.initial_accumulator,
        },
    }
    (folder / "peer.json").write_text(json.dumps(spec))
    _write_batches(trainer, folder)
    _write_weights(trainer, state, tables, folder)


def _write_batches(trainer: Trainer, folder: Path) -> None:
    train, schema = trainer.config.train, trainer.source.schema
    sample_bytes = 4 * (len(schema.dense) + 1 + sum(f.bag or 0 for f in schema.features))
    count = max(4, min(64, _BATCH_BYTES // (sample_bytes * train.batch_size)))
    order: dict[str, Any] = {"shuffle": train.shuffle, "shuffle_blocks": train.shuffle_blocks, "workers": 0}
    taken = []
    for batch in batches(trainer.source, "train", train.batch_size, seed=trainer.config.seed, **order):
        if batch.size == train.batch_size:  # the last one of an epoch may be short
            taken.append(batch)
        if len(taken) == count:
            break
    np.save(folder / "batch_dense.npy", np.stack([b.dense for b in taken]))
    np.save(folder / "labels.npy", np.stack([b.labels for b in taken]))
    ids = [np.concatenate([b.bags[f.name].ids.ravel() for f in schema.features]) for b in taken]
    np.save(folder / "ids.npy", np.stack(ids).astype(np.int32))


def _write_weights(trainer: Trainer, state: states.TrainState, tables: tuple[TableSpec, ...], folder: Path) -> None:
    arrays = trainer.export(state)
    for t, table in enumerate(tables):
        rows = as_lazy(arrays["tables"][table.name]["rows"]).load()
        np.save(folder / f"table_{t}.npy", rows[RowOrder(table.rows).position(np.arange(table.rows))])
    dense = {}
    for path, value in arrays["dense"].items():  # bottom.layers.0.kernel [in, out] -> bottom.0.weight [out, in]
        name = path.removesuffix(".value").replace(".layers.", ".")
        dense[name.replace("kernel", "weight")] = value.T if name.endswith("kernel") else value
    np.savez(folder / "dense.npz", **dense)
