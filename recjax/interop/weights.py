"""Weights of other libraries: into a run folder that has not trained yet, and out of any run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recjax.config.run import RunConfig
from recjax.data.row_values import row_values
from recjax.embedding.dynamic.tables import refuse_dynamic
from recjax.embedding.row_order import RowOrder
from recjax.errors import ConfigError
from recjax.interop.state_dicts import Entry, entries, recognise
from recjax.train import state as states
from recjax.train.build import build_trainer
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.progress import TrainProgress, describe
from recjax.train.run.folder import RunFolder
from recjax.train.run.open_run import open_run
from recjax.train.table_specs import dims, specs
from recjax.train.trainer import Trainer
from recjax.utils import log, npy
from recjax.utils.files import disk_error, replacing
from recjax.utils.lazy_arrays import Index, as_lazy
from recjax.utils.paths import expanded, located, run_folder

Read = Callable[[str], np.ndarray]  # from a key of a state dict to its array
_ROWS_OF = "recjax rows sha256:"  # before the hash of what a table's rows stand for, in the comment of its entry


def import_weights(file: Path | str, config: RunConfig, out: Path | str) -> dict[str, Any]:
    """Makes a run folder whose checkpoint of step 0 holds the weights of a state dict.

    `recjax eval` then evaluates them, and `recjax train` with the same config and --out trains on from them. Slots of
    optimizers start again: state dicts do not hold them.

    Args:
      file: an .npz of facebookresearch/dlrm's or TorchRec's state dict; see `recjax.interop.state_dicts`.
      config: of the model that the weights are of.
      out: the run folder; must not hold a run that has begun.

    Returns:
      {"out", "format", "arrays", "values"}: where, what it was, and how much.

    Raises:
      ConfigError: the file is no such state dict, or does not have exactly the arrays that the model needs.
    """
    file, out = expanded(file), expanded(out)
    with _open(file) as theirs, RunFolder(run_folder(out), config) as folder:
        if any((folder.path / "checkpoints").glob("[0-9]*")):
            raise ConfigError(f"{folder.path} holds a run that has begun. Import into another --out.")
        trainer = build_trainer(folder.resolve(config, log.info))
        with _named(file):
            form, prefix = recognise(theirs.files)
            wanted = _entries(form, trainer, [k.removeprefix(prefix) for k in theirs.files])
            _check_keys(theirs.files, [prefix + e.key for e in wanted], form)
            _check_rows(theirs.zip, prefix, wanted, _row_hashes(trainer, wanted))
        arrays = states.one_version(trainer.export(trainer.init_state()))
        read = _one_at_a_time(file, theirs)
        for entry in wanted:  # before their data take memory, of which a packed file may have a thousand times its size
            _check_header(arrays, entry, file, theirs.zip, prefix + entry.key)
        values = sum(_replace(arrays, entry, read, prefix + entry.key) for entry in wanted)
        folder.record(trainer, log.info)
        with Checkpoints(folder.path / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
            checkpoints.save(0, arrays, describe(trainer, TrainProgress()))
    return {"out": str(out), "format": form, "arrays": len(wanted), "values": values}


def export_weights(
    run: Path | str,
    form: str,
    file: Path | str,
    overrides: Sequence[str] = (),
    step: int | Literal["newest"] | None = None,
    *,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Writes the weights of a checkpoint as another library's state dict.

    Args:
      run: a run folder.
      form: "facebook" or "torchrec".
      file: the .npz to write; there, `{k: torch.from_numpy(v) for k, v in numpy.load(file).items()}` gives what
        `load_state_dict` takes.
      overrides: changes to the run's config that keep the model, for example "mesh.devices=1" or "data.path=...".
      step: a step that has a checkpoint, or "newest"; None takes the one that validation chose, or else the newest.
      trust_code: as for `recjax.evaluate`.

    Returns:
      {"file", "format", "step", "arrays", "values"}: where, what, of which step, and how much.

    Raises:
      ConfigError: the format cannot hold this model, or the file cannot be written.
    """
    file = expanded(file)
    trainer, state, done = open_run(located(run), overrides, (), step, report=log.info, trust_code=trust_code)
    wanted = _entries(form, trainer)
    hashes = _row_hashes(trainer, wanted)
    arrays = states.one_version(trainer.export(state))
    values = _write(file, ((e.key, e.out(_ours(arrays, e)), hashes.get(e.key, "")) for e in wanted))
    return {"file": str(file), "format": form, "step": done, "arrays": len(wanted), "values": values}


def _entries(form: str, trainer: Trainer, keys: Sequence[str] = ()) -> list[Entry]:
    schema = trainer.source.schema
    tables, features = specs(trainer.config, schema)
    refuse_dynamic(tables, "a file of weights names rows by ids")
    return entries(form, trainer.config.model, len(schema.dense), features, dims(tables, features), keys)


def _row_hashes(trainer: Trainer, wanted: Sequence[Entry]) -> dict[str, str]:
    """Key of a table -> hash of what its rows stand for; without tables whose data do not tell."""
    values = row_values(trainer.source, {entry.name for entry in wanted if entry.table})
    return {entry.key: values[entry.name].sha256() for entry in wanted if entry.table and entry.name in values}


def _check_rows(file: zipfile.ZipFile, prefix: str, wanted: Sequence[Entry], hashes: dict[str, str]) -> None:
    """Refuses tables whose rows stand for other values than those of the data; says so where the file does not tell.

    Args:
      file: the .npz.
      prefix: of its keys.
      wanted: the arrays that are read.
      hashes: of the data, see `_row_hashes`.

    Raises:
      ConfigError: naming the table and both hashes.
    """
    silent = []
    comments = {info.filename.removesuffix(".npy"): info.comment.decode("utf-8", "replace") for info in file.infolist()}
    for entry in wanted:
        if not entry.table:
            continue
        comment = comments[prefix + entry.key]
        if not comment.startswith(_ROWS_OF):
            silent.append(entry.name)
        elif (there := comment.removeprefix(_ROWS_OF)) != hashes.get(entry.key, ""):
            here = f"hash {hashes[entry.key][:12]}" if entry.key in hashes else "no vocabulary: a row is its id"
            raise ConfigError(
                f"the rows of {prefix}{entry.key} stand for the values of another vocabulary (hash {there[:12]}) than "
                f"those of feature {entry.name!r} in these data ({here}), so values would get each other's vectors. "
                "Give the data that the weights were trained on, such as the same data.path."
            )
    if silent:
        log.info(
            f"the file does not say which values the rows of {len(silent):,} table(s) stand for "
            f"({', '.join(silent[:3])}{', ...' if len(silent) > 3 else ''}): their order is taken as that of these data"
        )


def _ours(arrays: dict[str, Any], entry: Entry) -> np.ndarray:
    """An array of an exported state, tables in the order of their rows."""
    if not entry.table:
        return np.asarray(arrays["dense"][_parameter(arrays, entry.name)])
    rows = as_lazy(arrays["tables"][entry.name]["rows"]).load()
    rows = rows.astype(_theirs(rows.dtype), copy=False)
    return rows[RowOrder(len(rows)).position(np.arange(len(rows)))]


def _place(arrays: dict[str, Any], entry: Entry) -> tuple[dict[str, Any], str]:
    """The dict of an exported state that holds one of its arrays, and the key there."""
    if entry.table:
        return arrays["tables"][entry.name], "rows"
    return arrays["dense"], _parameter(arrays, entry.name)


def _check_header(arrays: dict[str, Any], entry: Entry, file: Path, packed: zipfile.ZipFile, key: str) -> None:
    """Refuses one of their arrays that has not the shape of ours, or whose values ours cannot hold (ConfigError)."""
    with _reading(file), packed.open(f"{key}.npy") as member:
        shape, dtype = npy.read_header(member)
    at, name = _place(arrays, entry)
    ours = entry.out(np.broadcast_to(np.zeros((), at[name].dtype), at[name].shape)).shape
    if shape != ours:
        raise ConfigError(
            f"{file}: {key} has shape {shape}, but this model needs {ours}. Give the config of the model that the "
            "weights are of."
        )
    needed = _theirs(at[name].dtype)
    if not np.can_cast(dtype, needed, "safe"):
        raise ConfigError(f"{file}: {key} is {dtype}, which {needed} cannot hold exactly. Save it as {needed}.")


def _replace(arrays: dict[str, Any], entry: Entry, read: Read, key: str) -> int:
    """Puts one of their arrays in the place of ours; gives the number of its values.

    A table's is read again when it is wanted: the host never holds two.
    """
    at, name = _place(arrays, entry)
    old, new = at[name], read(key)
    if entry.table:
        at[name] = dataclasses.replace(as_lazy(old), read=_stored_rows(read, key, entry, old.dtype))
    else:
        at[name] = np.array(entry.back(new), old.dtype, order="C")
    return int(new.size)


def _theirs(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in a state dict of what we hold in `dtype`: an .npz file has no bfloat16.

    On the way in a bfloat16 table rounds to nearest.
    """
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


def _stored_rows(read: Read, key: str, entry: Entry, dtype: np.dtype[Any]) -> Callable[[Index], np.ndarray]:
    """Reads parts of a table in the order in which rows are stored."""

    def part(index: Index) -> np.ndarray:
        theirs = entry.back(read(key))
        rows = RowOrder(len(theirs)).row(np.arange(index[0].start, index[0].stop))
        return np.array(theirs[rows, index[1]], dtype, order="C")

    return part


def _one_at_a_time(file: Path, theirs: Any) -> Read:
    """Reads their arrays by key and keeps the last one, of which several parts may be wanted."""
    last: dict[str, np.ndarray] = {}

    def read(key: str) -> np.ndarray:
        if key not in last:
            last.clear()  # before the next one takes memory
            with _reading(file):
                last[key] = theirs[f"{key}.npy"]  # the member whose header was checked
        return last[key]

    return read


def _parameter(arrays: dict[str, Any], name: str) -> str:
    """The name of a dense parameter in an exported state, where Flax may add how it stores it."""
    return next(full for full in arrays["dense"] if full.removesuffix(".value") == name)


def _check_keys(found: Sequence[str], needed: Sequence[str], form: str) -> None:
    missing, extra = sorted(set(needed) - set(found)), sorted(set(found) - set(needed))
    if missing or extra:
        what = [
            f"{word} {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            for word, names in (("it lacks", missing), ("it has beside what the model needs", extra))
            if names
        ]
        raise ConfigError(
            f"it is a {form} state dict, but of another model: {'; '.join(what)}. Give the config of the model that "
            "the weights are of."
        )


@contextlib.contextmanager
def _named(file: Path) -> Any:
    """Puts the file before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


# What zipfile and NumPy raise over files that are damaged, encrypted or of a future form.
_UNREADABLE = (*npy.UNREADABLE, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)


@contextlib.contextmanager
def _reading(file: Path) -> Any:
    """Turns what a damaged or foreign file raises into a ConfigError."""
    try:
        with npy.without_warnings():
            yield
    except _UNREADABLE as error:
        raise ConfigError(
            f"{file} cannot be read as an .npz file: {error}. Save the state dict with numpy.savez(FILE, **{{k: "
            "v.cpu().numpy() for k, v in state_dict.items()})."
        ) from error


@contextlib.contextmanager
def _open(file: Path) -> Any:
    """The arrays of an .npz file, each read when asked for. Nothing in it is executed."""
    with contextlib.ExitStack() as stack:
        if not os.path.lexists(file):
            raise ConfigError(f"{file} does not exist. Give the .npz of a state dict.")
        with _reading(file):
            if file.exists() and not file.is_file():  # a pipe, say, over which it would wait forever
                raise ValueError("it is no regular file")
            stream = stack.enter_context(open(file, "rb"))
            if not zipfile.is_zipfile(stream):  # NumPy would advise to load it as a pickle, which can run code
                raise ValueError("it is a file of another kind, or cut short")
            stream.seek(0)
            opened = stack.enter_context(np.load(stream, allow_pickle=False))
        yield opened


def _write(file: Path, arrays: Iterable[tuple[str, np.ndarray, str]]) -> int:
    """Writes an .npz file that is whole or not there, as numpy.savez does but an array at a time; gives its values.

    Each of the arrays has a key, and of a table the hash of what its rows stand for, which becomes the comment of the
    array's entry in the archive: NumPy and others read past it.
    """
    values = needed_bytes = 0
    try:
        with replacing(located(file)) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as target:
            for key, array, rows_hash in arrays:
                needed_bytes += array.nbytes
                values += array.size
                entry = zipfile.ZipInfo(f"{key}.npy")
                entry.comment = f"{_ROWS_OF}{rows_hash}".encode() if rows_hash else b""
                with target.open(entry, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    except OSError as error:
        raise disk_error(file, error, needed_bytes) from error
    return values
