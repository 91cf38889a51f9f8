"""From times of single cases to the kernel classes of a machine: their points, and how far off these are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from recjax.lab.calibrate.kernel_cases import IN_A_PASS
from recjax.lab.calibrate.overhead_cases import LEAST_US
from recjax.lab.calibrate.smoothing import smooth_us
from recjax.planning.costs import Costs, of_sizes
from recjax.planning.machine import COLLECTIVES, HOST, HeldOut, Kernel, Machine, Point


@dataclasses.dataclass(frozen=True)
class Seen:
    """A case that was measured.

    Attributes:
      kernel: the class that it belongs to.
      held_out: whether it only judges the points.
      point: its time, the median over the passes.
      passes_s: its time in each pass, s; of a size that is held out, each time that it was measured.
    """

    kernel: str
    held_out: bool
    point: Point
    passes_s: Sequence[float]


def with_classes(machine: Machine, seen: Sequence[Seen]) -> Machine:
    """The machine, which has its overheads, with the classes that these cases make."""
    start_us = machine.overhead("kernel")
    of: dict[str, list[Seen]] = {}
    for one in sorted(seen, key=lambda one: one.kernel):
        of.setdefault(one.kernel, []).append(one)
    kernels = {}
    for kernel, ones in of.items():
        start = _started(kernel, start_us)
        if points := [one.point for one in ones if not one.held_out]:
            repeat = _repeat([one.passes_s for one in ones], start / 1e6)
            kernels[kernel] = Kernel(1.0, "measured", _smooth(points, start), None, repeat)
    found = _without_streams(dataclasses.replace(machine, kernels=kernels))
    judged = {
        kernel: dataclasses.replace(
            of_kernel, held_out=_error(kernel, found, [one.point for one in of[kernel] if one.held_out])
        )
        for kernel, of_kernel in found.kernels.items()
    }
    return dataclasses.replace(found, kernels=judged)


def _smooth(points: Sequence[Point], start_us: float) -> tuple[Point, ...]:
    """The points of a class, each with the time that those of near sizes make likely."""
    smooth = smooth_us([[*p.sizes.values()] for p in points], [p.us for p in points], start_us, LEAST_US)
    return tuple(dataclasses.replace(point, us=us) for point, us in zip(points, smooth, strict=True))


def _without_streams(machine: Machine) -> Machine:
    """The machine with transcendental functions and conversions less the pass over memory that their cases made."""
    costs, kernels = Costs(machine), dict(machine.kernels)
    for name in IN_A_PASS.keys() & kernels.keys():
        points = [
            dataclasses.replace(point, us=max(point.us - _stream_us(name, point, costs), LEAST_US))
            for point in kernels[name].points
        ]
        kernels[name] = dataclasses.replace(kernels[name], points=tuple(points))
    return dataclasses.replace(machine, kernels=kernels)


def _stream_us(kernel: str, point: Point, costs: Costs) -> float:
    """Time of the pass over memory that a case of `IN_A_PASS` makes, us; 0 for any other class."""
    if kernel not in IN_A_PASS:
        return 0.0
    return costs.of(of_sizes("elementwise", {"bytes": 8 * point.sizes["elements"] / IN_A_PASS[kernel]})).us


def _error(kernel: str, machine: Machine, held_out: Sequence[Point]) -> HeldOut | None:
    """The error of predictions for sizes that are no points, with the start of a kernel; None if there are none."""
    costs, pairs = Costs(machine), []
    start_us = _started(kernel, machine.overhead("kernel"))
    for point in held_out:
        predicted_us = costs.of(of_sizes(kernel, point.sizes)).us + _stream_us(kernel, point, costs)
        pairs.append((start_us + predicted_us, start_us + point.us))
    return HeldOut.of(pairs) if pairs else None


def _repeat(passes_s: Sequence[Sequence[float]], start_s: float) -> float | None:
    """The repeat error of a class, see `Kernel`, from the times of its sizes in each pass and a kernel's start, s."""
    logs = []
    for times_s in passes_s:
        if len(times_s) > 1:
            halves_s = (max(float(np.median(half)), LEAST_US / 1e6) for half in (times_s[::2], times_s[1::2]))
            one_s, other_s = (start_s + half_s for half_s in halves_s)
            logs.append(abs(math.log(one_s / other_s)))
    return math.exp(sum(logs) / len(logs)) if logs else None


def _started(kernel: str, start: float) -> float:
    """The time that a kernel takes to start; none of the host's stages and of collectives, whose times have it."""
    return 0.0 if kernel.partition(".")[0] in (*HOST, *COLLECTIVES) else start
