"""Formats of communication traces: each a module with `write(trace) -> {file: content}` and `read({rank: file})`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

from recjax.comms.formats import chakra_et, chakra_protobuf, param_basic, recjax_json
from recjax.comms.formats.fields import parse
from recjax.comms.formats.files import load, rank_files
from recjax.comms.trace import Trace, checked
from recjax.errors import ConfigError, DataError
from recjax.settings.values import either

FORMATS: dict[str, ModuleType] = {
    "recjax": recjax_json,
    "param": param_basic,
    "chakra-json": chakra_et,
    "chakra-et": chakra_protobuf,
}


def read_trace(folder: Path, format: str | None = None) -> Trace:
    """Reads the trace in a folder.

    Args:
      folder: with a file for each rank, whose names end in the rank's number and .json, .json.gz or .et.
      format: a key of FORMATS; None finds it out.

    Raises:
      ConfigError: no such format.
      DataError: there is no trace, or it is damaged or of an unknown version.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"--format {format} is not known; choose {either(list(FORMATS))}.")
    files = rank_files(folder, "" if format is None else ".et" if format == "chakra-et" else ".json")
    name = format or _found(files[min(files)])
    trace: Trace = FORMATS[name].read(files)
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
    raise DataError(
        f"{path}: no trace that recjax knows: neither its own format, nor a list of operations (PARAM), nor an object "
        'with "schema" and "nodes" (Chakra).'
    )
