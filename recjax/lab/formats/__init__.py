"""Formats of communication traces: each a module with `read({rank: file})`, and most with `write(trace)`.

`write` gives {file: content}. Where files are JSON, `read` also takes the function that parses one of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.lab.formats import chakra_et, chakra_graph, chakra_protobuf, param_basic, recjax_json
from recjax.lab.formats.fields import parse_file
from recjax.lab.formats.files import NO_TRACE, rank_files
from recjax.lab.formats.trace import Trace, checked
from recjax.settings.values import either

FORMATS: dict[str, ModuleType] = {
    "recjax": recjax_json,
    "param": param_basic,
    "chakra-json": chakra_et,
    "chakra-et": chakra_protobuf,
}
READ: dict[str, ModuleType] = FORMATS | {"chakra-graph": chakra_graph}  # that can be read


def read_trace(folder: Path, format: str | None = None) -> Trace:
    """Reads the trace in a folder.

    Args:
      folder: with a file for each rank, whose names end in the rank's number and .json, .json.gz or .et.
      format: a key of READ; None finds it out.

    Raises:
      ConfigError: no such format.
      DataError: there is no trace, or it is damaged or of an unknown version.
    """
    if format is not None and format not in READ:
        raise ConfigError(f"--format {format} is not known; choose {either(list(READ))}.")
    files = rank_files(folder, "" if format is None else ".et" if format == "chakra-et" else ".json")
    first = files[min(files)]
    if first.suffix == ".et":
        name = "chakra-et"
        trace: Trace = READ[name].read(files)
    else:
        parsed = {first: parse_file(first)}  # once, for its format too
        name = format or _format_of(first, parsed[first])
        trace = READ[name].read(files, lambda path: parsed.pop(path) if path in parsed else parse_file(path))
    about = {**trace.about, "label": folder.resolve().name, "format": name}
    return checked(dataclasses.replace(trace, about=about), str(folder))


def _format_of(path: Path, value: Any) -> str:
    """The format of a file that holds this JSON value."""
    if isinstance(value, list):
        return "param"
    if isinstance(value, dict) and "format" in value:
        return "recjax"
    if isinstance(value, dict) and "schema" in value and "nodes" in value:
        return "chakra-json"
    if isinstance(value, dict) and chakra_graph.GRAPH in value:
        return "chakra-graph"
    if isinstance(value, dict) and "traceEvents" in value:
        raise DataError(f"{path}: {NO_TRACE}")
    raise DataError(
        f"{path}: no trace that recjax knows: neither its own format, nor a list of operations (PARAM), nor an object "
        'with "schema" and "nodes" or with "workload_graph" (Chakra).'
    )
