"""Trackers: other programs that show what metrics.jsonl holds, each line once, also after a resume.

All of them write into the run folder and need no network. A tracker is opened with the lines that a resumed run keeps,
and replaces what an earlier process left: so it never shows a step twice, nor one that a killed run had trained beyond
its last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from recjax.errors import ConfigError, TrainingError


class Tracker(Protocol):
    """Takes the lines of metrics.jsonl as they are written."""

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines; values that are None stay out. Raises TrainingError where they cannot be kept."""

    def close(self) -> None:
        """Ends the record; what was written is kept."""


# Makes a tracker in a run folder; the settings, by dotted key, are shown beside its lines.
Opened = Callable[[Path, Mapping[str, Any]], Tracker]


def _tensorboard(run: Path, settings: Mapping[str, Any]) -> Tracker:
    from recjax.train.run.tensorboard import EventFile

    return EventFile(run)


def _wandb(run: Path, settings: Mapping[str, Any]) -> Tracker:
    from recjax.train.run.wandb_run import WandbRun

    return WandbRun(run, settings)


def _mlflow(run: Path, settings: Mapping[str, Any]) -> Tracker:
    from recjax.train.run.mlflow_run import MlflowRun

    return MlflowRun(run, settings)


# Name, which is that of its extra too -> (module to import, setting that asks for it, maker).
_KNOWN: dict[str, tuple[str, str, Opened]] = {
    "tensorboard": ("tensorboardX.event_file_writer", "train.tensorboard=true", _tensorboard),
    "wandb": ("wandb", "train.trackers=wandb", _wandb),
    "mlflow": ("mlflow", "train.trackers=mlflow", _mlflow),
}


def require(name: str) -> ModuleType:
    """The package that a tracker writes with, by the tracker's name.

    Raises:
      ConfigError: it is not installed; the message names the extra.
    """
    module, setting, _ = _KNOWN[name]
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs a package that is not installed ({error}). Install the extra: "
            f'pip install -c constraints.txt -e ".[{name}]", or leave the setting out.'
        ) from error


class Trackers:
    """The trackers of a run, as one."""

    def __init__(self, names: Sequence[str], run: Path, lines: bytes, settings: Mapping[str, Any]) -> None:
        """Opens them with the lines that are there.

        Args:
          names: which.
          run: the run folder.
          lines: content of metrics.jsonl.
          settings: dotted key -> value, of the run's config.

        Raises:
          ConfigError: a package is missing.
          TrainingError: no space, no permission.
        """
        for name in names:
            require(name)
        self._opened = [_KNOWN[name][2](run, settings) for name in names]
        if self._opened and lines:
            self._write([json.loads(line) for line in lines.splitlines()])

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl, as JSON has it.

        Raises:
          TrainingError: no space, or a tracker's own failure.
        """
        self._write([line])

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for tracker in self._opened:
            tracker.write(lines)

    def close(self) -> None:
        """Closes them."""
        for tracker in self._opened:
            tracker.close()


def measures(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields ("train/loss", 0.5) and the like of a line of metrics.jsonl; what is not a number stays out."""
    for key, value in line.items():
        if key not in ("step", "split") and isinstance(value, (int, float)):
            yield f"{line['split']}/{key}", float(value)


def failed(name: str, what: object, error: Exception) -> TrainingError:
    """The error for a tracker that cannot keep lines; `what` says where."""
    return TrainingError(
        f"{name} cannot keep the metrics in {what} ({' '.join(str(error).split())[:300]}). Mend that and give the same "
        "command again, or leave the tracker out: metrics.jsonl has every line, and the run goes on without."
    )
