"""Chunks, their order, dependencies, and when one rank may stand for all; worked out by hand.

Two ranks, fully connected, 1e9 bytes/s (a byte takes a nanosecond), no latency unless said: a direct all-to-all of M
takes M/2.
"""

import numpy as np
import pytest
from support.simulating import collective, exchange, finish, play, topology, workload

from recjax.errors import ConfigError
from recjax.lab.simulate.collectives import Schedule, Send
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.lower import NotSymmetricError, Quotient
from recjax.lab.simulate.system import System
from recjax.lab.simulate.tcp import Tcp
from recjax.lab.simulate.workload import Operation, from_operations

PAIR = topology("fully_connected:2")


def compute(name, ns, *after, **more):
    return Operation(name, "compute", ns, depends_on=after, **more)


def all_to_all(name, size, *after, **more):
    return Operation(name, "collective", collective="all_to_all", bytes=size, depends_on=after, **more)


def test_computation_and_communication_overlap_and_what_is_left_is_exposed():
    """Computation a takes 100; its all-to-all 100-400 beside b (100-300); c waits for it: 400-450."""
    steps = [compute("a", 100), all_to_all("x", 600, "a"), compute("b", 200, "a"), compute("c", 50, "x", "b")]
    for shortcut in ("always", "never"):
        result = play(steps, PAIR, shortcut)
        assert result.time_ns == 450
        assert [set(finish(result, name)) for name in "axbc"] == [{100}, {400}, {300}, {450}]
        assert set(result.waited[1]) == {100} and result.waited.sum() == 100 * result.network.actors


def test_a_rank_waits_at_the_end_for_what_nothing_depends_on():
    result = play([compute("a", 100), all_to_all("x", 600, "a")], PAIR)
    assert result.time_ns == 400 and result.waited[:, 0].tolist() == [0, 300]


def test_computations_keep_their_order():
    """As b stands before c and waits for x, c waits too, as in a stream of a device."""
    steps = [all_to_all("x", 600), compute("b", 10, "x"), compute("c", 10)]
    assert play(steps, PAIR).time_ns == 320


def test_collectives_wait_for_a_chunk_in_flight_first_come_first_served():
    """One chunk at a time; a sends 0-100, and b, c come at 10 and 20. fifo: b 100-200, c 200-300; lifo: c, then b."""
    steps = [
        compute("0", 10),
        compute("1", 10, "0"),
        all_to_all("a", 200),
        all_to_all("b", 200, "0"),
        all_to_all("c", 200, "1"),
    ]
    ends = {"fifo": (100, 200, 300), "lifo": (100, 300, 200)}
    for scheduling, expected in ends.items():
        for shortcut in ("always", "never"):
            result = play(steps, PAIR, shortcut, in_flight=1, scheduling=scheduling)
            assert tuple(finish(result, name)[0] for name in "abc") == expected
    # A priority beats both.
    urgent = [*steps[:3], all_to_all("b", 200, "0", priority=1), steps[4]]
    assert [finish(play(urgent, PAIR, in_flight=1, scheduling="lifo"), n)[0] for n in "abc"] == [100, 200, 300]


def test_a_later_collective_overtakes_the_chunks_that_are_not_in_flight():
    """Collective a has 4 chunks of 50 ns, from 0; b, as large, comes at 10.

    Last in, first out: after a's first chunk all of b, 50-250, then a's others, 250-400.
    """
    steps = [compute("0", 10), all_to_all("a", 400), all_to_all("b", 400, "0")]
    lifo = play(steps, PAIR, in_flight=1, chunks=4, scheduling="lifo")
    assert (finish(lifo, "a"), finish(lifo, "b")) == ([400], [250])
    fifo = play(steps, PAIR, in_flight=1, chunks=4)
    assert (finish(fifo, "a"), finish(fifo, "b")) == ([200], [400])


def test_chunks_in_flight_hide_latency():
    """Four chunks of 50 ns each with latency 100: one at a time 4 * 150; two 2 * 200; four 200 + 100."""
    where = topology("fully_connected:2", latency=100)
    times = {n: play([all_to_all("a", 400)], where, chunks=4, in_flight=n).time_ns for n in (1, 2, 4)}
    # Two: the first two leave at 0 and 50, are there at 150 and 200; the third leaves at 150, is there at 300, ...
    assert times == {1: 600, 2: 350, 4: 300}


def test_ranks_admit_chunks_in_one_order_or_they_would_wait_for_ever():
    """Rank 1 has its part of z at 10 and goes on with a, issued at 5; rank 0 at 1000, when b waits too (from 50).

    By itself rank 0 would begin with b, and each would wait for the other. As rank 1 began with a, so does rank 0:
    a 1000-1100 (rank 1's uplink is busy with z until then), b 1100-1200.
    """
    steps = [
        exchange({(0, 1): 10, (1, 0): 1000}, 2, "z"),
        compute("0", 5),
        all_to_all("a", 200, "0"),
        compute("1", 45, "0"),
        all_to_all("b", 200, "1"),
    ]
    result = play(steps, PAIR, in_flight=1, scheduling="lifo")
    assert [finish(result, name) for name in "zab"] == [[1000, 10], [1100, 1100], [1200, 1200]]


def test_groups_by_dimension_and_by_rank():
    """fully_connected:2,fully_connected:2 with unequal bandwidths: inside M/2, across twice that."""
    where = topology("fully_connected:2,fully_connected:2", bandwidth=[1e9, 0.5e9])
    assert play([all_to_all("x", 200, group=(0,))], where).time_ns == 100
    assert play([all_to_all("x", 200, group=(1,))], where).time_ns == 200
    assert play([all_to_all("x", 200, ranks=((0, 1), (2, 3)))], where).time_ns == 100
    assert play([all_to_all("x", 200, ranks=((0, 2), (1, 3)))], where).time_ns == 200
    some = play([all_to_all("x", 200, ranks=((0, 2),))], where)
    assert finish(some, "x") == [200, 0, 200, 0] and "only some" in some.refused
    assert play([all_to_all("x", 200, group=())], where).time_ns == 0


@pytest.mark.parametrize(
    "name, algorithm, where, why",
    [
        ("all_reduce", "double_binary_tree", "switch:8", "a tree"),
        ("all_reduce", "halving_doubling", "ring:8", "links that see the same"),
        ("all_reduce", "ring", "fully_connected:4,switch:2", "longer way"),
    ],
)
def test_the_shortcut_is_refused_where_ranks_differ(name, algorithm, where, why):
    with pytest.raises(ConfigError, match=f"one rank cannot stand for all of this: .*({why})"):
        collective(name, algorithm, where, 1000, shortcut="always")
    result = collective(name, algorithm, where, 1000)
    assert not result.shortcut and result.refused and result.finished.shape == (1, 8)


def test_the_shortcut_is_refused_where_two_collectives_mix_links():
    """Each alone is symmetric when fully connected: a ring, and pairs by exclusive or. Together they are not."""
    where = topology("fully_connected:8")
    how = System({"all_reduce": "halving_doubling", "reduce_scatter": "ring"})
    both = [Operation(n, "collective", collective=n, bytes=800) for n in ("all_reduce", "reduce_scatter")]
    for one in both:
        assert simulate(workload([one]), where, how, "always").shortcut
    with pytest.raises(ConfigError, match="links that see the same in one collective do not in another"):
        simulate(workload(both), where, how, "always")


def test_the_shortcut_is_refused_where_ranks_share_a_link_in_the_same_message():
    """3 nodes of 3: some ranks of a node send by way of the same rank's port, two at a time."""
    where = topology("fully_connected:3,switch:3")
    to = np.array([7, 8, 4, 2, 0, 6, 1, 5, 3])
    coordinates = [(rank % 3, rank // 3) for rank in range(9)]
    assert sorted(to) == list(range(9))
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in zip(coordinates, [coordinates[t] for t in to], strict=True))
    assert len(set(where.routes(np.arange(9), to)[1])) < 9
    with pytest.raises(NotSymmetricError, match="over one link"):
        Quotient(where).program(Schedule(((Send(to, 1.0),),)), np.arange(9)[None], 100)


def test_with_windows_the_shortcut_is_refused_where_two_collectives_share_some_connections():
    """0 sends to 1 in a ring and in pairs by exclusive or; 1 to 2 and to 0. A window is shared by 0's alone."""
    how = {"algorithms": {"all_reduce": "halving_doubling", "reduce_scatter": "ring"}}
    both = [Operation(n, "collective", collective=n, bytes=800) for n in ("all_reduce", "reduce_scatter")]
    where = topology("switch:4")
    assert play(both, where, **how).shortcut
    with pytest.raises(ConfigError, match="connections that see the same in one collective do not in another"):
        play(both, where, "always", tcp=Tcp(100), **how)


def test_the_shortcut_is_refused_for_unequal_sizes_and_times():
    assert "unequal" in play([exchange({(0, 1): 5, (1, 0): 7}, 2)], PAIR).refused
    assert "different times" in play([Operation("c", "compute", (1.0, 2.0))], PAIR).refused
    assert play([Operation("c", "compute", (2.0, 2.0))], PAIR).shortcut
    with pytest.raises(NotSymmetricError):
        Quotient(topology("ring:4")).member(np.array([[0, 1]]))


def test_a_thousand_ranks_by_the_shortcut():
    """Closed forms at 1,024: the port's, and a ring's."""
    n, size = 1024, 1024 * 1000.0
    direct = collective("all_to_all", "direct", f"switch:{n}", size, latency=5, shortcut="always")
    assert direct.time_ns == pytest.approx(n * 1000 + 2 * 5, abs=1)
    ring = collective("all_reduce", "ring", f"switch:{n}", size, latency=5, shortcut="always")
    assert ring.time_ns == pytest.approx(2 * (n - 1) * 2 * 1005, abs=1)


def test_operations_may_stand_in_any_order():
    steps = [compute("c", 1, "b"), compute("b", 1, "a"), compute("a", 1)]
    assert [operation.name for operation in workload(steps).operations] == ["a", "b", "c"]
    long = [compute(f"{i}", 1, *([f"{i + 1}"] if i < 3000 else [])) for i in range(3001)]  # deeper than Python's stack
    assert workload(long).operations[0].name == "3000"


@pytest.mark.parametrize(
    "steps, why",
    [
        ([compute("a", 1), compute("a", 1)], "two operations are called 'a'"),
        ([compute("a", 1, "b")], "'a' depends on 'b', which does not exist"),
        ([compute("a", 1, "b"), compute("b", 1, "a")], "wait for each other"),
        ([compute("a", 1, "a")], "wait for each other"),
        ([compute("a", -1)], "negative"),
        ([Operation("a", "other")], "kind 'other'"),  # type: ignore[arg-type]
        ([all_to_all("a", float("nan"))], "not finite"),
        ([Operation("a", "collective", collective="all_reduce", splits=((0.0,),))], "splits"),
        ([all_to_all("a", 1, ranks=((0, 1), (2,)))], "groups of one size"),
    ],
)
def test_operations_that_make_no_sense(steps, why):
    with pytest.raises(ConfigError, match=why):
        from_operations("test", steps)


@pytest.mark.parametrize(
    "steps, how, why",
    [
        ([Operation("a", "compute", (1.0, 2.0, 3.0))], {}, "3 durations for 2 ranks"),
        ([all_to_all("a", 1, ranks=((0, 2),))], {}, "from 0 to 1"),
        ([all_to_all("a", 1, ranks=((0, 0),))], {}, "at most once"),
        ([exchange({(0, 1): 1}, 3)], {}, "splits of 3 ranks, its groups have 2"),
        ([Operation("a", "collective", collective="all_sum", bytes=1)], {}, "collective 'all_sum' is unknown"),
        ([all_to_all("a", 1)], {"algorithms": {"all_to_all": "tree"}}, "no algorithm 'tree'"),
        ([all_to_all("a", 1)], {"algorithms": {"all_to_all": "ring,ring"}}, "2 names for 1 dimension"),
        ([], {"algorithms": {"all": "ring"}}, "there are all_reduce"),
        ([], {"chunks": 0}, "1 or more"),
        ([], {"scheduling": "random"}, "fifo and lifo"),
    ],
)
def test_systems_that_do_not_fit(steps, how, why):
    with pytest.raises(ConfigError, match=why):
        play(steps, PAIR, **how)
