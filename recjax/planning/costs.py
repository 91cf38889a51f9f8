"""Cost models: the time of a kernel on a machine.

Where the machine was measured, a class's points are a grid over the logarithms of its sizes, and times between them are
multilinear in these logarithms. A larger size never takes less: where points say so, their geometric mean stands in for
them (isotonic regression along each size), but for sizes by which compilers choose other code. Below the grid the least
size's time holds (a kernel has a floor); above it time grows as each size does, but for the sizes that only say where
the data lie. Corners of the grid that nobody measured take the roofline's time, times what the nearest point is off it.
Reading a batch is a sum instead: of what a batch, a feature, a sample, a sample's feature and an id take. So is
handing ids to owners that pool: of what a batch, an id, a feature and each of these for each owner take.

Where it was not, the roofline itself (Williams et al., CACM 2009) stands: the longer one of the operations' time at the
peak rate and the bytes' time at the memory's, over an efficiency of the class. Lookups move whole lines, and rows come
from the cache as often as the table fits into it, the form of Lin et al. (arXiv:2201.07821, section III-C): bytes from
memory are those of the misses, and the slower one of both memories counts. Collectives are a latency for each step of
the algorithm and the bytes that a rank's link carries (ring; direct for all-to-all).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from recjax.planning.machine import COLLECTIVES, HOST, SIZES, Kernel, Machine, Point
from recjax.planning.reuse import Use
from recjax.planning.work import Work
from recjax.utils.units import bus_factor

# What the work of a host goes by that is a sum: reading a batch, and handing its ids to owners that pool.
_READING = ((), ("features",), ("samples",), ("samples", "features"), ("ids",))
_HANDING = ((), ("ids",), ("features",), ("ids", "devices"), ("features", "devices"))
# Sizes for which compilers choose other code: rows of 512 bytes may take less than of 256.
_OTHER_CODE = {"batched_matmul": ("m", "n", "k"), "gather": ("row_bytes",), "scatter": ("row_bytes",)}
_SWEEPS = 4  # over all sizes, of evening out
_LINE = 64  # bytes of a cache line
# The rate of a dtype's operations, and how many of them one takes: float32 in three products of TensorFloat32.
_RATES = {
    "tf32": ("flops_tf32", 1),
    "tf32x3": ("flops_tf32", 3),
    "bf16": ("flops_bf16", 1),
    "f16": ("flops_bf16", 1),
    "f64": ("flops_f64", 1),
}
_ROUNDED = re.compile(r"tf32(x3)?$")  # float32 whose products are rounded on the way in


@dataclasses.dataclass(frozen=True)
class Cost:
    """Microseconds, and the CPU cores that are busy meanwhile (1 where that is not known)."""

    us: float
    cores: float = 1.0


class Costs:
    """The costs of kernels on one machine."""

    def __init__(self, machine: Machine, devices: int = 1) -> None:
        """Grids are made when first asked for.

        Args:
          machine: of the costs.
          devices: that run the same program at the same time. If they share the host's cores, they share its caches:
            between two uses of some memory each of those that run has touched as much. No more run than there are
            cores: an operating system lets each go on for longer than most kernels take.
        """
        self.machine = machine
        self._touching = min(devices, machine.cores) if machine.shared else 1
        self._grids: dict[str, _Grid | _Sum] = {}
        self._known: dict[tuple[object, ...], Cost] = {}

    def of(self, work: Work) -> Cost:
        """The cost of some work, without the overhead of starting it."""
        key = (work.kernel, *work.sizes.values(), work.flops, work.bytes)
        found = self._known.get(key)
        if found is None:
            self._known[key] = found = self._of(work)
        return found

    def _of(self, work: Work) -> Cost:
        kernel = self.machine.kernel(work.kernel)
        if kernel is not None and kernel.points:
            return self._among(work, kernel, self._grid(work.kernel, kernel).at(work.sizes))
        if kernel is None and _ROUNDED.search(work.kernel):  # as far off the roofline as products of float32
            plain = dataclasses.replace(work, kernel=_ROUNDED.sub("f32", work.kernel))
            cost, ratio = self.of(plain), roofline_us(work, self.machine) / roofline_us(plain, self.machine)
            return dataclasses.replace(cost, us=cost.us * ratio)
        return Cost(roofline_us(work, self.machine) / (kernel.efficiency if kernel else 1.0))

    def _among(self, work: Work, kernel: Kernel, cost: Cost) -> Cost:
        """The cost of a collective of more devices or hosts than were measured, in the ratio that the roofline has.

        Measured were devices of one host. Devices that share its cores do not communicate in parallel; the schedule
        slows them down.
        """
        devices = work.sizes.get("devices", 0.0)
        most = max(point.sizes.get("devices", 0.0) for point in kernel.points)
        far = devices > most or work.sizes.get("hosts", 1.0) > 1
        if self.machine.shared or not far or most < 2:
            return cost
        as_measured = dataclasses.replace(work, sizes={**work.sizes, "devices": min(devices, most), "hosts": 1.0})
        ratio = roofline_us(work, self.machine) / roofline_us(as_measured, self.machine)
        return dataclasses.replace(cost, us=cost.us * max(1.0, ratio))

    def reuse(self, uses: Sequence[Use]) -> Cost:
        """Returns by how much a kernel on data touched so far back takes longer: as a pass over as many bytes does.

        A pass over more bytes than were measured is one over as many as were, from each to the next of which it touches
        the rest: of so many none are near. One over fewer takes longer by their share of the fewest measured: it
        fetches fewer cache lines.
        """
        kernel, total = self.machine.kernel("reuse"), sum(use.bytes for use in uses)
        if kernel is None or not kernel.points or not total:
            return Cost(0.0)
        grid = self._grid("reuse", kernel)
        measured = [point.sizes["bytes"] for point in kernel.points]
        rest, share = max(0.0, total - max(measured)), min(1.0, max(total, _LINE) / min(measured))
        near = grid.at({"bytes": total, "distance": max(1.0, rest * self._touching)})
        far_us = sum(
            use.bytes
            / total
            * grid.at({"bytes": total, "distance": max(1.0, (use.distance + rest) * self._touching)}).us
            for use in uses
        )
        return Cost(share * max(0.0, far_us - near.us), near.cores)

    def outside(self, work: Work) -> float:
        """Returns how many times some work is outside of the points of its class: 1 within; inf if there are none."""
        kernel = self.machine.kernel(work.kernel)
        if kernel is None or not kernel.points:
            return math.inf
        return self._grid(work.kernel, kernel).outside(work.sizes)

    def host(self, stage: str, **sizes: float) -> Cost:
        """The cost of a host's stage; 0 if the machine does not know it."""
        kernel = self.machine.kernel(stage)
        return self._grid(stage, kernel).at(sizes) if kernel and kernel.points else Cost(0.0)

    def _grid(self, name: str, kernel: Kernel) -> _Grid | _Sum:
        if name not in self._grids:
            base, _, variant = name.partition(".")
            places: tuple[str, ...] = ("table_bytes", "distance")
            if base in (*COLLECTIVES, "host_route", "host_pack"):
                places = ("devices",)
            if base == "host_read":
                self._grids[name] = _Sum(kernel.points, _READING)
            elif variant in ("pooled", "split_pooled") and name in self.machine.kernels:
                self._grids[name] = _Sum(kernel.points, _HANDING)
            else:
                roofline, free = functools.partial(self._roofline_us, name), _OTHER_CODE.get(base, ())
                self._grids[name] = _Grid(SIZES[base], kernel.points, roofline, places, free)
        return self._grids[name]

    def _roofline_us(self, kernel: str, sizes: Mapping[str, float]) -> float:
        """The roofline's time of a kernel of which only the sizes are known, us."""
        return max(roofline_us(of_sizes(kernel, sizes), self.machine), 1e-9)


class _Grid:
    """Times over the logarithms of some sizes; what is not there is taken from what is nearest."""

    def __init__(
        self,
        names: Sequence[str],
        points: Sequence[Point],
        roofline: Callable[[Mapping[str, float]], float],
        places: tuple[str, ...],
        free: tuple[str, ...],
    ) -> None:
        """Makes the grid; sizes among `places`, beyond the largest measured one, do not make the work more.

        Larger sizes take no less, but for those among `free`.
        """
        self._names, self._places = names, places
        self._axes = [np.log(sorted({p.sizes[name] for p in points})) for name in names]
        logs_PxS = np.array([[math.log(p.sizes[name]) for name in names] for p in points])
        bases = [roofline(p.sizes) for p in points]
        off_P = np.log([p.us for p in points]) - np.log(bases)
        shape = [len(axis) for axis in self._axes]
        us, cores = np.empty(shape), np.empty(shape)
        for place in itertools.product(*map(range, shape)):
            at_S = np.array([axis[i] for axis, i in zip(self._axes, place, strict=True)])
            near = int(np.abs(logs_PxS - at_S).sum(axis=1).argmin())
            sizes = dict(zip(names, np.exp(at_S), strict=True))
            us[place] = off_P[near] + math.log(roofline(sizes))
            cores[place] = max(1.0, points[near].cores)
        rising = [axis for axis, name in enumerate(names) if name not in free]
        for _ in range(_SWEEPS):
            for axis in rising:
                us = np.apply_along_axis(_isotonic, axis, us)
        raised, lowered = us, us  # what the sweeps of several sizes leave
        for axis in rising:
            raised = np.maximum.accumulate(raised, axis=axis)
            lowered = np.flip(np.minimum.accumulate(np.flip(lowered, axis), axis=axis), axis)
        self._log_us, self._cores = (raised + lowered) / 2, cores

    def outside(self, sizes: Mapping[str, float]) -> float:
        """Returns how many times larger than the largest point, or smaller than the least, these sizes are; 1 within.

        Sizes that only say where the data lie do not count.
        """
        far = 0.0
        for name, axis in zip(self._names, self._axes, strict=True):
            if name not in self._places:
                at = math.log(max(sizes[name], 1e-9))
                far += max(at - axis[-1], axis[0] - at, 0.0)
        return math.exp(far)

    def at(self, sizes: Mapping[str, float]) -> Cost:
        """The time and cores of some sizes."""
        lows, shares, beyond = [], [], 0.0
        for name, axis in zip(self._names, self._axes, strict=True):
            at = math.log(max(sizes[name], 1e-9))
            if at > axis[-1] and name not in self._places:
                beyond += at - axis[-1]
            low = min(max(int(np.searchsorted(axis, at)) - 1, 0), max(len(axis) - 2, 0))
            lows.append(low)
            share = (at - axis[low]) / (axis[low + 1] - axis[low]) if len(axis) > 1 else 0.0
            shares.append(min(max(share, 0.0), 1.0))
        log_us = cores = 0.0
        for corner in itertools.product((0, 1), repeat=len(lows)):
            weight = math.prod(s if up else 1 - s for s, up in zip(shares, corner, strict=True))
            if weight:
                place = tuple(low + up for low, up in zip(lows, corner, strict=True))
                log_us += weight * self._log_us[place]
                cores += weight * self._cores[place]
        return Cost(math.exp(log_us + beyond), cores)


class _Sum:
    """Times that are a sum: of a constant and of products of sizes, each times what one of it takes.

    For work that does several things one after the other, each of which goes by other sizes.
    """

    def __init__(self, points: Sequence[Point], terms: Sequence[tuple[str, ...]]) -> None:
        """Fits what one of each term takes, not less than 0, by least squares of relative errors (NNLS)."""
        import scipy.optimize  # a quarter of a second, which each start of a training would pay

        self._terms, self._points = terms, points
        terms_PxT = np.array([self._of(p.sizes) for p in points]) / np.array([[p.us] for p in points])
        self._us_T: np.ndarray = scipy.optimize.nnls(terms_PxT, np.ones(len(points)))[0]
        self._cores = float(np.median([max(1.0, p.cores) for p in points]))

    def _of(self, sizes: Mapping[str, float]) -> list[float]:
        return [math.prod(sizes[name] for name in term) for term in self._terms]

    def outside(self, sizes: Mapping[str, float]) -> float:
        """Returns how many times outside of the points these sizes are, as a grid does."""
        far = 1.0
        for name in self._points[0].sizes:
            known = [p.sizes[name] for p in self._points]
            far *= max(sizes[name] / max(known), min(known) / max(sizes[name], 1e-9), 1.0)
        return far

    def at(self, sizes: Mapping[str, float]) -> Cost:
        """The time and cores of some sizes."""
        return Cost(float(np.dot(self._of(sizes), self._us_T)), self._cores)


def _isotonic(values_N: np.ndarray) -> np.ndarray:
    """The nearest values, in squares, of which none is less than the one before (pool adjacent violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values_N:
        mean, count = float(value), 1
        while means and means[-1] > mean:
            mean = (mean * count + means[-1] * counts[-1]) / (count + counts[-1])
            count += counts.pop()
            means.pop()
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)


def of_sizes(kernel: str, sizes: Mapping[str, float]) -> Work:
    """The work of a kernel from its sizes alone, with float32 where its name does not say the dtype."""
    base, _, variant = kernel.partition(".")
    dtype = variant.rpartition("_")[2]
    item = 2 if dtype in ("bf16", "f16") else 8 if dtype == "f64" else 4
    if base in ("matmul", "batched_matmul"):
        m, n, k, batch = sizes["m"], sizes["n"], sizes["k"], sizes.get("batch", 1.0)
        return Work(kernel, sizes, 2 * batch * m * n * k, item * batch * (m * k + k * n + m * n))
    if base in ("gather", "scatter"):
        moved = (2 if base == "gather" else 3) * sizes["rows"] * sizes["row_bytes"] + 4 * sizes["rows"]
        return Work(kernel, sizes, 0.0, moved)
    if base == "sort":
        keys = sizes["keys"]
        return Work(kernel, sizes, keys * math.log2(max(2.0, keys)), 8 * keys * sizes["operands"])
    if base in ("transcendental", "convert"):
        return Work(kernel, sizes, (20 if base == "transcendental" else 1) * sizes["elements"], 0.0)
    return Work(kernel, sizes, 0.0, math.prod(sizes[name] for name in SIZES[base] if name != "devices"))


def roofline_us(work: Work, machine: Machine) -> float:
    """The least time that the machine's rates allow, us; see the module."""
    base, _, variant = work.kernel.partition(".")
    if base in COLLECTIVES:
        return _collective_us(base, work.sizes, machine)
    if base in HOST:
        return work.bytes / machine.rate("memory") * 1e6
    flops = _flops(variant.rpartition("_")[2], machine)
    if base in ("gather", "scatter"):
        return max(_lookup_us(work, machine), work.flops / flops * 1e6)
    operations = work.flops
    if base in ("matmul", "batched_matmul"):
        tile = machine.rate("matmul_tile", 1.0)
        s = work.sizes
        operations = 2 * s.get("batch", 1.0) * s["m"] * (math.ceil(s["n"] / tile) * math.ceil(s["k"] / tile) * tile**2)
    return max(operations / flops, work.bytes / machine.rate("memory")) * 1e6


def _flops(dtype: str, machine: Machine) -> float:
    """Operations a second that count as those of a dtype; where the machine does not say, as those of float32."""
    name, passes = _RATES.get(dtype, ("flops_f32", 1))
    return machine.rate(name) / passes if name in machine.rates else machine.rate("flops_f32")


def _lookup_us(work: Work, machine: Machine) -> float:
    """Rows of a table in whole lines, from memory or cache, and the rest in one stream."""
    line, rows, row_bytes = machine.rate("line_size"), work.sizes["rows"], work.sizes["row_bytes"]
    touched = rows * math.ceil(row_bytes / line) * line
    times = 1 if work.kernel.startswith("gather") else 2  # read, and written again
    streamed = max(work.bytes - times * rows * row_bytes, 0.0)
    hits = min(1.0, machine.rate("cache_size", 0.0) / work.sizes["table_bytes"])
    memory_s = (touched * times * (1 - hits) + streamed) / machine.rate("memory")
    cache_s = (touched * times + streamed) / machine.rate("cache", machine.rate("memory"))
    return max(memory_s, cache_s) * 1e6


def _collective_us(kind: str, sizes: Mapping[str, float], machine: Machine) -> float:
    """Steps of an algorithm, each with its latency, and the bytes that the slowest link carries: see the module.

    `sizes` may say over how many hosts; else they are as few as can be.
    """
    size, devices = sizes["bytes"], sizes["devices"]
    if devices < 2:
        return 0.0
    per_host = machine.rate("host_devices")
    hosts = sizes.get("hosts") or max(1, math.ceil(devices / per_host))
    link, latency = machine.rate("link", machine.rate("memory")), machine.rate("link_latency", 0.0)
    network, far = machine.rate("network", link), machine.rate("network_latency", latency)
    each = devices / hosts  # of a host
    if kind == "all_to_all":
        if dimensions := machine.rate("torus", 0.0):  # a byte takes a quarter of every ring on its way
            size *= max(1.0, dimensions * devices ** (1 / dimensions) / 4)
        inside, across = size * (each - 1) / devices, size * (devices - each) / devices
        steps = latency * (each > 1) + far * (hosts > 1)
        return steps + max(inside / link, across / network if hosts > 1 else 0.0) * 1e6
    rate = link if hosts == 1 else min(link, each * network) if each > 1 else network
    carried = size * bus_factor(kind, int(devices)) / rate * 1e6
    around = (devices - 1) * latency if hosts == 1 else (devices - hosts) * latency + hosts * far
    if kind != "all_reduce":
        return around + carried
    up = math.ceil(math.log2(max(1.0, each))) * latency + math.ceil(math.log2(hosts)) * far
    return min(2 * around + carried, 2 * up + 2 * carried)  # a ring, or a tree, which sends at half the rate
