"""Machines: what one can do, measured by `recjax calibrate` or written by hand from data sheets.

A machine has rates (what the hardware does at most), overheads, and for each kernel class the times of some sizes or,
where nobody measured, how much of the rates it reaches. Every number that was not measured here names its source.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# What each kernel class is measured over. A name in a file may have a variant after a dot, as in "matmul.nn_f32".
SIZES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "batched_matmul": ("batch", "m", "n", "k"),
    "gather": ("rows", "row_bytes", "table_bytes"),
    "scatter": ("rows", "row_bytes", "table_bytes"),
    "sort": ("keys", "operands"),
    "reduce": ("bytes",),
    "elementwise": ("bytes",),
    "transcendental": ("elements",),
    "convert": ("elements",),
    "copy": ("bytes",),
    "reuse": ("bytes", "distance"),
    "all_reduce": ("bytes", "devices"),
    "all_to_all": ("bytes", "devices"),
    "all_gather": ("bytes", "devices"),
    "reduce_scatter": ("bytes", "devices"),
    "host_read": ("samples", "features", "ids"),
    "host_route": ("ids", "features", "devices"),
    "host_pack": ("ids", "features", "devices"),
    "host_place": ("bytes", "arrays", "devices"),
    "host_dispatch": ("arguments", "devices"),
    "host_lookup": ("ids",),
    "host_swap": ("rows", "row_bytes"),
    "device_swap": ("rows", "row_bytes"),
    "training": ("reference",),
}
COLLECTIVES = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
HOST = tuple(name for name in SIZES if name.startswith("host_") or name == "device_swap")

# name -> unit, and whether a machine may lack it
RATES: dict[str, tuple[str, bool]] = {
    "flops_f32": ("FLOP/s", False),
    "flops_tf32": ("FLOP/s", True),
    "flops_bf16": ("FLOP/s", True),
    "flops_f64": ("FLOP/s", True),
    "memory": ("B/s", False),
    "memory_size": ("B", False),
    "cache": ("B/s", True),
    "cache_size": ("B", True),
    "line_size": ("B", False),
    "matmul_tile": ("elements", True),
    "link": ("B/s", True),
    "link_latency": ("us", True),
    "host_link": ("B/s", True),
    "network": ("B/s", True),
    "network_latency": ("us", True),
    "host_devices": ("devices", True),
    "torus": ("dimensions", True),
    "disk_reads": ("1/s", True),
    "disk_write": ("B/s", True),
    "disk_writes": ("1/s", True),
}
# name -> unit, and whether a machine may lack it
OVERHEADS: dict[str, tuple[str, bool]] = {
    "kernel": ("us", False),
    "loop": ("us", False),
    "launch": ("us", True),
    "host_in_training": ("times", True),
    "kernels_in_training": ("times", True),
    "step_in_training": ("times", True),
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number with its unit, and where it comes from: a data sheet, or "measured"."""

    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True)
class Point:
    """A size of a kernel class and the time that it took.

    Attributes:
      sizes: as `SIZES` names them.
      us: from its start to its end, without the overhead of starting it.
      cores: CPU cores that it kept busy, 1 at least; of a host's stage, how many threads at it do as much as one alone.
    """

    sizes: dict[str, float]
    us: float
    cores: float = 1.0


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Errors of predictions from the points for sizes that are not among them.

    Attributes:
      points: how many sizes.
      ratio_mean: of max(predicted, measured) / min of both, the geometric mean.
      ratio_p50: the median.
      ratio_p90: the 90th percentile.
      gmae: exp(mean log |predicted / measured - 1|), as Lin et al. (arXiv:2201.07821) report it.
    """

    points: int
    ratio_mean: float
    ratio_p50: float
    ratio_p90: float
    gmae: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> HeldOut:
        """The error of predictions.

        Ratios are stricter than GMAE, the measure of Lin et al., a geometric mean of relative errors: that goes to 0
        with one lucky hit, and is the lesser number also otherwise.

        Args:
          pairs: (predicted, measured), one at least, all positive.
        """
        logs = np.abs(np.log([predicted / measured for predicted, measured in pairs]))
        relative = [max(abs(predicted / measured - 1), 1e-9) for predicted, measured in pairs]
        p50, p90 = np.percentile(np.exp(logs), [50, 90])
        gmae = math.exp(float(np.mean(np.log(relative))))
        return cls(len(pairs), float(np.exp(logs.mean())), float(p50), float(p90), gmae)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel class on a machine.

    Attributes:
      efficiency: share of the machine's rates that it reaches; used where no point says more.
      source: of the efficiency.
      points: measured sizes; () if none were.
      held_out: error of predictions from the points; None if none was measured.
      repeat: by how many times what half of the passes measured differs from what the other half did, the geometric
        mean over all sizes: what one size takes is known no better than that. None if it was not measured twice.
    """

    efficiency: float
    source: str
    points: tuple[Point, ...] = ()
    held_out: HeldOut | None = None
    repeat: float | None = None


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
      name: for people.
      measured: whether its numbers were measured on it.
      where: what it was measured on, or how the file came about: "cpu", "device", "versions", "date", "note".
      platform: "cpu", "gpu" or "tpu".
      cores: CPU cores of a host.
      shared: whether a host's devices compute on the cores of the host (CPU).
      streams: kernels that a device runs at a time, collectives apart.
      rates: see `RATES`; of one device, a link's in one direction. `link` joins the devices of a host, of which there
        are `host_devices`, and `network` hosts; on a machine with a `torus` links lead to neighbours alone.
        `disk_reads` and `disk_writes` are of 4 KiB, anywhere, and of a host's disk; `disk_write` is in order.
      overheads: see `OVERHEADS`; "launch" is a kernel's for the thread of the host that hands it to an accelerator, and
        those "in_training" are ratios, see `recjax.lab.predict.in_training`.
      kernels: name of a class, perhaps with a variant -> it. "training" has steps of whole trainings, see
        `recjax.lab.predict.in_training`.
    """

    name: str
    measured: bool
    where: dict[str, str]
    platform: str
    cores: int
    shared: bool
    streams: int
    rates: dict[str, Quantity]
    overheads: dict[str, Quantity]
    kernels: dict[str, Kernel]

    def rate(self, name: str, otherwise: float = math.inf) -> float:
        """A rate's number, or `otherwise` if the machine has none of that name."""
        found = self.rates.get(name)
        return otherwise if found is None else found.value

    def overhead(self, name: str, otherwise: float = 0.0) -> float:
        """An overhead's number, or `otherwise` if the machine has none of that name."""
        found = self.overheads.get(name)
        return otherwise if found is None else found.value

    def longer(self, devices: int) -> float:
        """Returns how many times as long as its work a step of a training takes.

        `step_in_training` is of one device, for whose step a core waits in vain. Of more devices than cores, each core
        has several: it waits when all of them do, as in the model of multiprogramming, in which n programs that wait a
        share p of their time leave a processor idle for p^n of it (Tanenbaum, Modern Operating Systems).

        Args:
          devices: that share the cores of a host; on other machines it does not matter.
        """
        alone = self.overhead("step_in_training", 1.0)
        of_a_core = max(1.0, devices / self.cores) if self.shared else 1.0
        return 1 / (1 - (1 - 1 / alone) ** of_a_core)

    def knows(self, name: str) -> bool:
        """Returns whether a class, or a wider variant of it, was measured."""
        kernel = self.kernel(name)
        return kernel is not None and bool(kernel.points)

    def kernel(self, name: str) -> Kernel | None:
        """The class of this name, or else one of a wider variant; None if the machine has none.

        Wider variants of "matmul.nn_f32" are "matmul.f32", and then "matmul".
        """
        base, _, variant = name.partition(".")
        while variant and f"{base}.{variant}" not in self.kernels:
            variant = variant.partition("_")[2]
        return self.kernels.get(f"{base}.{variant}" if variant else base)
