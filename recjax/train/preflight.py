"""Checks that all processes of a run agree on what must be alike, before any of them computes.

Each posts what it has; each compares with process 0. A difference that nobody noticed would show up as a hang, or as
wrong numbers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from recjax import settings
from recjax.config.own_code import source_of
from recjax.config.run import RunConfig
from recjax.embedding.plan import Plan
from recjax.errors import ConfigError, DataError
from recjax.parallel import distributed, watchdog
from recjax.parallel.timed_collectives import time_collectives
from recjax.train.build import build_trainer
from recjax.train.trainer import Trainer
from recjax.utils.files import write_whole
from recjax.utils.version import __version__

_OF_DATA = ("data",)
_WAIT_S = 0.5
_SIZES, _REPEATS = (2**16, 2**20), 10  # of the messages that are timed, in bytes
_TOKEN = ".seen-by-all.unfinished-0"  # in a run folder, which takes it for a rest if nobody removes it


def facts(trainer: Trainer) -> dict[str, str]:
    """Facts that all processes must have alike, by name."""
    source = source_of(type(trainer.config))
    devices = jax.local_devices(backend=trainer.mesh.devices.flat[0].platform)
    cached = {group.name: group.rows for group in trainer.bound.cached}
    return {
        "recjax": __version__,
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "device kind": devices[0].device_kind,
        "devices of a process": str(len(devices)),
        "devices together": str(trainer.mesh.devices.size),
        "mesh": json.dumps(dict(trainer.mesh.shape)),
        "config": settings.config_hash(trainer.config, ("data.path", "data.cache", "plan")),
        **({} if source is None else {"code of the model": source.hash}),
        "plan": digest(trainer.plan),
        **({"rows of caches": json.dumps(cached)} if cached else {}),
        "data": trainer.source.fingerprint,
    }


def digest(plan: Plan) -> str:
    """Hashes a plan to 12 hexadecimal digits."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]


def require_alike(trainer: Trainer, out: Path | None) -> dict[int, dict[str, str]]:
    """Compares the processes' facts, and finds out whether all see the run folder; one process has nothing to do.

    Args:
      trainer: what this process has built.
      out: the run folder; None leaves that question out.

    Returns:
      process -> its facts.

    Raises:
      ConfigError, DataError: they differ; the paragraph has the values side by side.
      DeviceError: a process did not say what it has.
    """
    found = compare(facts(trainer))
    if out is not None and distributed.processes() > 1:
        _require_shared(out)
    return found


def compare(mine: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """All processes' facts, if they are alike; see `require_alike`."""
    with watchdog.during("wait"):
        found = dict(enumerate(map(json.loads, distributed.gather("what it has", json.dumps(dict(mine))))))
    if differing := differences(found):
        of_data = all(name in _OF_DATA for name in differing)
        table = "; ".join(
            f"{name}: " + ", ".join(f"{value} in {_numbers(ks)}" for value, ks in values.items())
            for name, values in differing.items()
        )
        what = "data" if of_data else "settings"
        raise (DataError if of_data else ConfigError)(
            f"the processes differ in their {what}: {table}. Give all of them the same command, software and data."
        ).in_all()
    return found


def differences(found: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Fact -> its values -> the processes that have it, of facts that differ."""
    names = dict.fromkeys(name for of_one in found.values() for name in of_one)
    differing: dict[str, dict[str, list[int]]] = {}
    for name in names:
        values: dict[str, list[int]] = {}
        for k, of_one in sorted(found.items()):
            values.setdefault(of_one.get(name, "nothing"), []).append(k)
        if len(values) > 1:
            differing[name] = values
    return differing


def _numbers(ks: list[int]) -> str:
    shown = ", ".join(map(str, ks[:8])) + (f" and {len(ks) - 8} more" if len(ks) > 8 else "")
    return f"process{'es' if len(ks) > 1 else ''} {shown}"


def _require_shared(out: Path) -> None:
    """All processes write to the run folder, so that each must see in it what process 0 has put there."""
    token = secrets.token_hex(8)
    if distributed.is_main():
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / _TOKEN, token.encode())
    wanted = distributed.from_main("its mark in the run folder", token)
    for _ in range(20):  # a network's file system may show it late
        try:
            seen = (out / _TOKEN).read_text()
        except OSError:
            seen = ""
        if seen == wanted:
            break
        time.sleep(_WAIT_S)
    answers = distributed.gather("folder seen", "" if seen == wanted else str(distributed.process()))
    if distributed.is_main():
        (out / _TOKEN).unlink(missing_ok=True)
    if blind := [int(answer) for answer in answers if answer]:
        raise ConfigError(
            f"{_numbers(blind)} do not see the run folder {out} that process 0 writes. Name an --out on a file system "
            "that all machines share."
        )


def preflight(config: RunConfig, out: Path | None) -> dict[str, Any]:
    """Runs `recjax preflight`: builds all that a run needs, compares the processes, and times two collectives.

    Args:
      config: the run's config.
      out: its run folder, which all processes must see; None leaves that out.

    Returns:
      "processes"; the facts that all have alike; "collectives": of an all-reduce and an all-to-all what
      `time_collectives` tells, empty with one device.

    Raises:
      ConfigError, DataError, DeviceError: what stands in the way of the run.
    """
    trainer = build_trainer(config, splits=("train",))
    found = require_alike(trainer, out)
    measured: dict[str, Any] = {}
    if trainer.mesh.devices.size > 1:
        measured = time_collectives(list(trainer.mesh.devices.flat), _SIZES, _REPEATS)
    return {"processes": len(found), **found[0], "collectives": measured}


def to_text(result: Mapping[str, Any]) -> str:
    """Formats what `preflight` returns."""
    lines = [f"{name}: {value}" for name, value in result.items() if name != "collectives"]
    for kind, measured in result["collectives"].items():
        lines += [
            f"{kind}, {point['bytes']:,} B: {point['p50_us']:,.0f} us (95%: {point['p95_us']:,.0f}), bus bandwidth "
            f"{point['bus_bytes_per_s'] / 1e9:.3f} GB/s"
            for point in measured["points"]
        ]
    return "\n".join([*lines, "all processes agree"])
