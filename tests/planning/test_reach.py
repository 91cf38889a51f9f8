"""Predictions far outside of what was measured say so."""

import dataclasses

import pytest
from support.machines import FORK, MACHINE

from recjax.planning.graph import Graph, Node, read_graph
from recjax.planning.machine import Kernel, Point, open_machine
from recjax.planning.predict import Outside, outside, outside_text
from recjax.planning.work import Work

MEASURED = dataclasses.replace(
    MACHINE, kernels={"copy": Kernel(1.0, "measured", tuple(Point({"bytes": 10.0**n}, 10.0**n) for n in (1, 2, 3)))}
)


def copies(*sizes, trips=1):
    works = [Work("copy", {"bytes": float(size)}, 0.0, float(size)) for size in sizes]
    nodes = tuple(Node(f"n{i}", "copy", "x", "kernel", (work,), ()) for i, work in enumerate(works))
    return Graph((Node("loop", "while", "x", "loop", (), (), trips, Graph(nodes)),))


def test_a_class_is_named_with_how_far_it_is_carried_on_and_what_that_takes():
    (found,) = outside(copies(1000, 30_000, trips=3), MEASURED)
    assert found == Outside("copy", pytest.approx(30), pytest.approx(30 / 31))


def test_every_turn_of_a_loop_counts_and_the_farthest_size_is_named():
    """3 (30,000 + 10,000) us of 3 (30,000 + 10,000) + 5 1,000."""
    near = Node("near", "copy", "x", "kernel", (Work("copy", {"bytes": 1000.0}, 0.0, 1000.0),), (), 5)
    (found,) = outside(Graph((*copies(30_000, 10_000, trips=3).nodes, near)), MEASURED)
    assert found == Outside("copy", pytest.approx(30), pytest.approx(120 / 125))


@pytest.mark.parametrize("sizes", [(10, 1000), (5000,), (1, 1000, 1000, 1000)], ids=["within", "near", "a small one"])
def test_nothing_is_said_of_what_is_near_or_takes_no_time(sizes):
    assert not outside(copies(*sizes), MEASURED)


def test_a_class_without_a_point_is_named_and_of_a_data_sheet_nothing():
    found = outside(read_graph(FORK, 1), MEASURED)
    assert ("matmul.nn_f32", None) in [(one.kernel, one.times) for one in found]
    assert not outside(read_graph(FORK, 1), open_machine("h100"))


def test_the_line_names_each_class():
    far = [{"kernel": "copy", "times": 1234.5, "share": 0.5}, {"kernel": "sort", "times": None, "share": 0.04}]
    assert outside_text(far) == (
        "far outside of the sizes that the machine file has: copy (by a factor of up to 1,234, 50% of the kernels' "
        "time), sort (no size measured, 4% of the kernels' time)"
    )
    assert outside_text([]) == ""
