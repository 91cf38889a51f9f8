"""Preparation on Apache Beam, for data that one machine cannot prepare: the same blocks and vocabularies, bit for bit.

Four pipelines, one after the other, each on all machines that the runner has; what they leave in the work folder (see
beam_steps.py) joins them:

1. scan: checksums of the raw files, and where the pieces of each begin.
2. read: pieces to dictionary coded chunks; values are counted in shards, and every feature gets its vocabulary.
3. write: every file of blocks by one machine, from the chunks that hold its rows; nothing is shuffled.
4. check: the blocks of each split are read back, in order, for its checksum. One machine for each split: this is the
   only stage that more machines do not shorten.

The Criteo logs are read by many machines, in pieces (a gzipped file by one). The other datasets are read by one, for
they are small or sorted by time; the later stages are spread.

Beam's own options choose the runner (raw files, --out and its work folder beside it must be readable and writable from
every machine, so object storage or a shared folder; the workers need this version of recjax, from a container image):

    --runner=DirectRunner                                                              this machine, in memory: to try
    --runner=DataflowRunner --project=P --region=R --temp_location=gs://B/tmp --sdk_container_image=IMAGE
    --runner=FlinkRunner --flink_master=HOST:8081 --environment_type=DOCKER --environment_config=IMAGE
    --runner=SparkRunner --spark_master_url=spark://HOST:7077 --environment_type=DOCKER --environment_config=IMAGE
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recjax.data.batch import Schema
from recjax.data.datasets.criteo import CriteoReader
from recjax.data.datasets.options import options_of, transform_of
from recjax.data.prepare import beam_steps as steps
from recjax.data.prepare.beam_steps import Job, OpenRaw
from recjax.data.prepare.dense_columns import DenseEncoder, DenseStats
from recjax.data.prepare.encoder import VOCABULARY, Encoder
from recjax.data.prepare.ids import Frequency
from recjax.data.prepare.prepare import describe_encoding
from recjax.data.prepare.progress import PrepareProgress
from recjax.data.source import SPLITS
from recjax.data.storage import builder
from recjax.data.storage.blocks import PreparedSource, open_prepared, put_in_place, refuse_foreign
from recjax.data.storage.manifest import MANIFEST, write_manifest
from recjax.data.storage.remote import put_folder
from recjax.errors import ConfigError, DataError, RecjaxError
from recjax.utils.files import checksums
from recjax.utils.paths import is_remote, place

_BY = "dense.json"  # in the work folder: how dense columns are encoded


def prepare_on_beam(
    config: Any,
    source: str | None,
    open_raw: OpenRaw,
    out: str,
    flags: str,
    *,
    overwrite: bool = False,
) -> PreparedSource:
    """Prepares a dataset.

    Args:
      config: of the dataset.
      source: folder of the raw files, which every machine can read; also on object storage.
      open_raw: see `Job`.
      out: the folder to make; on object storage, or where every machine can write.
      flags: Beam's own pipeline options, such as "--runner=DirectRunner"; see its documentation.
      overwrite: replace prepared data of other content.

    Raises:
      ConfigError: Beam is not installed, or knows no such option.
      DataError: the raw files are at fault, or `out` holds something else.
      RecjaxError: a pipeline failed.
    """
    final = place(out)
    if not is_remote(final):
        refuse_foreign(final)
    if (final / MANIFEST).exists() and not overwrite:
        raise DataError(f"{final} already holds prepared data. Choose another folder with --out, or use --overwrite.")
    steps.forget()
    work = final.with_name(f".{final.name}.beam")
    if work.exists():
        _remove(work)
    target = final if is_remote(final) else work / "target"
    job = Job(config, source, open_raw, str(work), str(target))
    progress = PrepareProgress()
    run = functools.partial(_run, flags=flags, progress=progress)
    reader = steps.fresh_reader(job)
    files = len(reader.paths) if isinstance(reader, CriteoReader) else 1
    run("scanning the raw files", list(range(files)), functools.partial(steps.scan_file, job))
    reader = job.reader
    tasks: list[Any] = reader.tasks() if isinstance(reader, CriteoReader) else [None]
    _read(job, tasks, flags, progress)
    parts = sorted(steps.read_json(work / "parts.json"), key=lambda part: int(part["number"]))
    stats = DenseStats.total((DenseStats.from_json(part["dense"]) for part in parts), len(reader.dense))
    by = DenseEncoder(transform_of(config, reader), getattr(config, "missing_indicators", False), stats)
    steps.write_json(work / _BY, by.to_json())
    maps = steps.maps_of_job(job)
    schema = Encoder(reader.name, reader.features, reader.dense, maps, by).schema
    wanted = [file for split in SPLITS for file in steps.block_files(parts, split)]
    run("writing blocks", wanted, functools.partial(steps.write_blocks, job, _BY))
    written = {
        split: [steps.read_json(work / "blocks" / f"{f.split}-{f.index:05}.json") for f in wanted if f.split == split]
        for split in SPLITS
    }
    run("checking the blocks", list(SPLITS), functools.partial(_check, job, schema, written))
    table = {split: steps.read_json(work / f"split-{split}.json") for split in SPLITS}
    raw: dict[str, str] = {}
    for index in range(files):
        raw |= steps.read_json(work / "scan" / f"{index:05}.json")["files"]
    ids = getattr(config, "ids", Frequency())
    about: dict[str, Any] = {"label": reader.label, "splits": reader.splits, "options": options_of(config)}
    about |= getattr(reader, "about", {})
    skipped = dict(sum((collections.Counter(part["skipped"]) for part in parts), collections.Counter()))
    about |= {"files": raw, "skipped": skipped, **describe_encoding(reader, ids, by, maps)}
    with tempfile.TemporaryDirectory(prefix="recjax-info-") as temporary:
        folder = Path(temporary) / "info"
        _describe(job, folder, reader.name, schema, table, written, about)
        put_folder(folder, target, MANIFEST)
    if not is_remote(final):
        manifest = json.loads((target / MANIFEST).read_text("utf-8"))
        put_in_place(target, final, manifest, overwrite)
    _remove(work)
    progress.close()
    return open_prepared(final, reader.name)


def _describe(
    job: Job,
    folder: Path,
    name: str,
    schema: Schema,
    table: Mapping[str, Any],
    written: Mapping[str, list[dict[str, Any]]],
    about: Mapping[str, Any],
) -> None:
    """Writes all but the blocks into `folder`: vocabularies, TFDS's description, the manifest."""
    vocabularies = steps.vocabulary_folder(job)
    if vocabularies.is_dir():
        shutil.copytree(vocabularies, folder / VOCABULARY)
    builder.write_info(
        schema,
        folder,
        {
            split: builder.Written([file["blocks"] for file in files], sum(file["record_bytes"] for file in files))
            for split, files in written.items()
            if files
        },
    )
    entries = {Path(name): entry for name, entry in checksums(folder).items()}
    for files in written.values():
        entries |= {Path(file["name"]): {"bytes": file["bytes"], "sha256": file["sha256"]} for file in files}
    write_manifest(folder, name, schema, table, about, {str(file): entries[file] for file in sorted(entries)})


def _check(job: Job, schema: Schema, written: Mapping[str, list[dict[str, Any]]], split: str) -> None:
    steps.write_json(place(job.work) / f"split-{split}.json", steps.hash_split(job, schema, split, written[split]))


def _options(flags: str) -> Any:
    try:
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise ConfigError(
            "Apache Beam is not installed. It needs older versions of pyarrow and protobuf than constraints.txt names, "
            "so give it an environment of its own: pip install -e '.[beam]'."
        ) from None
    try:
        return PipelineOptions(shlex.split(flags))
    except (SystemExit, ValueError) as error:
        raise ConfigError(f"--beam={flags!r} is not understood ({error}). Give Beam's own pipeline options.") from None


def _run(stage: str, items: list[Any], work: Callable[[Any], None], *, flags: str, progress: PrepareProgress) -> None:
    """Calls `work` for every item, somewhere."""
    if not items:
        return
    options = _options(flags)
    import apache_beam as beam

    progress.note(f"{stage}: {len(items):,} to do")
    with _failures(stage), beam.Pipeline(options=options) as pipeline:
        _ = pipeline | beam.Create(items) | beam.Reshuffle() | stage >> beam.Map(work)


def _read(job: Job, tasks: list[Any], flags: str, progress: PrepareProgress) -> None:
    """The second pipeline."""
    options = _options(flags)
    import apache_beam as beam

    progress.note(f"reading: {len(tasks):,} tasks")
    parts_file = place(job.work) / "parts.json"
    frequency = isinstance(getattr(job.config, "ids", Frequency()), Frequency)
    with _failures("reading"), beam.Pipeline(options=options) as pipeline:
        found = (
            pipeline
            | beam.Create(tasks)
            | beam.Reshuffle()
            | "read" >> beam.FlatMap(functools.partial(steps.read_task, job))
        )
        parts, runs = found | beam.Partition(lambda item, _: int(item[0] >= 0), 2)
        _ = (
            parts
            | "parts" >> beam.Values()
            | beam.combiners.ToList()
            | "describe" >> beam.Map(functools.partial(steps.write_json, parts_file))
        )
        if not frequency:
            return
        shards = runs | beam.GroupByKey() | "count" >> beam.MapTuple(functools.partial(steps.count_shard, job))
        features = range(len(job.reader.features))
        empty = pipeline | "features" >> beam.Create([(feature, None) for feature in features])
        _ = (
            (shards, empty)
            | beam.Flatten()
            | "by feature" >> beam.GroupByKey()
            | "vocabulary" >> beam.MapTuple(functools.partial(steps.make_vocabulary, job))
        )


@contextlib.contextmanager
def _failures(stage: str) -> Iterator[None]:
    """Says in recjax's words what made a pipeline fail."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except RecjaxError as error:  # raised in this process, by a runner that adds where it happened
        raise type(error)(str(error).split(" [while running")[0]) from None
    except BaseException as error:
        text = str(error)
        for name, cls in (("DataError: ", DataError), ("ConfigError: ", ConfigError)):  # other runners give it as text
            if name in text:
                raise cls(text.split(name, 1)[1].splitlines()[0].split(" [while running")[0]) from None
        raise RecjaxError(
            f"{stage} failed on Beam ({type(error).__name__}: {' '.join(text.split())[:400]}). The runner's own logs "
            "tell more."
        ) from error


def _remove(folder: Path) -> None:
    if is_remote(folder):
        remove: Any = folder
        remove.rmtree()
    else:
        shutil.rmtree(folder)
