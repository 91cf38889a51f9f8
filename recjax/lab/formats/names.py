"""Names of collectives and element types in the formats of others."""

from __future__ import annotations

from recjax.errors import DataError
from recjax.lab.formats.trace import COLLECTIVES, ITEM_BYTES

# By their letters alone, in any case; a name may go on after these (alltoallv, _allgather_base).
_KINDS = {kind.replace("_", ""): kind for kind in COLLECTIVES}
_DTYPES = {name: name for name in ITEM_BYTES} | {
    "byte": "uint8",
    "unsigned char": "uint8",
    "char": "int8",
    "signed char": "int8",
    "short": "int16",
    "half": "float16",
    "int": "int32",
    "float": "float32",
    "long": "int64",
    "long int": "int64",
    "double": "float64",
}
# What these formats call our types; those that they lack go as one of equal size.
_WRITTEN = {
    "bool": "Bool",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Half",
    "uint16": "BFloat16",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int32": "Int",
    "uint32": "Int",
    "float32": "Float",
    "int64": "Long",
    "uint64": "Long",
    "float64": "Double",
}


def kind_of(name: str, place: str) -> str:
    """The kind of event that a name stands for, "wait" and "init" too; DataError if none."""
    letters = "".join(c for c in name.lower() if c.isalpha())
    if letters in ("wait", "init"):
        return letters
    fitting = [start for start in _KINDS if letters.startswith(start)]
    if not fitting:
        raise DataError(f"{place}: {name[:60]!r} is no collective that recjax knows ({', '.join(_KINDS.values())}).")
    return _KINDS[max(fitting, key=len)]


def dtype_of(name: str, place: str) -> str:
    """Our name of an element type; DataError if it is not known."""
    short = name.lower().removeprefix("c10::")
    if short not in _DTYPES:
        raise DataError(f"{place}: the type {name[:60]!r} is not known; known are {', '.join(_DTYPES)}.")
    return _DTYPES[short]


def written_dtype(dtype: str) -> str:
    """Name of one of our types in a file; one that is not known goes as bytes."""
    return _WRITTEN.get(dtype, "Byte")
