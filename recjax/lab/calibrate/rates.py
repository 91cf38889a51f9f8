"""Rates of a machine, from the kernels that `recjax calibrate` has timed, and of a disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from recjax.lab.calibrate.cases import Case
from recjax.planning.costs import of_sizes
from recjax.planning.machine import Machine, Quantity
from recjax.tiers.disk import disk_rates
from recjax.utils import processor

_LEAST_US = 100.0  # that a case takes which may tell a peak rate: of less the clock's noise would be the peak


def rates_of(timed: Sequence[tuple[Case, float]], device: jax.Device) -> dict[str, Quantity]:
    """Returns the best rates that any case reached, and sizes that the system or the device tells.

    Args:
      timed: cases with the time of each, us.
      device: on which.
    """
    flops: dict[str, list[tuple[float, float]]] = {}
    passes: list[tuple[float, float]] = []
    for case, us in timed:
        base, _, variant = case.kernel.partition(".")
        if base == "matmul":
            operations = of_sizes(case.kernel, case.sizes).flops
            flops.setdefault(variant.rpartition("_")[2], []).append((us, operations / us * 1e6))
        if case.kernel == "elementwise":
            passes.append((us, case.sizes["bytes"] / us * 1e6))
    found = {f"flops_{dtype}": Quantity(_peak(rates), "FLOP/s", "measured") for dtype, rates in flops.items()}
    found["memory"] = Quantity(max(passes)[1], "B/s", "measured")
    found["cache"] = Quantity(_peak(passes), "B/s", "measured")
    return found | (_of_host() if device.platform == "cpu" else _of_device(device))


def with_disk(machine: Machine, folder: Path) -> Machine:
    """The machine with the rates of a disk, as the store of `tier.disk` uses it.

    Raises:
      ConfigError, TrainingError: no file can be made, written or read in the folder.
    """
    found = disk_rates(folder, 2.0)
    rates = {
        "disk_reads": Quantity(found.reads, "1/s", "measured"),
        "disk_write": Quantity(found.written, "B/s", "measured"),
        "disk_writes": Quantity(found.writes, "1/s", "measured"),
    }
    return dataclasses.replace(machine, rates=machine.rates | rates)


def _of_host() -> dict[str, Quantity]:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"memory_size": Quantity(float(size), "B", "the operating system")}
    if cache := processor.last_cache_bytes():
        found["cache_size"] = Quantity(float(cache), "B", "the operating system")
    return found | {"line_size": Quantity(64.0, "B", "of x86-64 and most Arm processors")}


def _of_device(device: jax.Device) -> dict[str, Quantity]:
    stats = device.memory_stats() or {}
    size = Quantity(
        float(stats.get("bytes_limit", 2**34)), "B", "JAX's limit" if stats else "assumed: it does not tell"
    )
    return {"memory_size": size, "line_size": Quantity(32.0, "B", "as of a GPU's cache, whose sectors are so long")}


def _peak(found: Sequence[tuple[float, float]]) -> float:
    """The best rate of (us, rate) among those that took long enough for the clock, or else that of the longest."""
    return max((rate for us, rate in found if us > _LEAST_US), default=max(found)[1])
