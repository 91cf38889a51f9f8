"""Raw files to prepared blocks, in two passes over the rows, with bounded memory; an interrupted one goes on.

1. Parse: the reader's chunks go to the work folder, dictionary coded, each with the counts of its training rows.
2. Count: the chunks' counts become one vocabulary a feature. Values of other splits are never counted.
3. Write: every chunk is encoded and written as blocks.

A chunk that is parsed and a vocabulary that is counted are kept until all is done; only the third stage starts again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from recjax.data.batch import Batch
from recjax.data.batch_checks import validate
from recjax.data.prepare.chunk import Chunk, RawFeature, Reader, check_chunk
from recjax.data.prepare.coding import code_chunk
from recjax.data.prepare.counting import Counter, Run
from recjax.data.prepare.dense_columns import DenseEncoder, DenseStats, Transform
from recjax.data.prepare.earlier import EarlierData
from recjax.data.prepare.encoder import VOCABULARY, Encoder, describe, describe_features
from recjax.data.prepare.ids import (
    Frequency,
    IdMap,
    IdOptions,
    VocabularyMap,
    first_row,
    load_maps,
    reduced,
    vocabulary_numbers,
)
from recjax.data.prepare.progress import PrepareProgress
from recjax.data.prepare.vocabulary import Vocabulary
from recjax.data.prepare.work_folder import Part, WorkFolder, work_folder
from recjax.data.source import BLOCK_ROWS, SPLITS, between, concatenate
from recjax.data.storage.blocks import PreparedSource, open_prepared, refuse_foreign, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.data.thread_map import ahead
from recjax.errors import DataError, TrainingError
from recjax.parallel.malloc import keep_freed_memory, return_free
from recjax.utils.paths import located

_VERSION = 6  # of the work folder; raise it when the same files and options start to give other parts
_THREADS = 2  # beside the one that reads or writes; NumPy and Arrow let go of the interpreter for most of their work
_KEPT_ROWS = 2**25  # of values of parts, 4 bytes each: found once for all splits
_T = TypeVar("_T")
_ENCODING = ("ids", "dense", "missing_indicators")  # the options that do not change what is parsed


def prepare_data(
    reader: Reader,
    out: str | os.PathLike[str],
    *,
    ids: IdOptions,
    dense: Transform,
    missing_indicators: bool,
    options: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    earlier: EarlierData | None = None,
    keep_values: bool = False,
) -> PreparedSource:
    """Prepares what a reader reads.

    Args:
      reader: of the raw files.
      out: the folder to make.
      ids: how values become rows of tables.
      dense: the transform of dense values.
      missing_indicators: whether each dense column gets another that says where it is missing.
      options: all options by name, these included (`options.options_of`): an opened config is compared with them.
      more: what else the data shall tell of themselves (`PreparedSource.about`); JSON values.
      overwrite: replace prepared data of other content.
      earlier: data whose statistics of dense columns hold for these too.
      keep_values: whether each value of theirs keeps its row, and new ones get rows after these.

    Raises:
      DataError: the raw files are at fault, or `out` holds something else.
      TrainingError: the disk is full or refuses.
    """
    out = located(out)
    keep_freed_memory()
    progress = PrepareProgress()
    if not isinstance(ids, Frequency):
        load_maps(Path(), ids, reader.features)  # refuses bad options before the work
    about: dict[str, Any] = {"label": reader.label, "splits": reader.splits, "options": dict(options)}
    about |= {**getattr(reader, "about", {}), **(more or {})}
    progress.stage("checksums")
    hashing = _in_background(reader.files)
    refuse_foreign(out)
    if (out / MANIFEST).exists():
        about["files"] = dict(hashing.result())
        if (made := _already(out, reader, about, overwrite)) is not None:
            progress.note(f"{out} holds these data already")
            return made
    try:
        with work_folder(out) as work:
            _parse(reader, work, options, hashing, progress, earlier is not None)
            about["files"] = dict(hashing.result())
            skipped = (collections.Counter(part.skipped) for part in work.parts)
            about["skipped"] = dict(sum(skipped, collections.Counter[str]()))
            if about["skipped"]:
                faults = ", ".join(f"{count:,} ({kind})" for kind, count in sorted(about["skipped"].items()))
                progress.note(f"on_error=skip left out malformed lines: {faults}")
            if earlier is not None and keep_values and isinstance(ids, Frequency):
                maps, folder = _count_on(reader, work, ids, earlier)
            else:
                maps, folder = _count(reader, work, ids, progress)
            stats = DenseStats.total((part.dense for part in work.parts), len(reader.dense))
            if earlier is not None:
                stats = earlier.stats(reader.dense, stats)
            by = DenseEncoder(dense, missing_indicators, stats)
            about |= describe_encoding(reader, ids, by, maps)
            files = {str(Path(VOCABULARY) / file.relative_to(folder)): file for file in folder.rglob("*.npy")}
            labels, label_group = getattr(reader, "labels", ()), getattr(reader, "label_group", "")
            encoder = Encoder(reader.name, reader.features, reader.dense, maps, by, labels, label_group)
            return_free()  # for the system to hold the blocks in
            with ThreadPoolExecutor(_THREADS) as pool:
                splits = _Blocks(work, encoder, progress, pool).splits()
                made = write_prepared(
                    out,
                    reader.name,
                    encoder.schema,
                    splits,
                    about,
                    overwrite=overwrite,
                    attachments=files,
                    fitting=True,
                )
            work.remove()
    except OSError as error:
        raise TrainingError(
            f"cannot prepare {out}: {error.strerror or error} ({error.filename or out.parent}). What is finished is "
            f"kept beside it, in .{out.name}.work: make space or mend permissions and give the same command again, or "
            "remove that folder and choose another place with --out (or RECJAX_CACHE, for data that recjax prepares by "
            "itself)."
        ) from error
    finally:
        progress.close()
    return made


def describe_encoding(reader: Reader, ids: IdOptions, by: DenseEncoder, maps: Sequence[IdMap]) -> dict[str, Any]:
    """Describes how raw rows became those of prepared data, which keep this."""
    vocabularies = {
        feature.name: {"rows": map_.table_rows, "sha256": map_.vocabulary.sha256()}
        for feature, map_ in zip(reader.features, maps, strict=True)
        if isinstance(map_, VocabularyMap)
    }
    return {"encoder": describe(reader.features, reader.dense, ids, by), "vocabularies": vocabularies}


def _already(out: Path, reader: Reader, about: Mapping[str, Any], overwrite: bool) -> PreparedSource | None:
    """The intact data at `out` if they are what is asked for; refuses others before hours of work are spent."""
    try:
        made = open_prepared(out, reader.name)
        encoder = made.about.get("encoder", {})  # of another form if an older recjax wrote it
        same = encoder.get("features") == describe_features(reader.features)
        if same and all(made.about.get(key) == about[key] for key in about):
            return made.verify()
    except DataError:  # damaged, or another dataset
        pass
    if not overwrite:
        raise DataError(
            f"{out} already holds prepared data of other content, and a run may depend on them. "
            "Choose another folder with --out, or replace them with --overwrite."
        )
    return None


def _in_background(function: Callable[[], _T]) -> Future[_T]:
    """Calls a function in a thread that an error elsewhere, or the end of the process, need not wait for."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _parse(
    reader: Reader,
    work: WorkFolder,
    options: Mapping[str, Any],
    hashing: Future[Mapping[str, str]],
    progress: PrepareProgress,
    may_miss: bool,
) -> None:
    """Brings the work folder's parts to the end of the reader's chunks; with `may_miss` any feature may miss values.

    Work that is there already waits for the files' checksums, which tell whether it is of these files. New work does
    not: it can be taken up again from the moment on when they are known.
    """

    def key() -> dict[str, Any]:
        parsing = {name: value for name, value in options.items() if name.split(".")[0] not in _ENCODING}
        files = dict(hashing.result())
        return {"version": _VERSION, "reader": reader.name, "files": files, "options": parsing}

    if work.claimed:
        work.resume(key())
    else:
        work.clear()
    rows = sum(sum(part.rows) for part in work.parts)
    if work.parts:
        progress.note(f"going on with {rows:,} rows that an interrupted preparation has read")
    progress.stage("reading", rows, (work.parts[-1].done or 0.0) if work.parts else 0.0)

    def store(numbered: tuple[int, Chunk]) -> Part:
        index, chunk = numbered
        check_chunk(chunk, reader, [feature.name for feature in reader.features] if may_miss else ())
        return work.write(index, code_chunk(chunk), chunk.skipped, chunk.done)

    start = len(work.parts)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for part in ahead(pool, _THREADS, store, enumerate(reader.chunks(start), start)):
                work.finish(part)
                if hashing.done() and not work.claimed:
                    work.claim(key())
                rows += sum(part.rows)
                progress.update(rows, part.done)
        if not work.claimed:
            work.claim(key())
    except DataError:
        work.remove()  # of no use to a run on mended files or with other options
        raise


def _count(reader: Reader, work: WorkFolder, ids: IdOptions, progress: PrepareProgress) -> tuple[list[IdMap], Path]:
    """The map of every feature, and the folder of their vocabularies: a folder for each, by the feature's number."""
    text = json.dumps([ids.kind, vars(ids)], sort_keys=True)
    folder = work.path / "vocabulary" / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    features = reader.features
    if not isinstance(ids, Frequency):
        return load_maps(folder, ids, features), folder
    progress.stage("counting")
    numbers = vocabulary_numbers(features)

    def make(index: int) -> int:
        if not (folder / str(index)).is_dir():
            unfinished = folder / f"unfinished-{index}"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            members = [i for i, number in enumerate(numbers) if number == index]
            vocabulary = _vocabulary(work, members, ids, features[index], unfinished)
            shutil.rmtree(unfinished)
            vocabulary.save(unfinished)
            unfinished.rename(folder / str(index))
        return index

    rows = sum(sum(part.rows) for part in work.parts)
    with ThreadPoolExecutor(_THREADS) as pool:
        for index in ahead(pool, _THREADS, make, sorted(set(numbers))):
            done = (index + 1) / len(features)
            progress.update(round(rows * done), done)
    return load_maps(folder, ids, features), folder


def _count_on(reader: Reader, work: WorkFolder, ids: Frequency, earlier: EarlierData) -> tuple[list[IdMap], Path]:
    """The same, where values of earlier data keep their rows, and those that were too rare then count on."""
    folder, features = work.path / "grown", reader.features
    shutil.rmtree(folder, ignore_errors=True)
    numbers = vocabulary_numbers(features)
    for number in sorted(set(numbers)):
        members = [i for i, of_feature in enumerate(numbers) if of_feature == number]
        scratch = folder / f"unfinished-{number}"
        scratch.mkdir(parents=True)
        run = _total_counts(work, members, ids, scratch, 1)
        shutil.rmtree(scratch)
        earlier.grow(features[number], run, least_count(ids, features[number]), folder / str(number))
    return load_maps(folder, ids, features), folder


def _vocabulary(
    work: WorkFolder, members: Sequence[int], ids: Frequency, feature: RawFeature, folder: Path
) -> Vocabulary:
    """The vocabulary of `feature`, from the counts of all parts.

    Args:
      work: the parts.
      members: numbers of the features that have this vocabulary.
      ids: the options.
      feature: the one of them whose options hold.
      folder: for temporary files.
    """
    values, counts = _total_counts(work, members, ids, folder, least_count(ids, feature))
    return Vocabulary.counted(values, counts, 1, first_row(feature))


def _total_counts(work: WorkFolder, members: Sequence[int], ids: Frequency, folder: Path, least: int) -> Run:
    """The counts of the values of some features over all parts, of those that occur `least` times at the least."""
    counter = Counter(folder)
    for part in work.parts:
        for index in members:
            values, counts = counted(work.train_counts(part, index), ids)
            counter.add(values, counts)
    return counter.total(least)


def counted(run: Run, ids: Frequency) -> Run:
    """The counts of values as the vocabulary counts them: modulo a number, if the options say so."""
    values, counts = run
    if ids.modulo and len(values):
        values, at = np.unique(reduced(values, ids.modulo), return_inverse=True)
        counts = np.bincount(at, counts, len(values)).astype(np.int64)  # exact below 2^53
    return values, counts


def least_count(ids: Frequency, feature: RawFeature) -> int:
    """Returns the number of occurrences from which a value gets a row of its own."""
    return max(ids.min_count, feature.min_count)


class _Blocks:
    """The encoded blocks of each split, made in threads a little ahead of their use."""

    def __init__(self, work: WorkFolder, encoder: Encoder, progress: PrepareProgress, pool: Executor) -> None:
        self._work, self._encoder, self._progress, self._pool = work, encoder, progress, pool
        self._total = sum(sum(part.rows) for part in work.parts)
        self._written = 0
        self._kept: dict[str, dict[str, np.ndarray]] = {}  # file of a part -> rows of its values, for its other splits
        self._room = _KEPT_ROWS
        from recjax.data.storage import builder  # slow to import; here, where no other thread imports

        self._as_stored = builder.as_stored
        progress.stage("writing")

    def splits(self) -> dict[str, Iterator[Batch]]:
        return {name: self._blocks(split) for split, name in enumerate(SPLITS)}

    def _blocks(self, split: int) -> Iterator[Batch]:
        names = [feature.name for feature in self._encoder.schema.features]

        def encode(place: tuple[Part, int]) -> Batch:
            part, start = place
            coded = self._work.read(part, split, names)
            rows = self._kept.get(part.file)
            if rows is None and self._room > 0 and any(part.rows[split + 1 :]):
                rows = self._kept[part.file] = self._encoder.rows_of_values(coded)
                self._room -= sum(map(len, rows.values()))
            batch = dataclasses.replace(self._encoder.encode_coded(coded, rows), position=start)
            del coded
            self._work.forget(part, split)
            try:  # here, for many blocks at once: each call has its price
                validate(batch, self._encoder.schema)
            except DataError as error:
                raise DataError(f"split {SPLITS[split]!r}: {error}") from None
            return self._as_stored(batch, self._encoder.schema)

        parts = [part for part in self._work.parts if part.rows[split]]
        starts = itertools.accumulate((part.rows[split] for part in parts), initial=0)
        rest = None
        for rows in ahead(self._pool, _THREADS, encode, zip(parts, starts, strict=False)):
            start = 0
            if rest is not None:
                start = min(BLOCK_ROWS - rest.size, rows.size)
                rest = concatenate([rest, between(rows, 0, start)])
                if rest.size < BLOCK_ROWS:
                    continue
                yield self._counted(rest)
            whole = rows.size - (rows.size - start) % BLOCK_ROWS
            for first in range(start, whole, BLOCK_ROWS):
                yield self._counted(between(rows, first, first + BLOCK_ROWS))
            rest = between(rows, whole, rows.size) if whole < rows.size else None
        if rest is not None:
            yield self._counted(rest)

    def _counted(self, block: Batch) -> Batch:
        self._written += block.size
        self._progress.update(self._written, self._written / self._total)
        return block
