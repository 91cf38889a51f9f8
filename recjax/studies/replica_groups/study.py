"""The study of replica groups whose tables are their own, after the "distributed DLRM" project of UW-Madison.

There, two nodes each keep embedding tables of their own and synchronise only the MLPs; the report expects the accuracy
of one node after half the iterations, and a difference between the tables whose norm reaches a plateau. Its figures are
made again here, for 1, 2 and 4 groups, beside what recjax does by default (the exact update, for which tables are one)
and beside tables that are averaged from time to time: accuracy against iteration; the norm of the difference, with
samples that come to the groups at random and in fixed parts; the time of an iteration by its parts; and what it would
cost to keep the tables the same, plain and compressed, which the report left open.

Every group takes as many samples an iteration, so that more groups see more samples.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from recjax.config.run import RunConfig
from recjax.data.batch import Schema
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.studies.replica_groups import cost, draw
from recjax.studies.replica_groups.arranged import Arranged
from recjax.studies.replica_groups.training import Arm, arranged, configured, run
from recjax.train.trainer import build_trainer
from recjax.utils.files import write_json

GROUPS = (1, 2, 4)
ITEMS = ("business", "movie", "item")  # features that samples are parted by, the first that the data have
AVERAGES = (1, 10, 100)  # iterations between whole-table averages, of which the bytes are told


@dataclasses.dataclass(frozen=True)
class Options:
    """How long to look.

    Attributes:
      iterations: of each training.
      every: iterations between measures.
      timed: iterations of a profile; 0 leaves the times out.
    """

    iterations: int = 600
    every: int = 50
    timed: int = 20


def study(config: RunConfig, out: Path, options: Options) -> dict[str, Any]:
    """Runs the study and writes its figures and replicas.json.

    Args:
      config: data and model. `train.batch_size` is that of two groups; of `mesh.devices`, or all there are, each of
        four groups gets a quarter, rounded up to 1.
      out: folder to write, made if need be.
      options: how long to look.

    Returns:
      JSON values: "about"; "trainings", for each arm its settings and what `training.run` gives; "claims", what the
      report expects and what was found; "times"; "bytes", by number of groups; "figures", paths; "seconds".

    Raises:
      ConfigError, DataError, DeviceError, TrainingError: as `build_trainer`, or `out` cannot be written.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    devices = max(1, (config.mesh.devices or max(GROUPS)) // max(GROUPS))
    make_mesh(MeshConfig(devices * max(GROUPS), config.mesh.platform))  # the largest first: see there
    batch_size = max(devices, config.train.batch_size // 2 // devices * devices)
    source = config.data.open()
    feature = next((name for name in ITEMS if _parts(source.schema, name)), "")
    result: dict[str, Any] = {
        "about": {
            "data": source.name,
            "model": config.model.kind,
            "samples": int(source.row_counts("train").sum()),
            "batch_size_of_a_group": batch_size,
            "devices_of_a_group": devices,
            "parted_by": feature,
            "iterations": options.iterations,
            "device": jax.devices()[0].device_kind,
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
        },
        "trainings": [],
    }
    for arm in _arms(feature, options.iterations):
        _tell(f"training: {arm.label}, samples {arm.parts}")
        trainer = arranged(configured(config, arm, devices, batch_size), source, arm, options.iterations, feature)
        found = run(trainer, options.iterations, options.every, _tell)
        result["trainings"].append({**dataclasses.asdict(arm), "label": arm.label, "measures": found})
    result["claims"] = claims(result["trainings"])
    result["times"] = list(_times(config, source, batch_size, options)) if options.timed else []
    result["bytes"] = _bytes(config, source, devices, batch_size)
    result["figures"] = [str(path) for path in draw.figures(result, out)]
    result["seconds"] = round(time.monotonic() - started, 1)
    write_json(out / "replicas.json", result)
    return result


def _parts(schema: Schema, name: str) -> bool:
    return any(f.name == name and f.bag == 1 for f in schema.features)


def _arms(feature: str, iterations: int) -> Iterator[Arm]:
    yield Arm(1)
    for groups in GROUPS[1:]:
        yield Arm(groups, "never")
        yield Arm(groups, "exact")
    yield Arm(2, "average", max(1, iterations // 20))
    yield Arm(2, "never", parts="fixed")
    if feature:
        yield Arm(2, "never", parts="by_feature")


def claims(trainings: list[dict[str, Any]]) -> dict[str, Any]:
    """What the report expects, from the trainings.

    Returns:
      "iterations_to_reach": arm -> iterations after which it first has the best accuracy of one group, or more, and of
      its groups' own models ("own"); None if never. "distance": arm -> "thirds", the norm of the difference at a third,
      two thirds and the end of the training, and its growth in the last third over that in the first.
    """
    single = next(t["measures"] for t in trainings if t["groups"] == 1)
    goal = max(single["accuracy"])
    reached, apart = {}, {}
    for t in trainings:
        name, found = f"{t['label']}, samples {t['parts']}", t["measures"]
        reached[name] = {
            key: next((int(i) for i, x in zip(found["iteration"], found[of], strict=True) if x >= goal), None)
            for key, of in (("mean", "accuracy"), ("own", "own_accuracy"))
            if of in found
        }
        if "distance" in found and t["sync"] == "never":
            d = found["distance"]
            thirds = [d[round(k * (len(d) - 1) / 3)] for k in range(4)]
            growth = (thirds[3] - thirds[2]) / (thirds[1] - thirds[0]) if thirds[1] > thirds[0] else 0.0
            apart[name] = {"thirds": thirds[1:], "last_growth_over_first": growth}
    return {"accuracy_of_one_group": goal, "iterations_to_reach": reached, "distance": apart}


def _times(config: RunConfig, source: Any, batch_size: int, options: Options) -> Iterator[dict[str, Any]]:
    """One device a group, as there; from a middle, each of dimension, batch and groups varied by itself."""
    dim = config.embedding.dim
    cases = [("groups", groups, dim, batch_size) for groups in GROUPS]
    cases += [("batch of a group", 2, dim, size) for size in (batch_size // 4, batch_size * 4)]
    cases += [("columns D", 2, size, batch_size) for size in (dim // 2, dim * 2)]
    for varied, groups, columns, size in cases:
        for sync in ("never", "exact") if groups > 1 else ("exact",):
            _tell(f"times: {groups} group(s), D={columns}, {size} samples each, {sync}")
            sized = _sized(config, columns)
            arm = Arm(groups, sync)
            trainer = arranged(configured(sized, arm, 1, size), source, arm, options.timed + 40, "")
            found = cost.time_parts(trainer, options.timed)
            yield {"varied": varied, "groups": groups, "dim": columns, "batch": size, "sync": sync, "ms": found}


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


def to_text(result: dict[str, Any]) -> str:
    """The results for people."""
    rows = [["training", "samples", "accuracy", "AUC", "own accuracy", "norm of difference", "iterations to goal"]]
    reached = result["claims"]["iterations_to_reach"]
    for t in result["trainings"]:
        found = t["measures"]
        last = {name: f"{values[-1]:.4f}" for name, values in found.items()}
        steps = reached[f"{t['label']}, samples {t['parts']}"]
        best = " / ".join("-" if x is None else str(x) for x in steps.values())
        measures = [last[name] for name in ("accuracy", "auc")]
        rows.append([t["label"], t["parts"], *measures, last.get("own_accuracy", ""), last.get("distance", ""), best])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(
        f"goal: the best accuracy of one group, {result['claims']['accuracy_of_one_group']:.4f}; reached by the mean "
        "of the groups' tables / by their own"
    )
    for groups, found in result["bytes"].items():
        sent = found["sent"]
        lines.append(
            f"{groups} groups, bytes an iteration that a device sends to synchronise tables: row gradients "
            f"{sent['rows float32']:,.0f} (int8 {sent['rows int8']:,.0f}), whole tables "
            f"{sent['tables float32, every 1']:,.0f} (int8 {sent['tables int8, every 1']:,.0f})"
        )
    return "\n".join([*lines, f"figures: {', '.join(result['figures'])}"])


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
