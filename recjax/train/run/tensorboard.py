"""Event files for TensorBoard: what metrics.jsonl holds, drawn by another program."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from recjax.errors import ConfigError
from recjax.utils.files import disk_error


def require() -> ModuleType:
    """The package that writes event files.

    Raises:
      ConfigError: it is not installed; the message names the extra.
    """
    try:
        import tensorboardX.event_file_writer
    except ImportError as error:
        raise ConfigError(
            f"train.tensorboard=true needs a package that is not installed ({error}). Install the extra: "
            'pip install -c constraints.txt -e ".[tensorboard]", or set train.tensorboard=false.'
        ) from error
    module: ModuleType = tensorboardX
    return module


class EventFile:
    """One event file in a run folder, as `tensorboard --logdir` finds it.

    A line of metrics.jsonl {"step": 7, "split": "train", "loss": 0.5} becomes the scalar train/loss at step 7. The
    file is written anew from those lines whenever it is opened, so a resumed run has every step once. The times in it
    are those of writing.
    """

    def __init__(self, folder: Path, lines: bytes) -> None:
        """Replaces the event files in `folder` by one with these lines.

        Args:
          folder: the run folder.
          lines: content of metrics.jsonl.

        Raises:
          ConfigError: the package is missing.
          TrainingError: no space, no permission.
        """
        package = require()
        self._event = package.proto.event_pb2.Event
        self._folder = folder
        try:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            # Not the package's SummaryWriter: its queue blocks for ever once the disk is full.
            self._writer: Any = package.event_file_writer.EventsWriter(str(folder / "events"))
        except OSError as error:
            raise disk_error(folder / "events.out.tfevents", error, len(lines)) from error
        for line in lines.splitlines():
            self._add(json.loads(line))
        self._flush()

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl; values that are None stay out.

        Raises:
          TrainingError: no space.
        """
        self._add(line)
        self._flush()

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # every write has been flushed, or has failed by itself
            self._writer.close()

    def _add(self, line: Mapping[str, Any]) -> None:
        event = self._event(wall_time=time.time(), step=line["step"])
        for key, value in line.items():
            if key not in ("step", "split") and value is not None:
                event.summary.value.add(tag=f"{line['split']}/{key}", simple_value=value)
        self._writer.write_event(event)

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError as error:
            raise disk_error(self._folder / "events.out.tfevents", error, 0) from error
