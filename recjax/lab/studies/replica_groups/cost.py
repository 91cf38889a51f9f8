"""Times of an iteration, part by part, and bytes that synchronised tables send between replica groups."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from typing import Any

import jax

from recjax.embedding.layout import ROWS, SUMMED, BoundPlan
from recjax.embedding.quantize import Precision, encoded_bytes
from recjax.embedding.routing import capacity
from recjax.lab.bench import breakdown
from recjax.lab.replay import profile
from recjax.train.trainer import Trainer

# What the phases of a step count as. A group's own exchange is apart: it is no all-reduce, and with one device a group
# there is none.
PARTS = {
    "forward": ("gather", "pool", "dense_gather", "dense_forward"),
    "loss": ("loss",),
    "backward": ("dense_backward", "pool_backward"),
    "all-reduce": ("dense_grads", "replica_exchange", "finite_check", "clip"),
    "exchange in the group": (
        "id_exchange",
        "row_exchange",
        "grad_exchange",
        "pooled_exchange",
        "pooled_grad_exchange",
        "route",
    ),
    "optimizer": ("dense_update", "sparse_update"),
}
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
_WARM = 5  # iterations before those that are profiled


def time_parts(trainer: Trainer, steps: int) -> dict[str, float]:
    """Milliseconds of an iteration by PARTS, "other" and "idle" (no device at work): the mean of `steps` of a profile.

    Where several devices share processors, as host devices do, a part is its share of what all do at a time.
    """
    state, stream, done = trainer.init_state(), trainer.train_inputs(), 0

    def advance(count: int) -> None:
        nonlocal state, done
        for inputs in itertools.islice(stream, count):
            state, metrics = trainer.train_step(state, inputs)
            done += 1
            state = trainer.averaged(state, done)
            jax.block_until_ready(metrics)

    advance(_WARM)
    sizes = stream.capacities
    trace = profile.profile(lambda: advance(steps), None)
    stream.close()
    inputs = trainer.first_inputs(sizes)
    hlo = trainer.step_program.lower(state, inputs).compile().as_text() or ""
    found = breakdown.read(trace, hlo)["device_ms"]
    profile.discard(trace)
    named = {name: sum(found.pop(phase, 0.0) for phase in phases) for name, phases in PARTS.items()}
    idle = found.pop("idle", 0.0)
    times = {**named, "other": sum(found.values()), "idle": idle}
    return {**times, "total": sum(times.values())}


def time_series(trainer: Trainer, steps: int) -> list[float]:
    """Milliseconds of each of `steps` iterations, from when a batch is at hand until its step is done.

    Each is awaited before the next begins, as the source's are. The first ones are left out, and those that compile.
    """
    state, stream = trainer.init_state(), trainer.train_inputs()
    found: list[float] = []
    compiled: set[Any] = set()
    with contextlib.closing(stream):
        for done, inputs in enumerate(stream, 1):
            shapes = tuple(x.shape for x in jax.tree.leaves(inputs))
            jax.block_until_ready(inputs)
            began = time.perf_counter()
            state, metrics = trainer.train_step(state, inputs)
            state = trainer.averaged(state, done)
            jax.block_until_ready((state, metrics))
            if shapes in compiled and done > _WARM:
                found.append((time.perf_counter() - began) * 1e3)
            compiled.add(shapes)
            if len(found) == steps:
                return found
    raise AssertionError("a training has no end")


def sync_bytes(bound: BoundPlan, needs: dict[str, int]) -> dict[str, float]:
    """Bytes that the fullest device sends to other groups for one synchronisation of the tables, by method.

    "rows PRECISION": the exact exchange of row gradients in every step: each owner sends its K distinct rows' slots and
    sums to all other groups, (G - 1) * K * (4 + a row's bytes). "tables PRECISION": a whole-table average, as
    `make_average` has it: a ring all-reduce of weights and slots, 2 (G - 1) / G of their bytes; of encoded weights an
    all-gather, (G - 1) times theirs. Replicated tables are all-reduced whole in the first way, as [R, D + 1] gradients.

    Args:
      bound: the bound plan, of synchronous groups.
      needs: `RoutedBatch.required_capacities` of a batch.
    """
    item_bytes = 4  # of a table's or a slot's element
    G, total = bound.replicas, dict.fromkeys([f"{w} {p}" for w in ("rows", "tables") for p in PRECISIONS], 0.0)
    ring = 2 * (G - 1) / G
    for group in bound.groups:
        slots = sum(math.prod(slot.shape) for slot in group.slots().values())
        for precision in PRECISIONS:
            row = encoded_bytes(group.width, precision, item_bytes)
            # Encoded rows cannot be added up on the way: every group gets those of all others.
            travels = ring * row if precision == "float32" else (G - 1) * row
            total[f"tables {precision}"] += group.rows * (travels + ring * slots * item_bytes)
            if not group.spread:
                total[f"rows {precision}"] += ring * group.rows * (group.dim + 1) * item_bytes
            else:
                total[f"rows {precision}"] += (
                    (G - 1) * (needs.get(group.name + SUMMED, 0) + needs.get(group.name + ROWS, 0)) * (4 + row)
                )
    return total


def needs_of(trainer: Trainer) -> dict[str, int]:
    """The largest `RoutedBatch.required_capacities` of the first batches of a training."""
    first = itertools.islice(trainer.routed_batches(), 8)
    return functools.reduce(capacity.largest, (batch.routed.required_capacities for batch in first), {})


def table_bytes(bound: BoundPlan) -> int:
    """Bytes of float32 weights and slots of all tables, once."""
    total = 0
    for group in bound.groups:
        slots = sum(math.prod(slot.shape) for slot in group.optimizer.slots(group.dim).values())
        total += sum(segment.band.size for segment in group.segments) * (group.dim + slots) * 4
    return total
