"""Results of the finished parts of a study, a line of a file each: a stopped study goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.utils.files import jsonable, write_json

RECORDS, SETUP = "finished.jsonl", "setup.json"


class Finished:
    """The parts of a study that are done.

    Args:
      folder: of the study, made if need be.
      setup: JSON values that all results depend on.

    Raises:
      ConfigError: the folder holds parts that were made with another setup.
      DataError: a line other than the last is damaged.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / RECORDS
        setup = json.loads(json.dumps(jsonable(dict(setup))))
        then = json.loads((folder / SETUP).read_text(encoding="utf-8")) if (folder / SETUP).is_file() else setup
        if differing := sorted(key for key in {*setup, *then} if then.get(key) != setup.get(key)):
            raise ConfigError(
                f"{folder} holds parts of this study that were made with other settings ({', '.join(differing)}). Give "
                "the same ones to go on with them, or another --out."
            )
        write_json(folder / SETUP, setup)
        self.results = self._read()

    def _read(self) -> dict[str, Any]:
        """Part -> result; a last line that a killed run left unfinished is cut off."""
        if not self._path.is_file():
            return {}
        found, good = {}, 0
        lines = self._path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line has no end")
                record = json.loads(line)
                found[record["part"]] = record["result"]
            except (ValueError, KeyError, TypeError) as error:
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
        return self.results[part]
