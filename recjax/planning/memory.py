"""Bytes that a device needs for a training step, from sizes alone: fitted to what compiled steps need."""

from __future__ import annotations

import math

from recjax.planning.machine import Machine
from recjax.planning.step_sizes import DenseSizes, StepSizes

GIB = 2**30
USABLE = 0.92  # of a device's memory; the rest is the runtime's
_ALIVE = 3.0  # times that fetched rows are there at once: as they came, put in order, and as gradients
_ACTIVATIONS = 3.0  # the same of activations: forward, backward and the input of a product


def needed(sizes: StepSizes, dense: DenseSizes, cache_bytes: int = 0) -> dict[str, float]:
    """Returns bytes of one device by what they are.

    "tables" with their optimizer's slots, as large as in the fullest device, but of rows that are spread no more than
    `cache_bytes`, unless that is 0; "dense" parameters, their optimizer's
    state and gradients; "batch", with routing; "temporaries", an estimate: of `recjax plan --compile` the compiler
    says how large they are; "total".
    """
    b, item = sizes.samples, sizes.item_bytes
    share = sizes.all_devices if dense.sharded else 1
    widths = dense.columns + sum(n for _, n in dense.layers) + (dense.pairs[0] ** 2 if dense.pairs else 0)
    found = {
        "tables": sizes.copied_bytes + min(sizes.spread_bytes, cache_bytes or math.inf),
        "dense": item * dense.values * ((1 + dense.slots) / share + 1),
        "batch": 4.0 * (sum(sizes.lists) + 2 * sizes.ids) + item * b * 32,
        "temporaries": _ALIVE * sizes.fetched_bytes + _ACTIVATIONS * item * b / dense.accumulate * widths,
    }
    return found | {"total": sum(found.values())}


def budget(machine: Machine, devices: int, memory_gib: float) -> float:
    """Returns the bytes that a device may use: those that the user gives, or of the machine's memory what is usable."""
    if memory_gib:
        return memory_gib * GIB
    whole = machine.rate("memory_size")
    return USABLE * (whole / devices if machine.shared else whole)
