"""The form of an export's manifest: keys, types and bounds, and what in it has to fit together.

Needs Python alone, and is copied beside the loader of an export.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Mapping
from typing import Any

FORMAT = "recjax-export/2"
PROGRAMS = {"stablehlo": "program.stablehlo", "onnx": "program.onnx"}
PARAMETERS = "parameters.npz"  # beside StableHLO
PLATFORMS = ("cpu", "cuda", "tpu")
_DEEPEST = 32  # objects and lists inside each other in one; 7 are written

# What a manifest holds. A type stands for a value of it, a range for an integer in it, a pattern for a text, a tuple
# for one of several, [x] for a list, {str: x} for an object of any keys, and another dict for one of these keys, of
# which those with a question mark may be missing; all else stands for itself.
# What has to fit together is in `_misfit`, and sizes and shapes are compared with the files before anything is made.
_SHA256, _COUNT, _FROM_1 = re.compile("[0-9a-f]{64}"), range(2**62), range(1, 2**31 + 1)
_ARRAY = {"dtype": ("float32", "int32", "uint16", "uint8"), "shape": [(str, _FROM_1)]}
_MANIFEST = {
    "format": FORMAT,
    "id?": _SHA256,  # of an export with tables on disk
    "versions": {str: str},
    "model": {"kind": str, "step": _COUNT},
    "program": {"format": tuple(PROGRAMS), "platforms": [PLATFORMS], "symbols": {str: str}},
    "parameters": {"dense": [str], "module": [str]},
    "tables": {
        str: {
            "file": str,
            "rows": _FROM_1,
            "dim": _FROM_1,
            "held": ("float32", "bfloat16", "int8", "int4"),
            "on_disk": bool,
            **_ARRAY,
        }
    },
    "inputs": {
        "dense": {"columns": [str], **_ARRAY, "shape": [(str, _COUNT)]},
        "features": [
            {
                "name": str,
                "rows": _FROM_1,
                "bag": ("fixed", "jagged"),
                "ids_per_bag": (None, _FROM_1),
                "weighted": bool,
                "side": ("user", "item"),
                "arrays": {"ids": _ARRAY, "lengths?": _ARRAY, "weights?": _ARRAY},
            }
        ],
        "user?": _ARRAY,
        "scored?": [str],  # features of the elements that have a score each
        "pairs?": {**_ARRAY, "of": [{"feature": str, "other": str}]},
    },
    "lookups": [{"name": str, "feature": str, "table": str, "pooling": ("sum", "mean", "none")}],
    "outputs": {
        **_ARRAY,
        "tasks": [
            {"name": str, "kind": ("binary", "number", "class"), "loss": str, "first": _COUNT, "outputs": _FROM_1}
        ],
        "classes": {str: [str]},
    },
    "files": {str: {"bytes": _COUNT, "sha256": _SHA256}},
    "sha256": _SHA256,
}


def parse(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none, has a key twice in one object, or is nested too deep."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[][{}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > _DEEPEST:
            raise ValueError(f"objects and lists are nested more than {_DEEPEST} deep")
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name[:80]!r} stands twice in one object")
    return value


def find_fault(manifest: Any) -> str:
    """Returns the first fault of a manifest: a key, a type, a bound, parts that do not fit together; "" if none."""
    return _fault(manifest, _MANIFEST) or _misfit(manifest)


def _fault(value: Any, form: Any, where: str = "") -> str:
    """Returns the first fault of a part of a manifest by its form (see `_MANIFEST`); "" if it has none."""
    if isinstance(form, dict) and isinstance(value, dict):
        if str in form:
            parts = [(f"{where}[{name[:80]!r}]", x, form[str]) for name, x in value.items()]
        else:
            forms = {name.rstrip("?"): x for name, x in form.items()}
            needed = [name for name in form if not name.endswith("?")]
            if wrong := sorted(value.keys() - forms.keys()) or [name for name in needed if name not in value]:
                has = "has the key" if wrong[0] in value else "lacks the key"
                return f"{where or 'it'} {has} {wrong[0][:80]!r}"
            parts = [(f"{where}.{name}".lstrip("."), x, forms[name]) for name, x in value.items()]
        return next(filter(None, (_fault(x, of, at) for at, x, of in parts)), "")
    if isinstance(form, list) and isinstance(value, list):
        return next(filter(None, (_fault(x, form[0], f"{where}[{at}]") for at, x in enumerate(value))), "")
    if isinstance(form, tuple):
        fits = any(not _fault(value, each, where) for each in form)
    elif isinstance(form, range):
        fits = type(value) is int and value in form
    elif isinstance(form, re.Pattern):
        fits = isinstance(value, str) and form.fullmatch(value) is not None
    elif isinstance(form, type):
        fits = type(value) is form
    else:
        fits = type(value) is type(form) and value == form
    if fits:
        return ""
    shown = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else f"{value!r:.60}"
    return f"{where} is {shown}, not {_words(form)}"


def _words(form: Any) -> str:
    """A form as it reads in an error."""
    if isinstance(form, tuple):
        return " or ".join(map(_words, form))
    if isinstance(form, range):
        return f"an integer from {form.start} to {form.stop - 1}"
    if isinstance(form, re.Pattern):
        return "a SHA-256"
    if isinstance(form, type):
        return "a text" if form is str else "true or false"
    return "an object" if isinstance(form, dict) else "a list" if isinstance(form, list) else json.dumps(form)


def describe_stored(dtype: str, dim: int) -> tuple[str, int]:
    """The dtype and the columns of a table's file: bits of bfloat16 as uint16, for .npy has no bfloat16."""
    return {
        "float32": ("float32", dim),
        "bfloat16": ("uint16", dim),
        "int8": ("uint8", dim + 8),
        "int4": ("uint8", -(-dim // 2) + 8),
    }[dtype]


def _misfit(manifest: Mapping[str, Any]) -> str:
    """Returns the first two parts of a manifest of the right form that do not fit together; "" if all do."""
    tables, inputs, outputs, format = (manifest[key] for key in ("tables", "inputs", "outputs", "program"))
    format, features = format["format"], {feature["name"]: feature for feature in inputs["features"]}
    needed = [PROGRAMS[format], *([PARAMETERS] if format == "stablehlo" else []), *(x["file"] for x in tables.values())]
    if wrong := [name for name in needed if name not in manifest["files"]]:
        return f"files has no {wrong[0][:80]!r}"
    if not manifest["program"]["platforms"]:
        return "program.platforms is empty"
    if len(set(needed)) < len(needed) or len(features) < len(inputs["features"]):
        return "two tables have one file, or two features one name"
    looked_up = {key: {each[key] for each in manifest["lookups"]} for key in ("feature", "table")}
    for name, entry in tables.items():
        dtype, width = describe_stored(entry["held"], entry["dim"])
        if (entry["dtype"], entry["shape"]) != (dtype, [entry["rows"], width]):
            return f"dtype and shape of the table {name[:80]!r} are not those of its rows, dim and held"
        if name not in looked_up["table"] or (entry["on_disk"] and format == "onnx"):
            return f"nothing reads the table {name[:80]!r} where it is"
    for name, feature in features.items():
        arrays = {"ids": True, "lengths": feature["bag"] == "jagged", "weights": feature["weighted"]}
        if name not in looked_up["feature"]:
            return f"nothing reads the feature {name[:80]!r}"
        if feature["arrays"].keys() != {kind for kind, there in arrays.items() if there}:
            return f"arrays of the feature {name[:80]!r} are not those of its bag and weights"
        count = feature["ids_per_bag"]
        if (count is None) != arrays["lengths"] or feature["arrays"]["ids"]["shape"][1:] != ([count] if count else []):
            return f"ids_per_bag of the feature {name[:80]!r} is not that of its bag and ids"
        bags = feature["arrays"]["lengths" if arrays["lengths"] else "ids"]["shape"][:1]
        if (bags == inputs["dense"]["shape"][:1]) != (feature["side"] == "item"):
            return f"side of the feature {name[:80]!r} is not that of its bags"
    if any(feature["side"] == "user" for feature in features.values()) != ("user" in inputs):
        return "features of users, and the array that says whose each sample is, go together"
    aligned = [*inputs.get("scored", ()), *(x for pair in inputs.get("pairs", {}).get("of", ()) for x in pair.values())]
    if wrong := [name for name in aligned if features.get(name, {}).get("bag") != "jagged"]:
        return f"inputs.scored or inputs.pairs names {wrong[0][:80]!r}, which is no jagged feature"
    if "pairs" in inputs and not inputs.get("scored"):
        return "inputs.pairs is of elements that are scored, and there are none"
    if inputs["dense"]["shape"][1:] != [len(inputs["dense"]["columns"])]:
        return "inputs.dense has another shape than its columns"
    for at, each in enumerate(manifest["lookups"]):
        if each["feature"] not in features or each["table"] not in tables:
            return f"lookups[{at}] names a feature or a table that is not there"
        if features[each["feature"]]["rows"] != tables[each["table"]]["rows"]:
            return f"lookups[{at}] names a feature and a table with other rows"
    first = 0
    for task in outputs["tasks"]:
        counted = len(outputs["classes"].get(task["name"], ())) if task["kind"] == "class" else 1
        if task["first"] != first or task["outputs"] != (counted or task["outputs"]):
            return f"outputs of the task {task['name'][:80]!r} are not where they should be, or not as many"
        first += task["outputs"]
    if outputs["shape"][1:] != ([first] if outputs["tasks"] else []):
        return "outputs has another shape than its tasks"
    return ""
