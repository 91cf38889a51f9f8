"""To which collectives the time belongs in which a rank stands still. A byte takes a nanosecond."""

import pytest
from support.simulating import exchange, play, topology

from recjax.lab.simulate.workload import Operation


def waited(result, rank):
    names = [operation.name for operation in result.workload.operations]
    return {name: float(result.waited[i, rank]) for i, name in enumerate(names) if result.waited[i, rank]}


def test_a_chain_of_collectives_without_computing_shares_out_the_time():
    """Ids, rows, a check of nothing: 300, 1000 and 4 ns, one after the other; the check waits for all."""
    steps = [("ids", 300, ()), ("rows", 1000, ("ids",)), ("check", 4, ("ids", "rows"))]
    made = [exchange({(0, 1): size, (1, 0): size}, 2, name, depends_on=after) for name, size, after in steps]
    result = play(made, topology("fully_connected:2"))
    assert waited(result, 0) == {"ids": 300, "rows": 1000, "check": 4}


def test_collectives_that_are_under_way_together_share_the_moment():
    """Rank 1 gets 1000 bytes from rank 0 and, in another exchange, 400 from rank 2: both are under way for 400 ns."""
    made = [exchange({(0, 1): 1000}, 3, "long"), exchange({(2, 1): 400}, 3, "short")]
    assert waited(play(made, topology("fully_connected:3")), 1) == {"long": 800, "short": 200}


def test_what_nobody_waits_for_is_charged_nothing():
    """The layer waits for the short exchange alone; when it is done, at 900, all wait for the long one."""
    made = [
        exchange({(0, 1): 1000}, 3, "long"),
        exchange({(2, 1): 400}, 3, "short"),
        Operation("layer", "compute", 500.0, depends_on=("short",)),
    ]
    assert waited(play(made, topology("fully_connected:3")), 1) == {"short": 400, "long": 100}


def test_a_collective_that_stands_in_a_queue_is_charged_where_nothing_else_is_waited_for():
    """One in flight, the first ready first; the layer waits for the second alone, which begins at 1000."""
    both = {(0, 1): 1000, (1, 0): 1000}
    made = [
        exchange(both, 2, "first"),
        exchange(both, 2, "second"),
        Operation("layer", "compute", 500.0, depends_on=("second",)),
    ]
    result = play(made, topology("fully_connected:2"), in_flight=1)
    assert waited(result, 0) == {"second": 2000}
    assert waited(play(made[:2], topology("fully_connected:2"), in_flight=1), 0) == {"first": 1000, "second": 1000}


@pytest.mark.parametrize("shortcut", ["auto", "never"])
def test_coming_late_to_a_collective_is_no_communication(shortcut):
    """300 ns pass until the exchange of 1000 begins; those of another one that is under way meanwhile are its own."""
    both = {(0, 1): 1000, (1, 0): 1000}
    late = exchange(both, 2, "late", late_ns=(300.0, 300.0))
    result = play([late], topology("fully_connected:2"), shortcut)
    assert waited(result, 0) == {"late": 1000} and result.late[:, 0].tolist() == [300]
    result = play([exchange({(0, 1): 200, (1, 0): 200}, 2, "first"), late], topology("fully_connected:2"), shortcut)
    assert waited(result, 0) == {"first": 200, "late": 1000}
    assert result.late.sum(axis=0)[0] == 100 and result.time_ns == 1300


@pytest.mark.parametrize("shortcut", ["auto", "never"])
def test_computing_and_stalls_make_up_the_whole(shortcut):
    both = {(0, 1): 1000, (1, 0): 1000}
    made = [
        Operation("a", "compute", 100.0),
        exchange(both, 2, "x", depends_on=("a",)),
        Operation("b", "compute", 300.0, depends_on=("a",)),
        exchange(both, 2, "y", depends_on=("b",)),
        Operation("c", "compute", 50.0, depends_on=("x", "y")),
    ]
    result = play(made, topology("fully_connected:2"), shortcut)
    assert result.time_ns == 100 + 300 + 50 + result.waited[:, 0].sum()
    assert waited(result, 0)["y"] > waited(result, 0)["x"] > 0
