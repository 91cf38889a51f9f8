"""`recjax.json`, which says what prepared data are: written beside the blocks, and believed only if it is whole."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from recjax.data.batch import ANY_ID, ElementGroup, Feature, Label, LabelKind, Schema, wrong_groups
from recjax.data.own import HOW
from recjax.errors import DataError
from recjax.utils import strict_json
from recjax.utils.paths import escapes, is_remote, unreachable

MANIFEST = "recjax.json"
BLOCKS = "blocks"  # the folder of the rows, by the name of the builder that writes them
FORMAT = 1  # of the manifest and the records; raise it when older readers would misread
WITH_LABELS = 2  # the same, where labels have names and so a second axis
BLOCKS_PER_FILE = 1024  # as builder.py writes them
_MOST_BLOCKS = 2**26  # of a split, of thousands of rows each


def read_manifest(path: Path, expect_dataset: str | None = None) -> dict[str, Any]:
    """The manifest of prepared data.

    Args:
      path: their folder (`places.place`).
      expect_dataset: refuse data of another dataset.

    Raises:
      DataError: nothing there, damaged, of another dataset or format, or no permission to read.
    """
    command = prepare_again(path, expect_dataset)
    file = path / MANIFEST
    if not is_remote(path) and file.exists() and not file.is_file():  # a pipe, say, that would be waited for for ever
        raise DataError(f"{file} is damaged: it is no regular file. Prepare the data again with: {command}")
    try:
        manifest = strict_json.parse(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        how = "Prepare them with: " if expect_dataset else f"{HOW} For a known dataset prepare the data with: "
        if not is_remote(path) and path.exists() and not path.is_dir():
            command = prepare_again("FOLDER", expect_dataset)
            raise DataError(
                f"no prepared data at {path}: that is a file, and prepared data are a folder. {how}{command}"
            ) from None
        state = "the folder exists, but holds no prepared data" if path.is_dir() else "there is no such folder"
        raise DataError(f"no prepared data at {path}: {state}. {how}{command}") from None
    except strict_json.JsonError as error:
        where = f"line {error.line}: " if error.line else ""
        raise DataError(f"{file} is damaged ({where}{error}). Prepare the data again with: {command}") from None
    except PermissionError:
        raise DataError(no_permission(file)) from None
    except Exception as error:  # object storage raises many kinds
        if is_remote(path):
            raise unreachable(path, error) from None
        if not isinstance(error, (OSError, ValueError)):
            raise
        raise DataError(f"{file} is damaged ({one_line(error)}). Prepare the data again with: {command}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if type(found) is not int or found not in (FORMAT, WITH_LABELS):
        raise DataError(
            f"{file} has format {json.dumps(found)[:40]}, but this version of recjax reads format {FORMAT}. "
            f"Prepare the data again with: {command} --overwrite"
        )
    if expect_dataset is not None and manifest.get("dataset") != expect_dataset:
        raise DataError(
            f"{path} holds the dataset {str(manifest.get('dataset'))[:80]!r}, but the config asks for "
            f"{expect_dataset!r}. Set data.path to a folder of {expect_dataset}, or prepare one: {command}"
        )
    wrong = _fault(manifest)
    if wrong:
        raise DataError(f"{file} is damaged: {wrong}. Prepare the data again: {command}")
    return manifest


def described_split(rows: Sequence[int], sha256: str) -> dict[str, Any]:
    """Entry of a split in a manifest, from the rows of each of its blocks and the checksum of their content."""
    runs = [[size, len(list(run))] for size, run in itertools.groupby(rows)]  # [rows of each, how many]
    return {"rows": sum(rows), "blocks": runs, "sha256": sha256}


def write_manifest(
    folder: Path,
    dataset: str,
    schema: Schema,
    splits: Mapping[str, Any],
    about: Mapping[str, Any],
    files: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes the manifest of prepared data into their folder; returns it.

    Args:
      folder: theirs.
      dataset: its name.
      schema: of every block.
      splits: split -> `described_split`.
      about: what else to tell of the data; JSON values.
      files: path below the folder -> "bytes" and "sha256", as `recjax.utils.files.checksums` has them.
    """
    columns, table = schema_to_json(schema), dict(splits)
    manifest = {
        "format": format_of(columns),
        "dataset": dataset,
        "schema": columns,
        "splits": table,
        "fingerprint": fingerprint(dataset, columns, table),
        "about": dict(about),
        "files": dict(files),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    return manifest


def _fault(manifest: dict[str, Any]) -> str:
    """Says what is wrong with a manifest; "" if nothing is."""
    try:
        expected = fingerprint(manifest["dataset"], manifest["schema"], manifest["splits"])
        if manifest["fingerprint"] != expected or not isinstance(manifest["about"], dict):
            return "its parts do not fit its fingerprint"
        for name, entry in manifest["files"].items():
            if escapes(name):
                return f"it lists the file {name[:80]!r}, which lies outside of the folder"
            if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
                return f"it does not say what {name[:80]!r} holds"
        schema = schema_from_json(manifest["schema"])
        if not isinstance(manifest["dataset"], str) or not all(map(_sensible, schema.features)):
            return "its schema makes no sense"
        if not all(map(_sensible_label, schema.labels)) or manifest["format"] != format_of(manifest["schema"]):
            return "its labels make no sense"
        if why := wrong_groups(schema):
            return f"its schema makes no sense: {why}"
        for name in manifest["splits"]:
            row_counts(manifest, name)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return "its parts do not fit its fingerprint"
    return ""


def _sensible(feature: Feature) -> bool:
    return (
        isinstance(feature.name, str)
        and type(feature.rows) is int
        and (0 < feature.rows < 2**63 or feature.rows == ANY_ID)
        and (feature.bag is None or (type(feature.bag) is int and 0 < feature.bag < 2**31))
        and isinstance(feature.weighted, bool)
    )


def _sensible_label(label: Label) -> bool:
    of_class = label.kind == "class"
    return (
        isinstance(label.name, str)
        and label.kind in get_args(LabelKind)
        and type(label.classes) is int
        and (2 <= label.classes < 2**24 if of_class else label.classes == 0)
        and isinstance(label.weight, str)
    )


def row_counts(manifest: dict[str, Any], split: str) -> np.ndarray:
    """Rows of each block of a split that the manifest has: int64 [blocks].

    Raises:
      KeyError, TypeError, ValueError, OverflowError: it does not say.
    """
    runs = np.array(manifest["splits"][split]["blocks"])
    if runs.size == 0:
        return np.zeros(0, np.int64)
    if runs.dtype != np.int64 or runs.ndim != 2 or runs.shape[1] != 2 or runs.min() < 1 or runs.max() >= 2**31:
        raise ValueError("no runs of blocks")
    if runs[:, 1].sum() > _MOST_BLOCKS:
        raise ValueError("more blocks than there can be")
    return np.repeat(runs[:, 0], runs[:, 1])


def fingerprint(dataset: str, schema: dict[str, Any], splits: dict[str, Any]) -> str:
    """Hash of schema and content: `schema` and `splits` as in the manifest, with the checksum of every split."""
    text = json.dumps([format_of(schema), dataset, schema, splits], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def format_of(schema: dict[str, Any]) -> int:
    """The format of data of a schema (`schema_to_json`)."""
    return WITH_LABELS if "labels" in schema else FORMAT


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema as JSON values."""
    labels = {"labels": [dataclasses.asdict(label) for label in schema.labels]} if schema.labels else {}
    features = [dataclasses.asdict(feature) for feature in schema.features]
    groups = {"groups": [dataclasses.asdict(group) for group in schema.groups]} if schema.groups else {}
    label_group = {"label_group": schema.label_group} if schema.label_group else {}
    return {"dense": list(schema.dense), "features": features, **labels, **groups, **label_group}


def schema_from_json(schema: dict[str, Any]) -> Schema:
    """The inverse of `schema_to_json`."""
    labels = tuple(Label(**label) for label in schema.get("labels", ()))
    groups = tuple(
        ElementGroup(group["name"], tuple(group["features"]), tuple(group["like"]))
        for group in schema.get("groups", ())
    )
    features = tuple(Feature(**feature) for feature in schema["features"])
    return Schema(tuple(schema["dense"]), features, labels, groups, str(schema.get("label_group", "")))


def prepare_again(path: object, dataset: str | None) -> str:
    """The command that makes prepared data."""
    return f"recjax data prepare {dataset or 'DATASET'} --from PATH --out {path}"


def no_permission(file: Path) -> str:
    """The message for a file that may not be read."""
    return (
        f"no permission to read {file}. Ask its owner for it (chmod a+rX), or prepare the data in a folder of your own."
    )


def one_line(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
