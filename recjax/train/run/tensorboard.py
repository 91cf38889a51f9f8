"""Event files for TensorBoard: what metrics.jsonl holds, drawn by another program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.train.run.trackers import measures, require
from recjax.utils.files import disk_error


class EventFile:
    """One event file in a run folder, as `tensorboard --logdir` finds it.

    A line of metrics.jsonl {"step": 7, "split": "train", "loss": 0.5} becomes the scalar train/loss at step 7. The
    file is rewritten whenever it is opened, so a resumed run has every step once. The times in it are those of
    writing.
    """

    def __init__(self, folder: Path) -> None:
        """Replaces the event files in `folder`, a run folder, by an empty one.

        Raises:
          ConfigError: the package is missing.
          TrainingError: no space, no permission.
        """
        require("tensorboard")
        import tensorboardX as package

        self._event = package.proto.event_pb2.Event
        self._folder = folder
        try:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            # Not the package's SummaryWriter: its queue blocks forever once the disk is full.
            self._writer: Any = package.event_file_writer.EventsWriter(str(folder / "events"))
        except OSError as error:
            raise disk_error(folder / "events.out.tfevents", error, 0, resumes=True) from error
        self._flush()

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines of metrics.jsonl; values that are None stay out.

        Raises:
          TrainingError: no space.
        """
        for line in lines:
            self._add(line)
        self._flush()

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # every write has been flushed, or has failed by itself
            self._writer.close()

    def _add(self, line: Mapping[str, Any]) -> None:
        event = self._event(wall_time=time.time(), step=line["step"])
        for key, value in measures(line):
            event.summary.value.add(tag=key, simple_value=value)
        self._writer.write_event(event)

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError as error:
            raise disk_error(self._folder / "events.out.tfevents", error, 0, resumes=True) from error
