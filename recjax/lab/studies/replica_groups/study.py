"""The study of replica groups whose tables are their own, after the "distributed DLRM" project of UW-Madison.

There, two nodes each keep embedding tables of their own and synchronise only the MLPs; the report expects one node's
accuracy in training after half the iterations, and a difference between the tables whose norm reaches a plateau. Its
figures 4 to 14 are made again here, beside what recjax does by default (the exact update, for which tables are one) and
what the report left open: tables that are averaged from time to time, plain and compressed, and gradients that arrive
late.

Every group takes as many samples an iteration, so that more groups see more samples. What is done is kept in the
study's folder: a study that was stopped goes on from there.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax

from recjax import settings
from recjax.config.run import RunConfig
from recjax.data import catalog
from recjax.data.batch import Schema
from recjax.data.datasets.yelp import Yelp
from recjax.data.source import BlockSource
from recjax.errors import ConfigError
from recjax.lab.studies import report
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.replica_groups import compared, cost
from recjax.lab.studies.replica_groups.arranged import Arranged
from recjax.lab.studies.replica_groups.training import Arm, Shape, arranged, configured, run
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.train.build import build_trainer
from recjax.utils import log

GROUPS = (1, 2, 4)
ITEMS = ("business", "movie", "item")  # features that samples are parted by, the first that the data have
AVERAGES = (1, 10, 100)  # iterations between whole-table averages, of which the bytes are stated
SHAPES = (Shape(4, (64, 32, 16, 4)), Shape(16, (512, 256, 64, 16)))  # of figures 13 and 14
SHAPED_BATCH = 512  # samples of a group, there
SEED_STEP = 1000  # between the seeds of trainings, whose groups may have seeds that follow each other


@dataclasses.dataclass(frozen=True)
class Options:
    """Lengths of all that is measured.

    Attributes:
      iterations: of each training.
      every: iterations between measures.
      timed: iterations of a profile; 0 leaves the times out.
      series: iterations that are timed one by one.
      seeds: trainings of each kind, that differ in their seed alone.
      all_seeds: whether also those that no figure of the source shows are trained with all seeds, and not with one.
    """

    iterations: int
    every: int
    timed: int
    series: int
    seeds: int
    all_seeds: bool = False


SMALL = Options(iterations=300, every=50, timed=20, series=100, seeds=3)
FULL = Options(iterations=6000, every=200, timed=100, series=2000, seeds=3, all_seeds=True)


def study(config: RunConfig, out: Path, options: Options) -> tuple[dict[str, Any], report.Report]:
    """Runs the study, or what is left of it, and writes its report and replicas.json.

    Args:
      config: data and model. `train.batch_size` is that of two groups; of `mesh.devices`, or all there are, each of
        four groups gets a quarter, rounded up to 1.
      out: folder to write, made if need be.
      options: how long to look.

    Returns:
      JSON values: "about"; "trainings", for each seed and arm its settings and what `training.run` gives; "times",
      parts of an iteration; "series", iterations one by one, and their parts; "bytes", by number of groups; and
      "files", names in `out`. And the report.

    Raises:
      ConfigError, DataError, DeviceError, TrainingError: as `build_trainer`; or `out` cannot be written, or holds
        another study.
    """
    began = time.monotonic()
    devices = max(1, (config.mesh.devices or max(GROUPS)) // max(GROUPS))
    make_mesh(MeshConfig(max(devices * max(GROUPS), 4), config.mesh.platform))  # the largest first: see there
    batch_size = max(devices, config.train.batch_size // 2 // devices * devices)
    source = config.data.open()
    feature = next((name for name in ITEMS if _parts(source.schema, name)), "")
    setup = {"config": settings.to_json(config), "data": source.fingerprint, "options": dataclasses.asdict(options)}
    finished = Finished(out, setup, "replicas")
    about: dict[str, Any] = {
        "data": source.name,
        "model": config.model.kind,
        "samples": int(source.row_counts("train").sum()),
        "batch_size_of_a_group": batch_size,
        "devices_of_a_group": devices,
        "parted_by": feature,
        "iterations": options.iterations,
        "seeds": options.seeds,
        "device": jax.devices()[0].device_kind,
    }
    result: dict[str, Any] = {"about": about, "trainings": [], "series": [], "times": []}
    for arm, seed in trainings(feature, options, config.train.clip_norm > 0, _other_interaction(config)):
        name = f"{arm.name}, seed {seed}"
        size = SHAPED_BATCH // devices * devices if arm.shape else batch_size

        def train(arm: Arm = arm, seed: int = seed, size: int = size, name: str = name) -> dict[str, Any]:
            log.info(f"training: {name}")
            seeded = dataclasses.replace(config, seed=(config.seed + seed * SEED_STEP) % 2**32)
            trainer = arranged(configured(seeded, arm, devices, size), source, arm, options.iterations, feature)
            return run(trainer, options.iterations, options.every, log.info)

        found = finished.get(f"training: {name}", train)
        kept = {**dataclasses.asdict(arm), "label": arm.label, "name": arm.name, "seed": seed, "batch": size}
        result["trainings"].append({**kept, "measures": found})
    result["trainings"].sort(key=lambda training: training["seed"])
    if options.timed:
        result["series"] = list(_series(config, source, batch_size, options, finished.get))
        result["times"] = list(_times(config, source, batch_size, options, finished.get))
    result["bytes"] = finished.get("bytes", lambda: _bytes(config, source, devices, batch_size))
    result["about"] |= report.provenance(began)
    made = compared.report(result)
    result["files"] = report.write(made, result, out)
    return result, made


def on_yelp(
    config: RunConfig, raw: Path, out: Path, options: Options
) -> dict[Literal["business", "review"], tuple[dict[str, Any], report.Report]]:
    """Does the study on Yelp's files: with a row for each business, as the source, and for each review.

    Args:
      config: as for `study`; of its data what does not say where they are and what a row is.
      raw: folder of the files.
      out: folder to write: the prepared data and a study for either, in folders of their own.
      options: how long to look.

    Returns:
      What `study` returns for either.

    Raises:
      ConfigError: the config's data are others, or as for `study`.
      DataError, DeviceError, TrainingError: as for `study`, or the files are at fault.
    """
    data = config.data
    if not isinstance(data, Yelp):
        raise ConfigError(
            f"--data is a folder of Yelp's files, but the preset trains on {data.kind}. Leave out one of them."
        )
    found: dict[Literal["business", "review"], Any] = {}
    pers: tuple[Literal["business", "review"], ...] = ("business", "review")
    for per in pers:
        each = dataclasses.replace(data, per=per, path=str(out / f"data_{per}"))
        log.info(f"data: a row for each {per}")
        catalog.prepare(each, raw, each.path)
        found[per] = study(dataclasses.replace(config, data=each), out / per, options)
    return found


def _parts(schema: Schema, name: str) -> bool:
    return any(f.name == name and f.bag == 1 for f in schema.features)


def _other_interaction(config: RunConfig) -> Literal["", "dot", "cat"]:
    """The interaction of DLRM that the config does not have; "" for another model."""
    if not isinstance(config.model, DLRMConfig):
        return ""
    return "cat" if config.model.interaction == "dot" else "dot"


def trainings(
    feature: str, options: Options, clipped: bool, interaction: Literal["", "dot", "cat"] = ""
) -> Iterator[tuple[Arm, int]]:
    """Returns the trainings with their seeds, all of an arm one after the other: a stopped study has whole arms.

    Args:
      feature: that samples can be parted by, or "".
      options: of the study.
      clipped: whether gradients are, which goes with no late ones.
      interaction: of DLRM, beside the config's own; "" for none.
    """
    every = max(1, options.iterations // 10)
    of_figures = [
        Arm(1),
        Arm(2, "exact"),
        Arm(2, "never"),
        Arm(2, "never", parts="fixed"),
        Arm(2, "never", parts="whole", init="own"),
        *(Arm(2, "never", parts="fixed", shape=shape) for shape in SHAPES),
        *(
            (Arm(1, interaction=interaction), Arm(2, "never", parts="fixed", interaction=interaction))
            if interaction
            else ()
        ),
        *(Arm(2, "average", every, precision=precision) for precision in cost.PRECISIONS),
        *(() if clipped else (Arm(2, "exact", delay=1), Arm(2, "never", parts="fixed", delay=1))),
    ]
    further = [
        Arm(4, "exact"),
        Arm(4, "never"),
        Arm(2, "never", parts="whole"),
        *((Arm(2, "never", parts="by_feature"),) if feature else ()),
    ]
    for arms, seeds in ((of_figures, options.seeds), (further, options.seeds if options.all_seeds else 1)):
        yield from itertools.product(arms, range(seeds))


Get = Callable[[str, Callable[[], Any]], Any]


def _series(
    config: RunConfig, source: BlockSource, batch_size: int, options: Options, get: Get
) -> Iterator[dict[str, Any]]:
    """Iterations one by one, and their parts: of one group and of two, with one device each and with two."""
    cases = [(Arm(1), 1), (Arm(1), 2), (Arm(2, "never"), 1), (Arm(2, "never"), 2), (Arm(2, "exact"), 1)]
    cases += [] if config.train.clip_norm else [(Arm(2, "never", delay=1), 1)]
    for arm, devices in cases:
        size = max(devices, batch_size // devices * devices)
        name = f"series: {arm.label}, {devices} device(s) a group"

        def look(arm: Arm = arm, devices: int = devices, size: int = size, name: str = name) -> dict[str, Any]:
            log.info(name)
            iterations = options.series + options.timed + 40
            trainer = arranged(configured(config, arm, devices, size), source, arm, iterations, "")
            return {"ms": cost.time_series(trainer, options.series), "parts": cost.time_parts(trainer, options.timed)}

        yield {**dataclasses.asdict(arm), "label": arm.label, "devices": devices, "batch": size, **get(name, look)}


def _times(
    config: RunConfig, source: BlockSource, batch_size: int, options: Options, get: Get
) -> Iterator[dict[str, Any]]:
    """One device a group, as there; from a middle, each of dimension, batch and groups varied by itself."""
    dim = config.embedding.dim
    cases = [("groups", groups, dim, batch_size) for groups in GROUPS]
    cases += [("batch of a group", 2, dim, size) for size in (batch_size // 4, batch_size * 4)]
    cases += [("columns D", 2, size, batch_size) for size in (dim // 2, dim * 2)]
    for varied, groups, columns, size in cases:
        for sync in ("never", "exact") if groups > 1 else ("exact",):
            name = f"times: {groups} group(s), D={columns}, {size} samples each, {sync}"

            def look(
                groups: int = groups, columns: int = columns, size: int = size, sync: str = sync, name: str = name
            ) -> dict[str, float]:
                log.info(name)
                arm = Arm(groups, sync)
                trainer = arranged(
                    configured(_sized(config, columns), arm, 1, size), source, arm, options.timed + 40, ""
                )
                return cost.time_parts(trainer, options.timed)

            yield {
                "varied": varied,
                "groups": groups,
                "dim": columns,
                "batch": size,
                "sync": sync,
                "ms": get(name, look),
            }


def _sized(config: RunConfig, dim: int) -> RunConfig:
    """With tables of `dim` columns; DLRM's bottom MLP ends in as many."""
    model: Any = config.model
    if hasattr(model, "bottom"):
        model = dataclasses.replace(model, bottom=(*model.bottom[:-1], dim))
    return dataclasses.replace(config, model=model, embedding=dataclasses.replace(config.embedding, dim=dim))


def _bytes(config: RunConfig, source: Any, devices: int, batch_size: int) -> dict[str, Any]:
    """Bytes an iteration that the fullest device sends to other groups, by number of groups and method."""
    found: dict[str, Any] = {}
    for groups in GROUPS[1:]:
        arm = Arm(groups)
        trainer = build_trainer(
            configured(config, arm, devices, batch_size),
            Arranged(source, groups, batch_size, "random", "", 1, config.seed),
            weights=False,
        )
        once = cost.sync_bytes(trainer.bound, cost.needs_of(trainer))
        sent = {name: size for name, size in once.items() if name.startswith("rows")}
        sent |= {
            f"{name}, every {k}": size / k for name, size in once.items() if name.startswith("tables") for k in AVERAGES
        }
        found[str(groups)] = {"sent": sent, "tables_and_slots": cost.table_bytes(trainer.bound)}
    return found


def checked(options: Options) -> Options:
    """The options, if they make sense.

    Raises:
      ConfigError: they do not.
    """
    for name, least in (("iterations", 1), ("every", 1), ("timed", 0), ("series", 1), ("seeds", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be at least {least}.")
    return options
