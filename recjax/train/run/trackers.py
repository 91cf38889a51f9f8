"""Trackers: other programs that show what metrics.jsonl holds, each line once, also after a resume.

All of them write into the run folder and need no network. A tracker is opened with the lines that a resumed run keeps,
and replaces what an earlier process left: so it never shows a step twice, nor one that a killed run had trained beyond
its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from recjax.errors import ConfigError, TrainingError


class Tracker(Protocol):
    """Takes the lines of metrics.jsonl as they are written."""

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines; values that are None stay out. Raises TrainingError where they cannot be kept."""

    def close(self) -> None:
        """Ends the record; what was written is kept."""


# Name, which is that of its extra too -> (module to import, setting that asks for it).
_KNOWN = {
    "tensorboard": ("tensorboardX.event_file_writer", "train.tensorboard=true"),
    "wandb": ("wandb", "train.trackers=wandb"),
    "mlflow": ("mlflow", "train.trackers=mlflow"),
}


def require(name: str) -> ModuleType:
    """The package that a tracker writes with, by the tracker's name.

    Raises:
      ConfigError: it is not installed; the message names the extra.
    """
    module, setting = _KNOWN[name]
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs a package that is not installed ({error}). Install the extra: "
            f'pip install -c constraints.txt -e ".[{name}]", or leave the setting out.'
        ) from error


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
