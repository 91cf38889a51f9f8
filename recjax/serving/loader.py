"""Runs a model that `recjax export` wrote. Needs NumPy and JAX (with flatbuffers) or, of an ONNX export, onnxruntime.

It does not need recjax: copy it where you like, with the .py files beside it.

    from loader import load

    model = load("exported")                    # checks every file
    logits = model(
        ids={"user": user_Bx1, "tags": all_tags_end_to_end_L},
        lengths={"tags": tags_of_each_sample_B},  # of jagged features
        weights={},                               # of weighted ones, shaped like their ids
        dense=dense_BxK,
    )

`model.signature` says what the model takes and gives. `python loader.py exported` checks an export and prints it.
Nothing that is read is code but the program, which is StableHLO or ONNX and is refused if it calls anything outside of
itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
import stat
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

POOLED = "pooled.stablehlo"  # the program that takes bags of tables on disk pooled
# What XLA itself knows how to compute, and jax.export writes so.
_OWN_CALLS = r"stablehlo\.custom_call @(shape_assertion|Sharding|stablehlo\.dynamic_(reduce_window|top_k)|mhlo\.topk)\("
_NONE: Mapping[str, Any] = {}
_MOST_TEXT = 1 << 24  # bytes of a manifest
_AGAIN = "Copy the export once more, or export it again."


class ExportError(Exception):
    """An export that is damaged or of another kind; one paragraph."""


class DamagedError(ExportError):
    """An export that is not what was written, or was copied in part, or mixed with another one."""


class InputError(ValueError):
    """Samples that the model cannot score; one paragraph."""


def _beside(name: str) -> Any:
    """The module that lies beside this file in an export; in the package its home is there or in `recjax.tiers`."""
    file = Path(__file__).with_name(f"{name}.py")
    file = next((each for each in (file, file.parents[1] / "tiers" / file.name) if each.exists()), file)
    spec = importlib.util.spec_from_file_location(f"{__name__}_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise ExportError(f"{file} does not exist. Copy it from an export, with the loader.py beside it.") from None
    return module


_form = _beside("manifest_form")


def load(
    folder: Path | str, device: Any = None, verify: bool = True, cache_bytes: int = 64 << 20, pooled_bytes: int = 0
) -> Model:
    """Opens an export.

    Args:
      folder: what `recjax export` wrote.
      device: a `jax.Device`; None takes JAX's first one. onnxruntime always takes the CPU.
      verify: compare the files of tables with their checksums, which reads them whole; all others are always compared.
        Tables on disk have a checksum for each row, which is compared whenever one is read; these are not read whole.
        Sizes are compared of all files, and before any is read.
      cache_bytes: of memory for the rows of each table on disk.
      pooled_bytes: of memory for the pooled bags of each table on disk; 0: its bags are pooled each time.

    Raises:
      DamagedError: a file is missing or damaged, or belongs to another export.
      ExportError: it is none, or not for this device, or has no bags on disk that could come pooled.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    on_disk = {name: entry for name, entry in manifest["tables"].items() if entry["on_disk"]}
    large = {entry["file"] for entry in manifest["tables"].values() if entry["on_disk"] or not verify}
    for name, entry in manifest["files"].items():
        check_size(folder, name, entry)
    for name, entry in manifest["files"].items():
        if name not in large:
            check_file(folder, name, entry)
    mapped = {name: _mapped(folder, entry) for name, entry in manifest["tables"].items() if name not in on_disk}
    if pooled_bytes and POOLED not in manifest["files"]:
        raise ExportError(f"{folder} has no table on disk with bags of several ids. Leave the cache of bags out.")
    if manifest["program"]["format"] == "onnx":
        return Model(manifest, _by_onnxruntime(folder / _form.PROGRAMS["onnx"], manifest), padded=False)
    disk = _beside("on_disk") if on_disk else None
    in_bags = _tables_in_bags(disk, manifest) if pooled_bytes else set()
    program = POOLED if pooled_bytes else _form.PROGRAMS["stablehlo"]
    run = _by_jax(folder, program, manifest, mapped, device, in_bags)
    if disk is None:
        return Model(manifest, run, padded=True)
    stores = _stores(folder, manifest["id"], on_disk, cache_bytes)
    run, pooled = disk.runner(run, manifest, stores, pooled_bytes)
    return Model(manifest, run, True, stores, pooled)


def _tables_in_bags(disk: Any, manifest: Mapping[str, Any]) -> set[str]:
    """The tables on disk of which the program `POOLED` takes sums of bags."""
    features = {feature["name"]: feature for feature in manifest["inputs"]["features"]}
    on_disk = [name for name, entry in manifest["tables"].items() if entry["on_disk"]]
    return {name for _, names in disk.poolable(manifest["lookups"], features, on_disk) for name in names}


def _stores(folder: Path, owner: str, on_disk: Mapping[str, Any], cache_bytes: int) -> Any:
    """The rows of tables on disk through their caches; every damage is a DamagedError."""
    records = _beside("records")

    def read(wanted: Any) -> Any:
        try:
            return records.read_together(wanted)
        except (records.CorruptRecordError, OSError) as damage:
            raise DamagedError(f"{damage}") from damage

    with contextlib.ExitStack() as stack:
        transfers = _beside("transfers").Transfers()
        stack.callback(transfers.close)
        opened = {}
        for name, entry in on_disk.items():
            file = folder / entry["file"]
            row_bytes = entry["shape"][1] * np.dtype(entry["dtype"]).itemsize
            head = records.Head(entry["rows"], row_bytes, owner, name)
            try:
                opened[name] = records.RecordFile(file, head, transfers)
            except records.CorruptRecordError as damage:
                raise DamagedError(str(damage)) from damage
            except OSError as error:
                raise DamagedError(f"{file} cannot be read: {error.strerror or error}. {_AGAIN}") from error
            stack.callback(opened[name].close)
        stack.pop_all()
    return _beside("row_cache").CachedRows(opened, read, cache_bytes)


def _by_jax(
    folder: Path, program: str, manifest: Mapping[str, Any], mapped: Any, device: Any, in_bags: set[str]
) -> Callable[[Any], Any]:
    import jax

    device = jax.devices()[0] if device is None else device
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    platforms = manifest["program"]["platforms"]
    if platform not in platforms:
        raise ExportError(
            f"{folder} was exported for {', '.join(platforms)}, and {device} is of {platform}. Export it once more "
            f"with --platforms {','.join([*platforms, platform])}, or set JAX_PLATFORMS={platforms[0]}."
        )
    exported = _program(folder / program)
    held = _parameters(folder / _form.PARAMETERS, _check_program(folder / program, exported, manifest, in_bags))
    call = jax.jit(exported.call)
    tables, *parameters = jax.device_put((mapped, *held), device)

    def run(inputs: Mapping[str, Any]) -> Any:
        # NumPy's arrays as they are: the call takes them to its parameters' device for half of what device_put costs.
        given = {name: x for name, x in inputs.items() if name != "tables"}
        return call(tables | inputs.get("tables", _NONE), *parameters, given)

    return run


def _by_onnxruntime(file: Path, manifest: Mapping[str, Any]) -> Callable[[Any], np.ndarray]:
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except ImportError as error:
        raise ExportError(
            f"{file} is run by the package onnxruntime, and that is not installed. Install it."
        ) from error
    except Exception as error:  # it raises what its parser meets
        text = " ".join(str(error).split())[:300]
        raise ExportError(f"{file} cannot be read by onnxruntime {onnxruntime.__version__}: {text}") from error
    types = {"tensor(float)": "float32", "tensor(int32)": "int32"}
    arrays = {each.name: each for each in session.get_inputs()} | {"scores": session.get_outputs()[0]}
    takes = {name: (types.get(each.type), *each.shape) for name, each in arrays.items()}
    _compare(file, takes, _described(manifest))

    def call(inputs: Mapping[str, Any]) -> np.ndarray:
        found: np.ndarray = session.run(None, _by_name(inputs))[0]
        return found

    return call


def _by_name(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a program by one name each: "dense", "user", "ids.FEATURE"."""
    plain = {name: inputs[name] for name in ("dense", "user", "pairs") if name in inputs}
    return plain | {f"{kind}.{n}": x for kind in ("ids", "lengths", "weights") for n, x in inputs[kind].items()}


def _described(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """(dtype, *shape) of what a program takes by `_by_name`, and of its "scores", as the manifest has them."""
    inputs = manifest["inputs"]
    arrays = {f"{kind}.{f['name']}": entry for f in inputs["features"] for kind, entry in f["arrays"].items()}
    plain = {name: inputs[name] for name in ("dense", "user", "pairs") if name in inputs}
    arrays |= plain | {"scores": manifest["outputs"]}
    return {name: (entry["dtype"], *entry["shape"]) for name, entry in arrays.items()}


def _compare(file: Path, takes: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Refuses a program that takes or gives something else than the manifest says (DamagedError)."""
    names = sorted(takes.keys() | described.keys())
    if wrong := [name for name in names if takes.get(name) != described.get(name)]:
        has, said = (_shown_array(each.get(wrong[0])) for each in (takes, described))
        raise DamagedError(f"{file} has {has} as {wrong[0]!r:.80}, and manifest.json says {said}. {_AGAIN}")


def _shown_array(described: Sequence[Any] | None) -> str:
    return "nothing" if described is None else f"{described[0]} [{', '.join(map(str, described[1:]))}]"[:80]


def _check_program(
    file: Path, exported: Any, manifest: Mapping[str, Any], in_bags: set[str]
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Compares a program with the manifest (DamagedError).

    Returns:
      dtype and shape of the parameters that it takes: "dense" and "module".
    """
    import jax

    def type_of(x: Any) -> tuple[Any, ...]:
        return (x.dtype.name, *(n if isinstance(n, int) else str(n) for n in x.shape))

    try:
        (tables, *leaves, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        takes = {name: type_of(x) for name, x in _by_name(inputs).items()} | {"scores": type_of(*exported.out_avals)}
        parameters = {part: [type_of(x) for x in each] for part, each in zip(("dense", "module"), leaves, strict=True)}
        rows = {name: type_of(x) for name, x in tables.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{file} is no program of an export: {str(error)[:200]}. {_AGAIN}") from error
    described = _described(manifest)
    for name, entry in manifest["tables"].items():
        dtype, width = ("float32", entry["dim"]) if name in in_bags else (entry["dtype"], entry["shape"][1])
        # Of a table on disk the program takes any number of rows.
        count = rows.get(name, (0, 0))[1] if entry["on_disk"] else entry["rows"]
        described[f"table.{name}"] = (dtype, count, width)
    _compare(file, takes | {f"table.{name}": x for name, x in rows.items()}, described)
    if any(len(parameters[part]) != len(names) for part, names in manifest["parameters"].items()):
        raise DamagedError(f"{file} takes other parameters than manifest.json says. {_AGAIN}")
    return {part: [(x[0], x[1:]) for x in each] for part, each in parameters.items()}


def _parameters(file: Path, expected: Mapping[str, Sequence[Any]]) -> list[list[np.ndarray]]:
    """The arrays of an .npz file, of these dtypes and shapes, which are not compressed (DamagedError)."""
    names = {f"{part}.{i:04}.npy": x for part, each in expected.items() for i, x in enumerate(each)}
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
            if members.keys() != names.keys() or len(members) < len(archive.infolist()):
                raise ValueError("it holds other arrays than the program takes")
            if any(x.compress_type != zipfile.ZIP_STORED or x.file_size > size for x in members.values()):
                raise ValueError("its arrays are compressed")
            arrays = {}
            for name, (dtype, shape) in names.items():
                raw = archive.read(members[name])
                at, order = _header(io.BytesIO(raw), len(raw), dtype, shape)
                arrays[name] = np.ndarray(shape, dtype, raw, at, order=order)
    except Exception as error:  # zipfile and NumPy raise what their parsers meet
        raise DamagedError(f"{file} is damaged: {' '.join(str(error).split())[:200]}. {_AGAIN}") from error
    return [[x for name, x in arrays.items() if name.startswith(part)] for part in expected]


def _header(stream: Any, size: int, dtype: str, shape: Sequence[int]) -> tuple[int, Any]:
    """The place at which the data of an .npy file of this size begin, and their order; ValueError of another file."""
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"it is of version {version} of .npy")
    has, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    if kind != np.dtype(dtype) or tuple(has) != tuple(shape):
        raise ValueError(f"it holds {list(has)} of {kind} instead of {list(shape)} of {dtype}")
    if stream.tell() + int(np.prod(shape, dtype=object)) * kind.itemsize != size:
        raise ValueError("it has another size than its first bytes say")
    return stream.tell(), "F" if fortran else "C"


def own_checksum(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest but for the entry that holds it."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an export, compared with its own checksum, and of the form that is written.

    Raises:
      ExportError: there is none, or of another format.
      DamagedError: it is damaged.
    """
    file = folder / "manifest.json"
    try:
        if (size := _size(folder, file.name)) > _MOST_TEXT:
            raise DamagedError(f"{file} has {size:,} bytes, and no manifest has more than {_MOST_TEXT:,}. {_AGAIN}")
        manifest = _form.parse(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{file} does not exist. Give a folder that `recjax export` wrote.") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file} cannot be read: {error}. {_AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _form.FORMAT:
        raise ExportError(f"{file} is not of the format {_form.FORMAT}. Take the loader.py that was written beside it.")
    if manifest.get("sha256") != own_checksum(manifest):
        raise DamagedError(f"{file} is damaged: its checksum differs. {_AGAIN}")
    if what := _form.find_fault(manifest):
        raise DamagedError(f"{file} is no manifest of an export: {what}. {_AGAIN}")
    if "id" not in manifest and any(entry["on_disk"] for entry in manifest["tables"].values()):
        raise DamagedError(f"{file} was written by an earlier version: its tables on disk have no id. Export it again.")
    return manifest


def _size(folder: Path, name: str) -> int:
    """Bytes of a file in an export; OSError or ValueError if it is none, DamagedError if it lies elsewhere."""
    file, inside = folder / name, not Path(name).is_absolute() and ".." not in Path(name).parts
    if not inside or not file.resolve().is_relative_to(folder.resolve()):
        shown = name[:200].encode("unicode_escape").decode()
        raise DamagedError(f"{folder / 'manifest.json'} names {shown}, outside of its folder. Do not use this export.")
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is no file")
    return about.st_size


def check_size(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compares the size of a file with what the manifest says of it, and where it lies (DamagedError)."""
    try:
        size = _size(folder, name)
        what = "" if size == entry["bytes"] else f"it has {size:,} bytes instead of {entry['bytes']:,}"
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        what = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    if what:
        shown = name[:200].encode("unicode_escape").decode()
        raise DamagedError(f"{folder / shown} is damaged: {what}. {_AGAIN}")


def check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compares a file with its checksum in the manifest (DamagedError)."""
    file = folder / name
    try:
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() == entry["sha256"]:
                return
        what = "its checksum differs"
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
    raise DamagedError(f"{file} is damaged: {what}. {_AGAIN}")


def _mapped(folder: Path, entry: Mapping[str, Any]) -> np.ndarray:
    """A table's file, mapped into memory."""
    file = folder / entry["file"]
    try:
        with file.open("rb") as opened:
            at, order = _header(opened, file.stat().st_size, entry["dtype"], entry["shape"])
        return np.memmap(file, entry["dtype"], "r", at, tuple(entry["shape"]), order)
    except Exception as error:  # NumPy raises what its parser meets
        raise DamagedError(f"{file} is damaged: {' '.join(str(error).split())[:200]}. {_AGAIN}") from error


def _program(file: Path) -> Any:
    """The program, if it calls nothing outside of itself."""
    import jax.export

    try:
        exported = jax.export.deserialize(bytearray(file.read_bytes()))
        outside = outside_calls(exported)
    except ImportError as error:
        raise ExportError(
            f"jax.export reads {file} by the package flatbuffers, and that is not installed. Install it: pip install "
            "flatbuffers."
        ) from error
    except Exception as error:  # it raises what its parser meets
        raise ExportError(
            f"{file} cannot be read by JAX {jax.__version__}: {' '.join(str(error).split())[:200]}. Take a JAX as new "
            "as the one in `versions` of manifest.json."
        ) from error
    if outside:
        raise ExportError(f"{file} calls {', '.join(outside)}, which is not part of it. Do not use this export.")
    return exported


def outside_calls(exported: Any) -> list[str]:
    """Calls of a program to what is neither a part of it nor of XLA: functions of its process, such as callbacks."""
    rest = re.sub(_OWN_CALLS, "", exported.mlir_module())
    return sorted({called.strip()[:80] for called in re.findall(r"custom_call\b(.[^\n(]*)", rest)})


class Model:
    """A model that is ready to score.

    Attributes:
      signature: what it takes and gives: "inputs" and "outputs" of the manifest.
      manifest: all that the export says of itself.
      run: takes "dense", "ids", "lengths", "weights" and "user" as the signature has them, unchecked, and gives logits.
        By JAX it returns once the program has its inputs, and `np.asarray` of what it gives waits for the program.
      padded: whether a program is compiled for each shape, so that arrays should be padded to few of them.
      stores: rows of the tables on disk, whose `hits` and `misses` count by name; None if there are none.
      pooled: bags of these, by name.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        run: Callable[[Any], Any],
        padded: bool,
        stores: Any = None,
        pooled: Any = _NONE,
    ) -> None:
        """See `load`."""
        self.manifest, self.run, self.padded, self.stores, self.pooled = manifest, run, padded, stores, pooled
        self.signature = {key: manifest[key] for key in ("inputs", "outputs")}

    def __call__(
        self,
        ids: Mapping[str, Any] = _NONE,
        lengths: Mapping[str, Any] = _NONE,
        weights: Mapping[str, Any] = _NONE,
        dense: Any = None,
        user: Any = None,
    ) -> np.ndarray:
        """Scores B samples.

        By JAX a program is compiled for each power of two of B and of the number of ids of each jagged feature: samples
        are padded up to these.

        Args:
          ids: by feature, integers [B, H] (also [B] where H is 1); of a jagged one [L], all bags end to end.
          lengths: by jagged feature, integers [B], which sum to L.
          weights: by weighted feature, floats shaped like the ids.
          dense: floats [B, K]; may be left out if K is 0.
          user: integers [B], the user of each sample, from 0: features whose side is "user" have a bag for each user
            then, and not for each sample. None: for each sample.

        Returns:
          float32 logits [B]; of several tasks [B, O], whose columns `signature["outputs"]["tasks"]` tells. Where
          elements are scored (`signature["inputs"]["scored"]`), one for each, in the order of their ids.

        Raises:
          InputError: naming the feature, row and value.
        """
        given = {"ids": dict(ids), "lengths": dict(lengths), "weights": dict(weights)}
        features = {feature["name"]: feature for feature in self.signature["inputs"]["features"]}
        for name, of in given.items():
            if strange := [key for key in of if name not in features.get(key, {"arrays": ()})["arrays"]]:
                takers = [key for key, feature in features.items() if name in feature["arrays"]]
                raise InputError(
                    f"{name} are given for {strange[0]!r}, but the model takes {name} of "
                    f"{', '.join(takers) or 'no feature'}. Leave them out, or correct the name."
                )
        B, dense_BxK = self._dense(dense, given, features, user)
        power = _power if self.padded else int
        inputs: dict[str, Any] = {"dense": _padded(dense_BxK, power(B)), "ids": {}, "lengths": {}, "weights": {}}
        users = B
        if "user" in self.signature["inputs"]:
            user_B = np.arange(B) if user is None else np.asarray(user)
            users = B if user is None or not user_B.size else int(user_B.max()) + 1
            if user_B.shape != (B,) or user_B.dtype.kind not in "iu" or user_B.min() < 0:
                raise InputError(f"user must be {B} integers from 0, the user of each sample.")
            inputs["user"] = _padded(user_B.astype(np.int32), power(B))
        elif user is not None:
            raise InputError("user is given, but the model was exported without features of users. Leave it out.")
        for name, feature in features.items():
            bags = users if feature["side"] == "user" else B
            found = _checked(feature, given, bags)
            longest = power(bags if feature["bag"] == "fixed" else len(found["ids"]))
            for kind, array in found.items():
                inputs[kind][name] = _padded(array, power(bags) if kind == "lengths" else longest)
        signature = self.signature["inputs"]
        if "pairs" in signature:
            inputs["pairs"] = np.zeros(power(count_pairs(signature, given["lengths"])), np.int32)
        scored = signature.get("scored")
        return np.asarray(self.run(inputs))[: len(np.asarray(given["ids"][scored[0]])) if scored else B]

    def _dense(self, dense: Any, given: dict[str, Any], features: Any, user: Any) -> tuple[int, np.ndarray]:
        """The number of samples, and their dense columns."""
        columns = self.signature["inputs"]["dense"]["columns"]
        if dense is None and not columns:
            name, kind = next((n, "lengths" if f["bag"] == "jagged" else "ids") for n, f in features.items())
            first = np.asarray(given[kind].get(name, ()) if user is None else user)
            dense = np.zeros((len(first) if first.ndim else 0, 0), np.float32)
        array = np.asarray(() if dense is None else dense)
        if array.ndim != 2 or array.shape[1] != len(columns) or array.dtype.kind not in "fiu":
            raise InputError(
                f"dense has shape {list(array.shape)}, {array.dtype}, but the model takes numbers [samples, "
                f"{len(columns)}] with the columns {', '.join(columns)[:300]}. Give these."
            )
        if not len(array):
            raise InputError("there is no sample. Give at least one.")
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            row, column = np.argwhere(~np.isfinite(array))[0].tolist()
            raise InputError(f"dense column {columns[column]!r} is {array[row, column]} in row {row}. Give a number.")
        return len(array), array


def count_pairs(inputs: Mapping[str, Any], lengths: Mapping[str, Any]) -> int:
    """Returns how many pairs of elements meet at most in samples with bags of these lengths, by feature."""
    pairs = ((lengths[pair["feature"]], lengths[pair["other"]]) for pair in inputs["pairs"]["of"])
    return max(int(np.dot(np.asarray(ours, np.int64), np.asarray(others, np.int64))) for ours, others in pairs)


def _checked(feature: Mapping[str, Any], given: Mapping[str, Any], B: int) -> dict[str, np.ndarray]:
    """The arrays of one feature in the dtypes of the program (InputError)."""
    name, H, rows = feature["name"], feature["ids_per_bag"], feature["rows"]
    for kind in feature["arrays"]:
        if name not in given[kind]:
            raise InputError(f"feature {name!r} has no {kind}: add {kind}[{name!r}].")
    found = {kind: np.asarray(given[kind][name]) for kind in feature["arrays"]}
    ids = found["ids"]
    if ids.size == 0 and ids.dtype.kind == "f":  # an empty list
        ids = ids.astype(np.int32)
    ids = ids[:, None] if H == 1 and ids.ndim == 1 else ids
    if ids.dtype.kind not in "iu" or (ids.shape != (B, H) if H else ids.ndim != 1):
        wanted = f"[{B}, {H}], {H} for each of {B} bags" if H else "[L], those of all bags end to end"
        raise InputError(f"ids of {name!r} have shape {list(ids.shape)}, {ids.dtype}; give integers {wanted}.")
    if "lengths" in found:
        lengths = found["lengths"]
        if lengths.dtype.kind not in "iu" or lengths.shape != (B,) or (lengths < 0).any() or lengths.sum() != len(ids):
            raise InputError(
                f"lengths of {name!r} have shape {list(lengths.shape)}, {lengths.dtype}, and sum to {lengths.sum()}; "
                f"give {B} integers, none negative, that sum to its {len(ids)} ids."
            )
        found["lengths"] = lengths.astype(np.int32)
    wrong = (ids < 0) | (ids >= rows)
    if wrong.any():
        at = int(np.argmax(wrong.ravel()))
        row = at // H if H else int(np.searchsorted(np.cumsum(found["lengths"]), at, side="right"))
        raise InputError(
            f"id {ids.ravel()[at]} of {name!r} in row {row} is out of range: its table has the rows 0 to {rows - 1}."
        )
    found["ids"] = ids.astype(np.int32)
    if "weights" in found:
        weights = found["weights"].reshape(ids.shape) if found["weights"].size == ids.size else found["weights"]
        if weights.shape != ids.shape or weights.dtype.kind not in "fiu" or not np.isfinite(weights).all():
            raise InputError(f"weights of {name!r} must be finite and of the shape of its ids, {list(ids.shape)}.")
        found["weights"] = weights.astype(np.float32)
    return found


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python loader.py FOLDER")
    try:
        print(json.dumps(load(sys.argv[1]).signature, indent=1))
    except ExportError as problem:
        sys.exit(f"error: {problem}")
