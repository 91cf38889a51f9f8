"""Results of the finished parts of a study, a line of a file each: a stopped study goes on from there.

Beside it stands a page of what is finished, made again after each part, so that a study which was stopped, in whatever
way, leaves one. The report of the whole study takes its place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.lab.studies import report
from recjax.utils import strict_json
from recjax.utils.files import jsonable, write_json

RECORDS, SETUP = "finished.jsonl", "setup.json"


class Finished:
    """The parts of a study that are done.

    Args:
      folder: of the study, made if need be.
      setup: JSON values that all results depend on.
      name: of the study, and of its page.

    Raises:
      ConfigError: the folder holds parts that were made with another setup.
      DataError: a line other than the last is damaged, or what is there cannot be read.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any], name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name, self._began = folder, name, time.monotonic()
        self._about: dict[str, Any] = {}
        self._path = folder / RECORDS
        setup = json.loads(json.dumps(jsonable(dict(setup))))
        then = _setup_of(folder, setup)
        if differing := sorted(key for key in {*setup, *then} if then.get(key) != setup.get(key)):
            raise ConfigError(
                f"{folder} holds parts of this study that were made with other settings ({', '.join(differing)}). Give "
                "the same ones to go on with them, or another --out."
            )
        write_json(folder / SETUP, setup)
        self.results = self._read()

    def _read(self) -> dict[str, Any]:
        """Part -> result; a last line that a killed run left unfinished is cut off."""
        if not self._path.exists():
            return {}
        found, good = {}, 0
        lines = _content(self._path).splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line has no end")
                record = strict_json.parse(line)
                if not isinstance(record, dict) or not isinstance(record.get("part"), str) or "result" not in record:
                    raise ValueError('no object with a text "part" and a "result"')
                found[record["part"]] = record["result"]
            except ValueError as error:
                if number < len(lines):
                    raise DataError(
                        f"{self._path}:{number}: {error}. Delete that line; its part of the study is then done again."
                    ) from error
                with self._path.open("r+b") as file:
                    file.truncate(good)
            good += len(line)
        return found

    def get(self, part: str, make: Callable[[], Any]) -> Any:
        """The result of a part, which is made and kept unless it is there.

        Args:
          part: name, another one for each part.
          make: returns JSON values.

        Returns:
          what `make` returned, now or in an earlier run, as JSON gives it back (tuples are lists, keys texts).
        """
        if part not in self.results:
            line = json.dumps(jsonable({"part": part, "result": make()}), allow_nan=False)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self.results[part] = json.loads(line)["result"]
            self._about = self._about or report.provenance(self._began)
            page = report.unfinished(self._name, self.results, self._about)
            report.write(page, {"finished": self.results}, self._folder)
        return self.results[part]


def _setup_of(folder: Path, new: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a study's folder says that its results depend on, `new` if it says nothing yet (DataError)."""
    path = folder / SETUP
    if not path.exists():
        return new
    try:
        setup = strict_json.parse(_content(path))
        if not isinstance(setup, dict):
            raise strict_json.JsonError("no JSON object")
    except strict_json.JsonError as error:
        raise DataError(
            f"{error.at(path)}: {error}. It says which settings the study's parts were made with: restore it, or "
            "choose another --out."
        ) from None
    return setup


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise DataError(f"{path} is no plain file. Remove it, or choose another --out.")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Choose another --out.") from error
