"""The study of hot rows, after P2RES ("two-fold parallelism"; a poster of 2.16 to 16.8 times on 32 V100).

Its question: what do copies of the rows that most batches name save? Its figures: in how many of 100 batches each item
is; the share of look-ups that the most present ones take; and the time of a step against systems that exchange every id
(row-wise, without dedup). Here the same model is trained by turns on the same batches: row-wise without dedup, which is
the paper's baseline, with dedup, which is recjax's default, with K hot rows on either, and with pooled vectors where
bags are long. Bytes are counted in the compiled programs; times are CPU times of this machine.

A copy of hot rows may also be one for each host: then the bytes that a device holds and sends, in all and across hosts,
are counted beside those of copies on devices. No time is taken of these: host devices know no hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recjax import settings
from recjax.config.run import RunConfig
from recjax.data import presence
from recjax.errors import ConfigError
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.hot_rows.measure import Arm, Contestant, by_turns, contiguous_imbalance, trainer_presence
from recjax.parallel.mesh import MeshConfig, make_mesh

LONG_BAG = 4  # ids of a bag from which pooled vectors take part


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of the study: what to compare.

    Attributes:
      rows: K, numbers of hot rows.
      devices: numbers of devices.
      batches: that are counted and trained on.
      rounds: times that each takes its turn; 0 leaves the times out.
      steps: of a turn.
      hosts: numbers of hosts in which the devices stand where copies on hosts are counted; (): none are.
    """

    rows: tuple[int, ...] = (1000, 4000, 16_000)
    devices: tuple[int, ...] = (2, 8)
    batches: int = 100
    rounds: int = 5
    steps: int = 4
    hosts: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        for name in ("rows", "devices"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"--{name} needs numbers of 1 and more, as in --{name} 2,8.")
        if any(count < 1 for count in self.hosts):
            raise ConfigError("--hosts needs numbers of 1 and more, as in --hosts 1,2; 0 alone leaves hosts out.")
        if self.batches < 1 or self.rounds < 0 or self.steps < 1:
            raise ConfigError("--batches and --steps must be at least 1, --rounds at least 0.")


def study(config: RunConfig, options: Options, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs what is left of the study.

    Args:
      config: data and model.
      options: what to compare.
      out: folder of the parts.
      say: called with what is being done.

    Returns:
      JSON values: "about"; "presence", as `presence.describe` gives it; "arms", for each number of devices and way to
      hold the tables "label", "devices", "rows" (K), "covered", "bytes", "imbalance", "contiguous_imbalance" and, if
      they were measured, "times"; "copies", for each number of devices in hosts, of rows and kind of copies "devices",
      "hosts", "rows", "on" ("device" or "host") and what `Contestant.copies_bytes` gives; "summary", see `summary`.

    Raises:
      ConfigError, DataError, DeviceError: as `build_trainer`; or `out` holds another study.
    """
    make_mesh(MeshConfig(max(options.devices), config.mesh.platform))  # the largest first: see there
    source = config.data.open()
    train = config.train
    setup = {"config": settings.to_json(config), "data": source.fingerprint, "options": dataclasses.asdict(options)}
    parts = Finished(out, setup, "hot_rows")

    def count() -> dict[str, Any]:
        counted = presence.presence_of(source, options.batches, train.batch_size, config.seed, train.shuffle)
        return presence.describe(counted)

    result: dict[str, Any] = {"about": about_run(config, options), "arms": [], "copies": []}
    result["presence"] = parts.get("presence", count)
    long = max((feature.bag or LONG_BAG for feature in source.schema.features), default=1) >= LONG_BAG
    for devices in options.devices:
        ways = functools.partial(_on, devices, config, options, long, say)
        result["arms"] += parts.get(f"ways to hold the tables on {devices} device(s)", ways)
        for hosts in options.hosts:
            copies = functools.partial(_in_hosts, devices, hosts, config, options, say)
            result["copies"] += parts.get(f"copies on {devices} device(s) of {hosts} host(s)", copies)
    result["summary"] = summary(result["arms"])
    return result


def about_run(config: RunConfig, options: Options) -> dict[str, Any]:
    """Names data, model, options and versions of a study, as JSON values."""
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    return {
        "data": config.data.open().name,
        "model": config.model.kind,
        "batch_size": config.train.batch_size,
        "dim": config.embedding.dim,
        "options": dataclasses.asdict(options),
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }


def arms(rows: tuple[int, ...], long: bool) -> list[Arm]:
    """The ways to hold the tables that are compared, the paper's baseline first."""
    found = [Arm("row-wise, no dedup", ("embedding.dedup=false",)), Arm("row-wise, dedup", ())]
    for count in rows:
        hot = f"embedding.hot.rows={count}"
        found.append(Arm(f"{count:,} hot, no dedup", (hot, "embedding.dedup=false"), count))
        found.append(Arm(f"{count:,} hot, dedup", (hot,), count))
    if long:
        found.append(Arm("table-wise, pooled", ("plan=table_wise", "embedding.exchange.kind=pooled")))
    return found


def _on(
    devices: int, config: RunConfig, options: Options, long: bool, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All arms on some devices."""
    contestants = [_contestant(arm, devices, config, options, say) for arm in arms(options.rows, long)]
    counted = trainer_presence(contestants[0].trainer)
    tables = {name: items.rows for name, items in counted.tables.items()}
    found = [
        {
            "label": one.arm.label,
            "devices": devices,
            "rows": one.arm.rows,
            "covered": one.covered(),
            "bytes": one.bytes(),
            "imbalance": one.imbalance(),
            "contiguous_imbalance": contiguous_imbalance(
                counted, one.trainer.plan, devices, tables, one.trainer.config.embedding.dedup
            ),
        }
        for one in contestants
    ]
    if options.rounds:
        say(f"{devices} device(s): taking turns")
        for of, times in zip(found, by_turns(contestants, options.rounds, options.steps), strict=True):
            of["times"] = times
    return found


def _contestant(arm: Arm, devices: int, config: RunConfig, options: Options, say: Callable[[str], None]) -> Contestant:
    say(f"{devices} device(s): compiling {arm.label}")
    common = (f"mesh.devices={devices}", f"embedding.hot.batches={options.batches}", "embedding.hot.memory_mib=1000000")
    return Contestant(arm, settings.override(config, [*common, *arm.overrides]), options.steps)


def _in_hosts(
    devices: int, hosts: int, config: RunConfig, options: Options, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Bytes of copies on devices and on hosts; nothing where hosts are not equal, or have a device each."""
    if devices % hosts or hosts >= devices:
        return []
    found = []
    for count in options.rows:
        for on in ("device", "host"):
            label = f"{count:,} hot, copies on {on}s, {hosts} host(s)"
            chosen = (f"mesh.hosts={hosts}", f"embedding.hot.rows={count}", f"embedding.hot.copies={on}")
            made = _contestant(Arm(label, chosen, count), devices, config, options, say)
            found.append({"devices": devices, "hosts": hosts, "rows": count, "on": on, **made.copies_bytes()})
    return found


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each number of devices, what is gained over the paper's baseline and over recjax's default.

    Returns:
      "devices"; "bytes": by how many times fewer bytes than without dedup travel with dedup, with hot rows alone, and
      with both (the best K of each); "cpu": the same of the CPU time of a step, if it was measured; and "best", the
      label of the arm of the least CPU time (else of the fewest bytes).
    """
    results = []
    for devices in dict.fromkeys(of["devices"] for of in found):
        own = [of for of in found if of["devices"] == devices]
        ways = {
            "dedup": [of for of in own if of["label"] == "row-wise, dedup"],
            "hot": [of for of in own if of["rows"] and of["label"].endswith("no dedup")],
            "hot and dedup": [of for of in own if of["rows"] and not of["label"].endswith("no dedup")],
            "pooled": [of for of in own if "pooled" in of["label"]],
        }
        line: dict[str, Any] = {"devices": devices}
        measures = {"bytes": lambda of: of["bytes"]["padded"]}
        if "times" in own[0]:
            measures["cpu"] = lambda of: of["times"]["cpu_ms"]
        for name, measure in measures.items():
            line[name] = {
                way: measure(own[0]) / max(1e-9, min(map(measure, those))) for way, those in ways.items() if those
            }
            line["best"] = min(own, key=measure)["label"]
        results.append(line)
    return results
