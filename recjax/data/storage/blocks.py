"""Prepared data on disk: block records (see builder.py) and beside them `recjax.json`, which says what they are.

    DIR/recjax.json                                      format, schema, rows of every block, checksum of every file
    DIR/blocks/1.0.0/blocks-train.array_record-*         the blocks, as TFDS writes them

A preparation works in a hidden sibling folder and renames it when all is complete, so DIR either holds a complete
preparation or does not exist, wherever the work is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np

from recjax.data import given
from recjax.data.batch import Batch, RowBatch, RowLayout, Rows, Schema
from recjax.data.source import SPLITS, split_called
from recjax.data.storage.manifest import (
    BLOCKS,
    BLOCKS_PER_FILE,
    MANIFEST,
    described_split,
    no_permission,
    one_line,
    prepare_again,
    read_manifest,
    row_counts,
    schema_from_json,
    write_manifest,
)
from recjax.data.storage.packed_rows import PACKED, PackedFile, PackedSplit, write_files
from recjax.data.storage.remote import Cached, block_files, cache_folder, into_cache
from recjax.data.thread_map import ahead
from recjax.errors import DataError, TrainingError
from recjax.parallel.malloc import keep_freed_memory
from recjax.utils import log, strict_json
from recjax.utils.files import sha256
from recjax.utils.locks import locked_folder
from recjax.utils.paths import is_remote, located, place

_AHEAD = 4  # blocks that are checked before they are written


class PreparedSource:
    """Prepared blocks (a `BlockSource`). Make one with `open_prepared` or `write_prepared`.

    Attributes:
      path: the folder; of data on object storage, that of the copies of what describes them.
      name: the dataset's name.
      schema: its columns.
      fingerprint: hash of schema and content; the same on every machine that prepares the same data.
      about: what else the dataset says of itself (split convention in words, options, vocabularies, baselines).
    """

    def __init__(self, path: Path, manifest: dict[str, Any], cached: Cached | None = None) -> None:
        """A source over a folder whose manifest has been checked; `open_prepared` does that."""
        self.path, self._manifest, self._cached = path, manifest, cached
        self.name: str = manifest["dataset"]
        self.schema = schema_from_json(manifest["schema"])
        self.fingerprint: str = manifest["fingerprint"]
        self.about: dict[str, Any] = manifest["about"]
        self._stored: dict[str, str] = {name: name for name in manifest["splits"]}
        for name in manifest["splits"]:  # an older recjax kept names such as "valid"
            self._stored.setdefault(split_called(name) or name, name)
        self._counts = {split: row_counts(manifest, name) for split, name in self._stored.items()}
        self._ends = {name: np.cumsum(counts) for name, counts in self._counts.items()}
        # Before threads read: TFDS replaces `import` for all of them while it is imported, and two may then wait for
        # each other for ever. Not with this module, which verbs import that read no data: it is slow.
        from recjax.data.storage import builder

        self._reader = functools.cache(functools.partial(self._open, builder.Reader))
        self._files = functools.cache(functools.partial(block_files, manifest["files"]))
        self._packed_splits: dict[str, PackedSplit | None] = {}
        self._packing = threading.Lock()

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `recjax.json`."""
        return self._manifest

    @property
    def has_blocks(self) -> bool:
        """False of a run's copy of its data, which says how many rows there were."""
        return any(Path(name).parts[0] == BLOCKS for name in self._manifest["files"])

    def row_counts(self, split: str) -> np.ndarray:
        """Rows of each block: int64 [blocks]; none of a split that was not written."""
        if split in SPLITS and split not in self._counts:
            return np.zeros(0, np.int64)
        if split not in self._counts:
            names = ", ".join(self._manifest["splits"])
            raise DataError(f"{self.name} at {self.path} has no split {split!r}; its splits are {names}.")
        return self._counts[split]

    def read(self, split: str, index: int) -> Batch:
        """Block `index` of `split`.

        Raises:
          DataError: the record cannot be read; the message names the damaged file.
        """
        packed = self.rows(split) if self._cached is not None else None  # else its file would be copied for it
        if packed is None:
            return self._read(split, index)
        end = int(self._ends[split][index])
        numbers_B = np.arange(end - int(self._counts[split][index]), end)
        block = RowBatch(packed, numbers_B, int(numbers_B[0]), index)
        return block.with_bags(block.bags)

    def _read(self, split: str, index: int) -> Batch:
        rows = int(self.row_counts(split)[index])
        if self._cached is not None:
            self._cached.fetch(self._files(self._stored[split])[index // BLOCKS_PER_FILE])
        try:
            block = self._reader(split).read(index)
        except Exception as error:  # the readers below raise many kinds
            raise DataError(
                f"block {index} of split {split!r} at {self.path} cannot be read ({one_line(error)}). "
                f"{_blame(self.path, self._manifest)}"
            ) from error
        if block.size != rows:
            raise DataError(
                f"block {index} of split {split!r} at {self.path} has {block.size} rows, but {MANIFEST} says "
                f"{rows}. {_blame(self.path, self._manifest)}"
            )
        return dataclasses.replace(block, position=int(self._ends[split][index]) - rows)

    def rows(self, split: str, pack: bool = False) -> Rows | None:
        """The rows of a split, of which any can be taken; None where they are not packed for that.

        Args:
          split: its name.
          pack: whether to pack those that are not, beside the blocks or in the cache folder. Where neither has room for
            them, that is said once, and the blocks are what is read.
        """
        with self._packing:
            if split in SPLITS and split not in self._packed_splits and self.row_counts(split).size and self.has_blocks:
                keep_freed_memory()
                packed = self._pack(split, pack)
                if packed or pack:
                    self._packed_splits[split] = packed
            return self._packed_splits.get(split)

    def _pack(self, split: str, pack: bool) -> PackedSplit | None:
        """Opens the packed rows of a split where they are, or first makes them; None where neither can be."""
        beside, names = self.path / PACKED, self._files(self._stored[split])
        counts = np.split(self.row_counts(split), range(BLOCKS_PER_FILE, len(self.row_counts(split)), BLOCKS_PER_FILE))
        layout, origins = RowLayout(self.schema), [self._manifest["files"][name]["sha256"] for name in names]

        def files_in(folder: Path) -> list[PackedFile]:
            paths = [folder / f"{split}-{number:05}.rows" for number in range(len(names))]
            rows = [int(of_file.sum()) for of_file in counts]
            return list(map(PackedFile, paths, itertools.repeat(layout), rows, origins))

        def blocks_of(number: int) -> Iterator[Batch]:
            start = number * BLOCKS_PER_FILE
            return (self._read(split, start + i) for i in range(len(counts[number])))

        if len(names) != len(counts):
            return None
        reason = "that folder is a link"
        for folder in (beside, cache_folder() / PACKED / self.fingerprint[:16]):
            if folder == beside and folder.is_symlink():  # whoever made it chose where it leads
                continue
            files = files_in(folder)
            if all(file.is_there() for file in files):
                return PackedSplit(files)
            try:
                if pack:
                    write_files(files, blocks_of, self.name)
            except OSError as error:
                reason = one_line(error)
                continue
            if pack and self._cached is not None:
                for name in names:
                    self._cached.drop(name)
            if pack:
                return PackedSplit(files)
        if pack:
            log.info(
                f"note: the rows of {self.name} cannot be packed for reading, neither in {beside} nor in {folder} "
                f"({reason}), so that their blocks are read, which is slower. Make room there, or name another folder "
                "for the second with RECJAX_CACHE."
            )
        return None

    def verify(self) -> Self:
        """Returns itself, once every file was read (of object storage: copied) and has its checksum.

        Raises:
          DataError: a file whose content has changed, by name, or that cannot be reached.
        """
        if self._cached is not None:
            for name in self._manifest["files"]:
                self._cached.fetch(name)
        elif _damaged_files(self.path, self._manifest):
            raise DataError(_blame(self.path, self._manifest))
        return self

    def _open(self, reader: Callable[..., Any], split: str) -> Any:
        keep_freed_memory()
        return reader(self.schema, self.path, self._stored[split])


def open_prepared(path: str | os.PathLike[str], expect_dataset: str | None = None, cache: str = "") -> PreparedSource:
    """Opens prepared data after checking that they are complete (sizes, not checksums: see `verify`).

    Args:
      path: the folder that `recjax data prepare` wrote; on object storage too (`places.place`).
      expect_dataset: refuse data of another dataset.
      cache: folder for copies of files of object storage; empty: the usual one (see remote.py).

    Raises:
      DataError: nothing there, not prepared data, another dataset or format, a file missing or of another size,
        or no permission to read.
    """
    path = place(path)
    manifest = read_manifest(path, expect_dataset)
    if is_remote(path):
        cached = into_cache(path, manifest, cache)
        return PreparedSource(cached.local, manifest, cached)
    for name, entry in manifest["files"].items():
        data, size = path / name, entry["bytes"]
        found = data.stat().st_size if data.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"is {found} bytes long instead of {size}"
            command = prepare_again(path, expect_dataset)
            raise DataError(f"prepared data are damaged: {data} {state}. Prepare them again: {command} --overwrite")
        if not os.access(data, os.R_OK):
            raise DataError(no_permission(data))
    return PreparedSource(path, manifest)


def write_prepared(
    out: str | os.PathLike[str],
    dataset: str,
    schema: Schema,
    splits: Mapping[str, Iterable[Batch]],
    about: Mapping[str, Any],
    *,
    overwrite: bool = False,
    attachments: Mapping[str, Path] | None = None,
    fitting: bool = False,
) -> PreparedSource:
    """Writes prepared data, whole or not at all.

    Args:
      out: the folder to make. If it already holds the same content, it is kept as it is.
      dataset: the dataset's name.
      schema: the columns of every block; blocks that do not fit are refused.
      splits: the blocks of every split ("train", "validation", "test"), read once. A single Batch stands for a list of
        one; "valid", "val" and "dev" are validation.
      about: what else to tell of the data; JSON values.
      overwrite: replace prepared data of other content.
      attachments: further files to keep beside the blocks: name below the folder -> file to copy.
      fitting: the blocks are known to fit the schema, and have the types of the record (`builder.as_stored`).

    Raises:
      DataError: `out` holds something else, or a block does not fit the schema.
      TrainingError: no permission to write, or the disk is full.
    """
    out = located(out)
    schema, splits, about = given.check_schema(schema), given.named_splits(splits), given.check_about(about)
    try:
        refuse_foreign(out)
        with _workspace(out) as folder:
            for name, file in (attachments or {}).items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / name)
            manifest = _write_all(folder, dataset, schema, splits, about, fitting)
            put_in_place(folder, out, manifest, overwrite)
    except OSError as error:
        raise TrainingError(
            f"cannot write prepared data to {out}: {one_line(error)}. Nothing of it was kept. Give the place free "
            "space and write permission, or choose another with --out (or RECJAX_CACHE, for data that recjax prepares "
            "by itself)."
        ) from error
    return open_prepared(out, dataset)


@contextlib.contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` in which no other process works; removed at the end unless it was renamed.

    The lock is on the folder itself, so it ends with the process, and what a killed process left is cleared by the
    next one.
    """
    folder = out.with_name(f".{out.name}.preparing")
    with locked_folder(folder) as in_place:
        try:
            for leftover in folder.iterdir():
                _remove(leftover)
            yield folder
        finally:
            if in_place():
                shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_all(
    folder: Path,
    dataset: str,
    schema: Schema,
    splits: Mapping[str, Iterable[Batch]],
    about: Mapping[str, Any],
    fitting: bool,
) -> dict[str, Any]:
    """Writes blocks and manifest into `folder`; returns the manifest."""
    from recjax.data.storage import builder

    hashes = {split: hashlib.sha256() for split in splits}
    block_rows: dict[str, list[int]] = {split: [] for split in splits}
    ends = dict.fromkeys(splits, 0)

    def checked(split: str, block: Batch) -> Batch:
        if not fitting:
            block = given.fitted(block, schema, split, len(block_rows[split]), ends[split])
            block = builder.as_stored(block, schema)
        ends[split] += block.size
        block_rows[split].append(block.size)
        # One call a block: after each this thread waits until others let go of the interpreter.
        hashes[split].update(b"".join(np.ascontiguousarray(array).data for array in builder.arrays(block)))
        return block

    with ThreadPoolExecutor(1) as checking, ThreadPoolExecutor(1) as hashing:  # one thread each, so in order
        filled = {}
        for split, blocks in splits.items():
            stream = ahead(checking, _AHEAD, functools.partial(checked, split), blocks)
            first = next(stream, None)
            if first is not None:  # TFDS refuses to write an empty split
                filled[split] = itertools.chain([first], stream)
        sums: dict[Path, Future[str]] = {}  # of finished files, beside the writing of the next
        builder.write(schema, filled, folder, lambda file: sums.update({file: hashing.submit(sha256, file)}))
    table = {split: described_split(rows, hashes[split].hexdigest()) for split, rows in block_rows.items()}
    files = {
        str(file.relative_to(folder)): {
            "bytes": file.stat().st_size,
            "sha256": sums[file].result() if file in sums else sha256(file),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return write_manifest(folder, dataset, schema, table, about, files)


def put_in_place(folder: Path, out: Path, manifest: dict[str, Any], overwrite: bool) -> None:
    """Renames the complete `folder` to `out`, unless `out` holds the same already, or other data."""
    if not (out / MANIFEST).exists():
        folder.rename(out)  # `out` is missing or empty: see refuse_foreign
        return
    try:
        old = strict_json.parse((out / MANIFEST).read_bytes())
        same = old["fingerprint"] == manifest["fingerprint"]
        if same and old["about"] == manifest["about"] and not _damaged_files(out, old):
            return
    except (ValueError, KeyError, TypeError, AttributeError):
        same = False
    if not (same or overwrite):
        raise DataError(
            f"{out} already holds prepared data of other content, and a run may depend on them. "
            "Choose another folder with --out, or replace them with --overwrite (in Python overwrite=True)."
        )
    aside = out.with_name(f".{out.name}.replaced")
    _remove(aside)
    out.rename(aside)
    folder.rename(out)
    _remove(aside)


def refuse_foreign(out: Path) -> None:
    """DataError if `out` holds anything but prepared data."""
    foreign = any(out.iterdir()) and not (out / MANIFEST).exists() if out.is_dir() else out.exists()
    if foreign:
        raise DataError(
            f"{out} exists and is not prepared data. Choose another folder with --out; nothing was changed."
        )


def _damaged_files(path: Path, manifest: dict[str, Any]) -> list[Path]:
    """The files of prepared data that are missing or have another content than when they were written."""
    return [
        path / name
        for name, entry in manifest["files"].items()
        if not (path / name).is_file() or sha256(path / name) != entry["sha256"]
    ]


def _blame(path: Path, manifest: dict[str, Any]) -> str:
    """Says what is damaged and what to do about it, for an error message."""
    try:
        damaged = ", ".join(str(file) for file in _damaged_files(path, manifest))
    except OSError as error:
        damaged = f"{error.filename} ({error.strerror})"
    what = f"Damaged: {damaged}." if damaged else "All files have the content that they were written with."
    return (
        f"{what} Prepare the data again: recjax data prepare {manifest['dataset']} --from PATH --out {path} --overwrite"
    )
