"""metrics.jsonl as an Arrow table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recjax.errors import ConfigError, TrainingError
from recjax.utils import strict_json

if TYPE_CHECKING:
    import pyarrow as pa

_NULLS, _ALWAYS = 100, 10**6  # places of the table for each value in the lines, and those that it may have in any case


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; without a last one that is being written.

    Raises:
      ConfigError: there is no such file, as the run has not trained yet.
      TrainingError: it cannot be read, or a line is no JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: the run has not trained yet. Train it first.") from error
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror}. Make it readable for this user.") from error
    found = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            parsed = strict_json.parse(line)
        except ValueError as error:
            raise TrainingError(f"{path}, line {number}: {error}. Delete that line, or restore the file.") from error
        if not isinstance(parsed, dict):
            raise TrainingError(f"{path}, line {number} is no JSON object. Delete that line, or restore the file.")
        found.append(parsed)
    return found


def table_of(lines: list[dict[str, Any]]) -> pa.Table:
    """One row a line and one column a key, in the order in which keys first appear; null where a line lacks one.

    Integers are int64 and other numbers float64, also where some lines have integers; what is neither a number nor a
    text nor true or false is its JSON text.

    Raises:
      TrainingError: nearly all of the table would be null, as where every line has keys of its own.
    """
    import pyarrow as pa

    names = list(dict.fromkeys(name for line in lines for name in line))
    if len(names) * len(lines) > _NULLS * sum(map(len, lines)) + _ALWAYS:
        raise TrainingError(
            f"the {len(lines):,} lines of metrics have {len(names):,} different keys, most of them in few lines, which "
            "makes no table. Read metrics.jsonl line by line, or restore it."
        )
    return pa.table({name: _column([line.get(name) for line in lines]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds and kinds <= {int, float}:
        return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
    if kinds in ({str}, {bool}, set()):
        return pa.array(values)
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())
