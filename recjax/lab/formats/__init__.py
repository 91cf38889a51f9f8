"""Formats of communication traces: each a module with `read({rank: file})`, and most with `write(trace)`.

`write` gives {file: content}.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

from recjax.errors import ConfigError, DataError
from recjax.lab.formats import chakra_et, chakra_graph, chakra_protobuf, param_basic, recjax_json
from recjax.lab.formats.fields import parse
from recjax.lab.formats.files import load, rank_files
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
    name = format or _found(files[min(files)])
    trace: Trace = READ[name].read(files)
    about = {**trace.about, "label": folder.resolve().name, "format": name}
    return checked(dataclasses.replace(trace, about=about), str(folder))


def _found(path: Path) -> str:
    """The format of one file."""
    if path.suffix == ".et":
        return "chakra-et"
    value = parse(load(path), str(path))
    if isinstance(value, list):
        return "param"
    if isinstance(value, dict) and "format" in value:
        return "recjax"
    if isinstance(value, dict) and "schema" in value and "nodes" in value:
        return "chakra-json"
    if isinstance(value, dict) and chakra_graph.GRAPH in value:
        return "chakra-graph"
    raise DataError(
        f"{path}: no trace that recjax knows: neither its own format, nor a list of operations (PARAM), nor an object "
        'with "schema" and "nodes" or with "workload_graph" (Chakra).'
    )
