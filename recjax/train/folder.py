"""The folder of a run: whose it is, and that nobody else writes to it."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import IO

from recjax import config as machinery
from recjax.errors import ConfigError, RecjaxError, TrainingError
from recjax.presets import FREE_ON_RESUME, RunConfig
from recjax.train.files import write_json


class RunFolder:
    """A run folder opened for writing. A context manager: leaving it releases the lock.

    config.json    the config, lossless
    metrics.jsonl  one JSON object a line
    checkpoints/   see checkpoint.py
    summary.json, curves.png   at the end
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        """Creates the folder, or opens the one of an earlier run of the same config.

        Raises:
          ConfigError: the folder belongs to a run of another config (every differing key is named), or
            is something else altogether.
          TrainingError: no permission, no space, or another process is training there.
        """
        self.path = path
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--out {path} is a file. Name a folder, existing or new.")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(path / ".lock", "w")  # noqa: SIM115 (held until __exit__)
        except OSError as error:
            raise TrainingError(
                f"the run folder {path} cannot be written: {error.strerror}. Choose an --out where you may write, or "
                "change its permissions."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise TrainingError(
                f"another process is training in {path}. Wait for it, stop it, or choose another --out."
            ) from error
        try:
            self._claim(config)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, config: RunConfig) -> None:
        if self.config_file.exists():
            differing = [d for d in machinery.diff(read_config(self.path), config) if not _free(d[0])]
            if differing:
                listed = "; ".join(f"{key}: {then} there, {now} here" for key, then, now in differing)
                raise ConfigError(
                    f"{self.path} holds a run of another config ({listed}). Give the same settings to resume it, or "
                    "another --out to start anew."
                )
        elif any(p.name != ".lock" for p in self.path.iterdir()):
            raise ConfigError(
                f"{self.path} is not empty and holds no config.json, so it is not a run folder. Choose another --out."
            )
        write_json(self.config_file, json.loads(machinery.to_json(config)))

    @property
    def config_file(self) -> Path:
        """config.json."""
        return self.path / "config.json"

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def read_config(path: Path) -> RunConfig:
    """The config of an existing run folder.

    Raises:
      ConfigError: no such folder, or its config.json is missing or damaged.
    """
    file = path / "config.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not a run folder: it has no config.json. Name the --out folder of `recjax train`."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecjaxError(
            f"{file} cannot be read: {error}. Check its permissions, or restore it from a copy."
        ) from error
    return machinery.from_json(RunConfig, text, source=str(file))


def _free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)
