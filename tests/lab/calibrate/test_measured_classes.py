"""Kernel classes from times that are given."""

import dataclasses
import math

import pytest

from recjax.lab.calibrate.measured_classes import Seen, with_classes
from recjax.planning.machine import Point, Quantity, open_machine


def test_points_are_smoothed_with_the_start_of_a_kernel_and_judged_by_what_is_held_out():
    """A pass takes 1 us for 1000 bytes and a kernel 50 us to start; of one size half as much again was measured.

    What is below a start counts little: 1 us or 2 us, of 50.
    """
    machine = dataclasses.replace(
        open_machine("h100"),
        kernels={},
        overheads={"kernel": Quantity(50.0, "us", ""), "loop": Quantity(1.0, "us", "")},
    )

    def seen(size, us, held_out=False):
        return Seen("copy", held_out, Point({"bytes": float(size)}, us), [us / 1e6])

    sizes = [2**e for e in range(6, 26)]
    exact = [seen(size, size / 1000) for size in sizes]
    off = [dataclasses.replace(one, point=dataclasses.replace(one.point, us=1.5 * one.point.us)) for one in exact]
    judge = seen(3 * 2**19, 3 * 2**19 / 1000, True)
    known = with_classes(machine, [*exact, judge]).kernels["copy"]
    for point, one in zip(known.points, exact, strict=True):
        assert 50 + point.us == pytest.approx(50 + one.point.us, rel=0.02)
    assert known.held_out.points == 1 and known.held_out.ratio_mean < 1.05
    scattered = with_classes(machine, [*exact[:15], off[15], *exact[16:]]).kernels["copy"].points[15]
    assert abs(math.log(scattered.us / exact[15].point.us)) < math.log(1.5) / 2
