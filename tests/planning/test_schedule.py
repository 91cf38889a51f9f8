"""When nodes run: on graphs whose end and critical path are known."""

import dataclasses
import math

import pytest
from support.machines import BEGUN, FORK, LOOKUP, MACHINE

from recjax.planning.costs import Cost, Costs
from recjax.planning.graph import Node, read_graph
from recjax.planning.machine import Kernel, Point, Quantity
from recjax.planning.schedule import list_schedule, schedule


def node(name, *waits_for, kind="kernel"):
    return Node(name, kind, "part", kind, (), waits_for)


def run(nodes, times, lanes=1, cores=math.inf, in_order=True):
    """Schedules nodes that take `times`: us, or (us, cores)."""
    costs = {n.name: Cost(*(t if isinstance(t, tuple) else (t,))) for n, t in zip(nodes, times, strict=True)}
    held = ((1.0, cores),) if isinstance(cores, (int, float)) else cores
    return list_schedule(nodes, lambda n: costs[n.name], lanes, held, in_order)


def spans_of(found):
    return [(span.start_us, span.end_us) for span in found.spans]


def test_one_stream_runs_one_after_the_other():
    found = run([node("a"), node("b"), node("c", 0)], [3.0, 4.0, 5.0])
    assert spans_of(found) == [(0, 3), (3, 7), (7, 12)]
    assert found.end_us == 12 and found.critical == (0, 1, 2)


def test_a_collective_hides_beside_kernels_that_do_not_wait_for_it():
    nodes = [node("a"), node("x", 0, kind="collective"), node("b"), node("c", 1, 2)]
    hidden = run(nodes, [2.0, 3.0, 5.0, 1.0])
    assert spans_of(hidden) == [(0, 2), (2, 5), (2, 7), (7, 8)] and hidden.critical == (0, 2, 3)
    exposed = run(nodes, [2.0, 9.0, 5.0, 1.0])
    assert exposed.end_us == 12 and exposed.critical == (0, 1, 3)


def test_two_lanes_run_two_at_a_time_and_the_longer_chain_is_critical():
    nodes = [node("a"), node("b"), node("c", 0), node("d", 1), node("e", 2, 3)]
    found = run(nodes, [1.0, 2.0, 6.0, 3.0, 1.0], lanes=2, in_order=False)
    assert found.end_us == 8 and found.critical == (0, 2, 4)


def test_in_order_a_stream_waits_and_else_what_is_ready_goes_first():
    nodes = [node("a"), node("x", 0, kind="collective"), node("b", 1), node("c")]
    assert run(nodes, [1.0, 5.0, 1.0, 3.0]).end_us == 10  # c stands behind b
    assert run(nodes, [1.0, 5.0, 1.0, 3.0], in_order=False).end_us == 7


def test_nodes_that_want_more_cores_than_there_are_slow_each_other_down():
    nodes = [node("a"), node("b")]
    assert run(nodes, [(4.0, 1.0), (4.0, 1.0)], lanes=2, cores=2, in_order=False).end_us == 4
    assert run(nodes, [(4.0, 1.0), (4.0, 1.0)], lanes=2, cores=1, in_order=False).end_us == 8
    # together for 3 us of each, which takes 6; then b alone
    found = run(nodes, [(3.0, 1.0), (4.0, 1.0)], lanes=2, cores=1, in_order=False)
    assert spans_of(found) == [(0, 6), (0, 7)]
    assert found.core_us == 7


def test_an_empty_graph_takes_no_time():
    assert run([], []).end_us == 0 and run([], []).critical == ()


KNOWN = dataclasses.replace(
    MACHINE,
    shared=False,
    streams=1,
    overheads={"kernel": Quantity(1.0, "us", "x"), "loop": Quantity(0.5, "us", "x")},
    kernels={
        name: Kernel(1.0, "measured", (Point(dict.fromkeys(sizes, 1.0), us, 1.0),))
        for name, sizes, us in (
            ("elementwise", ("bytes",), 4.0),
            ("copy", ("bytes",), 4.0),
            ("all_reduce", ("bytes", "devices"), 0.001),
            ("all_to_all", ("bytes", "devices"), 0.001),
        )
    },
)


def test_a_step_written_by_hand_has_its_known_critical_path():
    """Products take their roofline on 1 GFLOP/s and 1 GB/s: 65.536 us; the message is 4096 bytes at 0.001 us each."""
    graph = read_graph(FORK, 4)
    found = schedule(graph, Costs(KNOWN))
    product, message, last = 1 + 65.536, 1 + 4096 * 0.001, 1 + 4.0 * 3 * 4096
    assert found.end_us == pytest.approx(2 * product + last)
    assert [graph.nodes[place].name for place in found.critical] == ["dot.1", "dot.2", "sum_fusion"]
    assert found.spans[1].end_us == pytest.approx(product + message)


def test_a_loop_takes_its_turns_with_their_overhead():
    graph = read_graph(LOOKUP, 1)
    found = schedule(graph, Costs(KNOWN))
    span = next(s for s in found.spans if graph.nodes[s.node].name == "while.1")
    assert span.end_us - span.start_us == pytest.approx(7 * (0.5 + 1 + 4.0 * 3 * 128 * 64))


def test_cores_that_others_take_for_a_part_of_the_time_slow_down_who_wants_them_then():
    """Half of the time one core of two: 1.5 cores are wanted, so a kernel is 1 and 1/1.5 times as fast by turns."""
    halves = ((0.5, 2.0), (0.5, 1.0))
    assert run([node("a")], [(5.0, 1.5)], cores=halves).end_us == pytest.approx(6)
    assert run([node("a")], [(5.0, 1.0)], cores=halves).end_us == 5
    assert run([node("a"), node("b")], [(3.0, 1.0)] * 2, 2, halves, False).end_us == pytest.approx(4)


def test_a_loop_on_a_share_of_a_core_is_slowed_down_once():
    shared = Costs(dataclasses.replace(KNOWN, shared=True, streams=2))
    graph = read_graph(LOOKUP, 1)
    times = {}
    for cores in (1.0, 0.25):
        spans = schedule(graph, shared, ((1.0, cores),)).spans
        times[cores] = next(s.end_us - s.start_us for s in spans if graph.nodes[s.node].name == "while.1")
    assert times[0.25] == pytest.approx(4 * times[1.0])


def test_the_end_of_a_collective_holds_the_stream_up():
    graph = read_graph(BEGUN, 2)
    slow = KNOWN.kernels | {"all_to_all": Kernel(1.0, "x", (Point({"bytes": 1.0, "devices": 1.0}, 100.0, 1.0),))}
    found = schedule(graph, Costs(dataclasses.replace(KNOWN, kernels=slow)))
    spans = {graph.nodes[s.node].name: s for s in found.spans}
    assert spans["beside"].start_us == 0
    assert spans["after"].start_us == spans["all-to-all-start"].end_us == pytest.approx(1 + 100 * 4096)
