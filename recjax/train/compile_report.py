"""`recjax plan PRESET --compile`: what the compiled training step takes of each device, and what it sends.

The program is the config's own (`Trainer.step_program`), for as many devices as the config says, whether or not anybody
owns them: see `recjax/train/compile_only.py`. Its sizes come from ids that were really drawn or read: those of the
first batch, see `recjax.train.first_batch`.
"""

from __future__ import annotations

import math
import platform
import time
from typing import Any

import jax
import numpy as np

from recjax.config.run import RunConfig
from recjax.embedding.routing import host
from recjax.embedding.routing.routed import Routing
from recjax.errors import ConfigError
from recjax.planning.compiled_collectives import named, wire_bytes
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_inputs, abstract_state, compile_step
from recjax.train.first_batch import sample
from recjax.train.trainer import Trainer
from recjax.utils import log
from recjax.utils.text import aligned


def on_paper(config: RunConfig, memory_gib: float | None = None) -> dict[str, Any]:
    """Compiles a config's training step from shapes alone.

    Args:
      config: the run's config; `mesh.devices` says for how many devices.
      memory_gib: what a device has, to be compared with what it needs.

    Returns:
      JSON values: "devices", "device"; "counted", from which ids the sizes come; "capacities" of the exchanges, in
      rows; "memory", bytes of one device by what they are, see `_memory`; "fits", None if `memory_gib` is;
      "collectives" and "phases", bytes that leave a device in a step, see `wire_bytes`; "sent", their totals;
      "seconds" to count and to compile; "versions".

    Raises:
      ConfigError, DataError, DeviceError: as `build_trainer`, or a memory that is not positive.
    """
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise ConfigError(f"--memory-gib is {memory_gib}; give what one device has, for example 80.")
    trainer = build_trainer(config, splits=("train",), weights=False)
    started = time.monotonic()
    log.info("counting distinct rows")
    found = sample(trainer)
    counted_s, started = time.monotonic() - started, time.monotonic()
    log.info(f"compiling for {trainer.bound.all_devices} device(s)")
    compiled = compile_step(trainer, found.capacities)
    compiled_s = time.monotonic() - started
    item_bytes = np.dtype(trainer.dtype).itemsize
    counts, hosts = Routing(found.counts, {}), trainer.config.mesh.hosts
    b = host.local_samples(config.train.batch_size, trainer.bound.all_devices, config.train.accumulate)
    lines = wire_bytes(compiled.as_text() or "", trainer.bound, counts, item_bytes, hosts, b)
    memory = _memory(trainer, found.capacities, compiled)
    kinds = ("padded_bytes", "useful_bytes")
    phases = {line["phase"]: dict.fromkeys(kinds, 0.0) for line in lines}
    for line in lines:
        for kind in kinds:
            phases[line["phase"]][kind] += line[kind]
    return {
        "devices": trainer.bound.all_devices,
        "device": trainer.mesh.devices.flat[0].device_kind,
        "batch_size": trainer.config.train.batch_size,
        "counted": {"devices": found.devices, "samples": found.samples, "ids": found.ids},
        "capacities": found.capacities,
        "memory": memory,
        "memory_gib": memory_gib,
        "fits": None if memory_gib is None else memory["total"] <= memory_gib * 2**30,
        "collectives": lines,
        "phases": phases,
        "sent": {kind: sum(line[kind] for line in lines) for kind in kinds},
        "seconds": {"count": counted_s, "compile": compiled_s},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }


def _memory(trainer: Trainer, capacities: dict[str, int], compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of one device.

    Returns:
      "tables", "slots" (of their optimizer), "dense" (parameters), "dense_optimizer", "batch", "rows" (of the
      training, where all lie on every device): what the step is given;
      "temporaries": most that it holds beside that at a time, as the compiler says; "total" of all these and of results
      that take no argument's place. And two parts of the temporaries, each of which may be there more than once (for
      the way back, say): "fetched_rows", those of all exchanges with their padding, and "pooled", a vector for
      each sample and feature.
    """
    state, inputs = abstract_state(trainer), abstract_inputs(trainer, capacities)
    bound, item_bytes = trainer.bound, np.dtype(trainer.dtype).itemsize
    stats: Any = compiled.memory_analysis()
    fetched = sum(g.num_row_lists * capacities[g.name] * g.columns.owners * g.width for g in bound.listing)
    b = inputs.dense_BxK.shape[0] // bound.all_devices
    of_rows = sum(pool.width * len(pool.lookups) for pool in bound.pools)
    return {
        "tables": _bytes(state.tables),
        "slots": _bytes(state.slots),
        "dense": _bytes(state.dense),
        "dense_optimizer": _bytes(state.opt),
        "batch": _bytes(inputs),
        "rows": _bytes(trainer.resident.shape) if trainer.resident else 0,
        "temporaries": stats.temp_size_in_bytes,
        "total": stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes,
        "fetched_rows": fetched * item_bytes,
        "pooled": b * (of_rows + sum(e.devices * e.blocks * e.block for e in bound.pooled)) * item_bytes,
    }


def _bytes(tree: Any) -> int:
    """Bytes of one device's part of a tree of placed shapes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


_NAMES = {
    "tables": "tables",
    "slots": "their optimizer's slots",
    "dense": "dense parameters",
    "dense_optimizer": "their optimizer's state",
    "batch": "batch and routing",
    "rows": "all training rows",
    "temporaries": "temporaries, at most; of these",
    "fetched_rows": "  fetched rows, once",
    "pooled": "  pooled vectors, once",
}


def to_text(result: dict[str, Any]) -> str:
    """The same for people: memory, then collectives."""
    c, memory, versions = result["counted"], result["memory"], result["versions"]
    whole = c["devices"] == result["devices"]
    of = "all of the first batch" if whole else f"the share of {c['devices']} of {result['devices']} devices in it"
    lines = [
        f"the training step compiled for {result['devices']} device(s) ({result['device']}), batch "
        f"{result['batch_size']:,}; Python {versions['python']}, JAX {versions['jax']}",
        f"sizes of exchanges from {c['ids']:,} ids counted: {of}",
        f"counting took {result['seconds']['count']:.0f} s, compiling {result['seconds']['compile']:.0f} s",
        "",
    ]
    named_bytes = [(text, memory[name]) for name, text in _NAMES.items() if name != "rows" or memory[name]]
    rows = [["memory of a device", "GiB"], *([text, _gib(size)] for text, size in named_bytes)]
    lines += [*aligned([*rows, ["all", _gib(memory["total"])]]), ""]
    if result["fits"] is not None:
        has, needs = result["memory_gib"], memory["total"] / 2**30
        word = "fits" if result["fits"] else "does not fit"
        lines += [f"{word} into {has:,g} GiB: {needs:,.3f} GiB are {needs / has:.2f} times that", ""]
    wire = [["collectives", "number", "devices", "padded MiB", "useful MiB", "padded / useful"]]
    for line in result["collectives"]:
        wire.append([named(line), str(line["count"]), str(line["group_size"]), *_sizes(line)])
    wire.append(["all, from a device in a step", "", "", *_sizes(result["sent"])])
    return "\n".join([*lines, *aligned(wire)])


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f}"


def _sizes(line: dict[str, Any]) -> list[str]:
    padded, useful = line["padded_bytes"], line["useful_bytes"]
    return [f"{padded / 2**20:,.3f}", f"{useful / 2**20:,.3f}", f"{padded / useful:.3f}" if useful else "-"]
