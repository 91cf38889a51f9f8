"""`recjax export`: a trained model as a folder that runs on another machine, without recjax.

    OUT/manifest.json       inputs, outputs, tables, versions, and the SHA-256 of every other file and of itself
    OUT/program.stablehlo   the model as `recjax.serving.program` has it, for any number of samples; JAX runs it
    OUT/program.onnx        or the same as ONNX, with its parameters; onnxruntime runs it
    OUT/tables/0000.npy     the rows of a table, by id: arguments of the program, not constants in it
    OUT/tables/0000.records or the rows of one that stays on disk, each with a checksum: see `recjax.tiers.records`;
                            the export's "id" in the manifest, a hash of what it holds, is in all of them
    OUT/pooled.stablehlo    beside tables on disk that have bags of several ids: the program for bags that come pooled
    OUT/parameters.npz      beside StableHLO the dense parameters, and what else the module holds (as BatchNorm does)
    OUT/data/               what the run kept of its data: vocabularies, by which raw values become ids
    OUT/loader.py           reads and runs all that: `recjax.serving.loader`, with the modules that it needs beside it

Nothing in the other files is code but the program, which can compute and nothing else: the loader refuses programs that
call anything outside of themselves.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import flax
import jax
import jax.numpy as jnp
import numpy as np

from recjax.data.batch import Schema
from recjax.data.storage import run_snapshot
from recjax.embedding.dynamic.tables import refuse_dynamic
from recjax.embedding.quantize import encode
from recjax.embedding.row_order import RowOrder
from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError
from recjax.serving import loader, manifest_form, on_disk, onnx_program, outputs
from recjax.serving.manifest_form import PLATFORMS
from recjax.serving.program import Held, find_meetings, input_shapes, make_program, serialise
from recjax.tiers import records, row_cache, transfers
from recjax.train import state as states
from recjax.train.metrics import drift
from recjax.train.run.folder import data_snapshot
from recjax.train.run.open_run import open_run
from recjax.train.state import TrainState
from recjax.train.table_specs import nearest_names, specs
from recjax.train.trainer import Trainer
from recjax.utils import log
from recjax.utils.files import checksums, disk_error, write_json
from recjax.utils.lazy_arrays import PART_BYTES, LazyArray, as_lazy
from recjax.utils.paths import expanded, located
from recjax.utils.version import __version__

Quantize = Literal["none", "bfloat16", "int8", "int4"]
Format = Literal["stablehlo", "onnx"]


def export(
    run: Path | str,
    out: Path | str,
    overrides: Sequence[str] = (),
    step: int | Literal["newest"] | None = None,
    quantize: Quantize = "none",
    platforms: Sequence[str] = PLATFORMS,
    format: Format = "stablehlo",
    user: Sequence[str] = (),
    disk: Sequence[str] = (),
    *,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Writes a checkpoint of a run as a folder that `loader.py` in it can run.

    Arguments and results are those of `recjax.export`; overrides are texts, such as "mesh.devices=1".

    Raises:
      ConfigError: no run or checkpoint, flatbuffers or onnx is not installed, a folder that is in use, a feature or
        table that the run has not, or a model that cannot be exported.
      DataError: what the run kept of its data is damaged.
      TrainingError: `out` cannot be written, or no intact checkpoint.
    """
    run, out = located(run), expanded(out)
    _check(out, quantize, platforms, format, disk)
    source = run_snapshot.open_snapshot(data_snapshot(run, step))
    trainer, state, step = open_run(run, overrides, (), step, log.info, source=source, trust_code=trust_code)
    kept = None if source is None else source.path
    values = drift.read_profile(run)
    sizes = write(trainer, state, step, out, quantize, platforms, kept, format, user, disk, values)
    tables = [size for file, size in sizes.items() if file.startswith("tables/")]
    return {
        "out": str(out),
        "step": step,
        "format": format,
        "quantize": quantize,
        "platforms": list(platforms) if format == "stablehlo" else ["cpu"],
        "user": list(user),
        "on_disk": len([file for file in sizes if file.endswith(".records")]),
        "tables": len(tables),
        "table_bytes": sum(tables),
        "bytes": sum(sizes.values()),
    }


def write(
    trainer: Trainer,
    state: TrainState,
    step: int,
    out: Path,
    quantize: Quantize = "none",
    platforms: Sequence[str] = PLATFORMS,
    data: Path | None = None,
    format: Format = "stablehlo",
    user: Sequence[str] = (),
    disk: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """`export` of a state in memory, after so many steps; gives the bytes of each file.

    Other arguments and what is raised are those of `export`; `data` is what the run kept of its data, if it has files,
    and `values` the profile of the rows that trained, see `drift.py`.
    """
    schema = trainer.source.schema
    names = [feature.name for feature in schema.features]
    if strange := [name for name in user if name not in names]:
        raise ConfigError(f"--user: the data have no feature {strange[0]!r}. {nearest_names(strange[0], names)}")
    if user and schema.label_group:
        raise ConfigError(
            f"--user: the elements of group {schema.label_group!r} are scored row by row, and what a row has is looked "
            "up once for all of them anyway. Leave it out."
        )
    tables, features = specs(trainer.config, schema)
    refuse_dynamic(tables, "an exported model looks up rows by their numbers")
    held: dict[str, Held] = {table.name: table.dtype if quantize == "none" else quantize for table in tables}
    arrays = states.one_version(trainer.export(state))
    rows = {table.name: as_lazy(arrays["tables"][table.name]["rows"]) for table in tables}
    leaves = {part: arrays.get(part, {}) for part in ("dense", "module")}
    kept_there = _on_disk(disk, list(rows), features)
    inputs = input_shapes(schema, user, kept_there)
    stored = {name: _encoded(lazy.shape, held[name]) for name, lazy in rows.items()}
    ends = {name: "records" if name in kept_there else "npy" for name in rows}
    files = {name: f"tables/{number:04}.{ends[name]}" for number, name in enumerate(rows)}
    signature, lookups = _signature(schema, inputs.inputs, user), [_lookup(feature) for feature in features]
    bags = on_disk.poolable(lookups, {each["name"]: each for each in signature["features"]}, kept_there)
    programs = {}
    if format == "stablehlo":  # before anything is written: it may be refused

        def made(held: Mapping[str, Held]) -> tuple[bytes, tuple[Any, ...]]:
            like = {
                name: _encoded((inputs.rows.get(name, x.shape[0]), x.shape[1]), held[name]) for name, x in rows.items()
            }
            shapes = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in each.values()] for each in leaves.values()]
            arguments = (like, *shapes, inputs.inputs)
            return serialise(make_program(trainer, held, user), arguments, platforms)

        programs[manifest_form.PROGRAMS[format]], result = made(held)
        if bags:
            programs[loader.POOLED], _ = made(held | {name: "float32" for _, names in bags for name in names})
    manifest: dict[str, Any] = {
        "format": manifest_form.FORMAT,
        "versions": {"recjax": __version__, "jax": jax.__version__, "flax": flax.__version__},
        "model": {"kind": getattr(trainer.config.model, "kind", ""), "step": step},
        "program": {"format": format, "platforms": list(platforms), "symbols": inputs.symbols},
        "parameters": {part: list(each) for part, each in leaves.items()},
        "tables": {
            name: {"file": files[name], "rows": lazy.shape[0], "dim": lazy.shape[1], "held": held[name]}
            | {"on_disk": name in kept_there}
            | _array(stored[name])
            for name, lazy in rows.items()
        },
        "inputs": signature,
        "lookups": lookups,
    }
    heads = {}
    if kept_there:
        manifest["id"] = _id_of(manifest, [*leaves.values()], [rows[name] for name in kept_there])
        row_bytes = {name: stored[name].shape[1] * stored[name].dtype.itemsize for name in kept_there}
        heads = {n: records.Head(rows[n].shape[0], size, manifest["id"], n) for n, size in row_bytes.items()}
    unfinished = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    try:
        (unfinished / "tables").mkdir(parents=True)
        for name, lazy in rows.items():
            _write_rows(unfinished / files[name], lazy, held[name], stored[name], heads.get(name))
        if format == "onnx":
            onnx, result = onnx_program.make_onnx(trainer, held, user, inputs, leaves, files, unfinished)
            programs[manifest_form.PROGRAMS[format]] = onnx
        else:
            numbered = {f"{part}.{i:04}": x for part, each in leaves.items() for i, x in enumerate(each.values())}
            np.savez(unfinished / manifest_form.PARAMETERS, allow_pickle=False, **numbered)
        for name, program in programs.items():
            (unfinished / name).write_bytes(program)
        if data is not None:
            shutil.copytree(data, unfinished / "data")
        if values is not None:
            write_json(unfinished / drift.FILE, values)
        for module in (loader, manifest_form, *([records, row_cache, transfers, on_disk] if kept_there else [])):
            shutil.copyfile(str(module.__file__), unfinished / Path(str(module.__file__)).name)
        manifest["outputs"] = {"dtype": "float32", "shape": _shape(result)} | outputs.described(trainer)
        manifest["files"] = checksums(unfinished)
        manifest["sha256"] = loader.own_checksum(manifest)
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        unfinished.replace(out)
    except OSError as error:
        raise disk_error(out, error, sum(lazy.nbytes for lazy in rows.values())) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {name: entry["bytes"] for name, entry in manifest["files"].items()}


def _check(out: Path, quantize: str, platforms: Sequence[str], format: str, disk: Sequence[str]) -> None:
    if format not in get_args(Format):
        raise ConfigError(f"format is {format!r}; choose one of {', '.join(get_args(Format))}.")
    if format == "onnx":
        onnx_program.require()
        if disk:
            raise ConfigError(
                "--disk is for --format stablehlo; onnxruntime maps the tables' files into memory anyway."
            )
    elif importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            "recjax export writes its program by jax.export, which needs the package flatbuffers, and that is not "
            "installed. Install the extra `export` (pip install -c constraints.txt -e '.[export]'), or flatbuffers "
            "itself."
        )
    if quantize not in get_args(Quantize):
        raise ConfigError(f"quantize is {quantize!r}; choose one of {', '.join(get_args(Quantize))}.")
    if not platforms or set(platforms) - set(PLATFORMS) or len(set(platforms)) < len(platforms):
        raise ConfigError(
            f"--platforms {','.join(platforms)}: give one or more of {', '.join(PLATFORMS)}, each once, with commas "
            "between them."
        )
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not an empty folder. Name a folder that does not exist.")


def _on_disk(disk: Sequence[str], tables: Sequence[str], features: Sequence[FeatureSpec]) -> list[str]:
    """The tables that stay on disk: those named, and those that share a feature with them, whose ids change there."""
    if list(disk) == ["all"]:
        return list(tables)
    if strange := [name for name in disk if name not in tables]:
        raise ConfigError(f"--disk: the model has no table {strange[0]!r}. {nearest_names(strange[0], list(tables))}")
    found, before = set(disk), -1
    while len(found) > before:
        before = len(found)
        reads = {feature.reads for feature in features if feature.table in found}
        found |= {feature.table for feature in features if feature.reads in reads}
    return [name for name in tables if name in found]


def _encoded(shape: tuple[Any, ...], held: Held) -> jax.ShapeDtypeStruct:
    """Content of a table's file."""
    dtype, columns = manifest_form.describe_stored(held, shape[1])
    return jax.ShapeDtypeStruct((shape[0], columns), np.dtype(dtype))


def _id_of(manifest: Mapping[str, Any], leaves: Sequence[Mapping[str, Any]], on_disk: Sequence[LazyArray]) -> str:
    """A hash of all that tells an export with tables on disk from others: the same one for the same content.

    Args:
      manifest: what it says before its files are written, with the step and what recjax it is of.
      leaves: the dense parameters, and what else the module holds.
      on_disk: rows of the tables there, which are read once more for it.
    """
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for array in (x for each in leaves for x in each.values()):
        digest.update(np.asarray(array).tobytes())
    for rows in on_disk:
        for part in rows.parts():
            digest.update(rows.read(part).tobytes())
    return digest.hexdigest()


def _write_rows(
    file: Path, rows: LazyArray, held: Held, stored: jax.ShapeDtypeStruct, head: records.Head | None
) -> None:
    """Writes the rows of a table by id, of which they are stored in another order, a part at a time.

    With a head they become records, and else an .npy file.
    """
    V, D = rows.shape
    order = RowOrder(V)
    writer = None
    if head is not None:
        writer = records.RecordWriter(file, head)
    else:
        written = np.lib.format.open_memmap(file, "w+", stored.dtype, stored.shape)
    each = max(1, PART_BYTES // max(1, D * rows.dtype.itemsize))
    for start in range(0, V, each):
        stop = min(start + each, V)
        part = rows.read((slice(start, stop), slice(0, D)))
        if held == "float32":
            encoded = part.astype(np.float32, copy=False)
        else:
            encoded = np.asarray(encode(jnp.asarray(part), held))
        ids = order.row(np.arange(start, stop))
        if writer is None:
            written[ids] = encoded
        else:
            writer.write(ids, np.ascontiguousarray(encoded).view(np.uint8))
    if writer is None:
        written.flush()
    else:
        writer.close()


def _signature(schema: Schema, inputs: dict[str, Any], user: Sequence[str]) -> dict[str, Any]:
    """Inputs of the program, as JSON."""
    features = []
    for feature in schema.features:
        arrays = {
            n: _array(inputs[n][feature.name]) for n in ("ids", "lengths", "weights") if feature.name in inputs[n]
        }
        kind = "fixed" if feature.bag is not None else "jagged"
        about = {"name": feature.name, "rows": feature.rows, "bag": kind, "ids_per_bag": feature.bag}
        side = "user" if feature.name in user else "item"
        features.append({**about, "weighted": feature.weighted, "side": side, "arrays": arrays})
    dense = {"columns": list(schema.dense), **_array(inputs["dense"])}
    signature = {"dense": dense, "features": features} | ({"user": _array(inputs["user"])} if user else {})
    if schema.label_group:
        signature["scored"] = list(schema.labelled_features)
    if "pairs" in inputs:
        meets = [{"feature": name, "other": other} for name, other in find_meetings(schema)]
        signature["pairs"] = _array(inputs["pairs"]) | {"of": meets}
    return signature


def _array(x: Any) -> dict[str, Any]:
    return {"dtype": x.dtype.name, "shape": _shape(x.shape)}


def _shape(shape: Sequence[Any]) -> list[int | str]:
    """A shape as JSON: symbols by name."""
    return [int(n) if isinstance(n, (int, np.integer)) else str(n) for n in shape]


def _lookup(feature: FeatureSpec) -> dict[str, str]:
    return {"name": feature.name, "feature": feature.reads, "table": feature.table, "pooling": feature.pooling}
