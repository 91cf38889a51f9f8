"""Collectives by themselves against the formulas of the literature, exact to a nanosecond.

alpha: latency of a link, e: endpoint delay, B: bandwidth, M: bytes, s = M / (N B): the time of one rank's share.
"""

import itertools
import math

import pytest
from support.simulating import GIB, collective

RANKS = (2, 3, 4, 7, 8, 16, 32)
POWERS = (2, 4, 8, 16, 64)
SIZES = (4096, 1_048_576, 100_000_000)
ALPHA, E, BANDWIDTH = 500.0, 10.0, 50 * GIB
SHORTCUTS, AUTO = ("always", "never"), ("auto",)


def cases(*values):
    return list(itertools.product(*values))


def time_of(name, algorithm, text, size, shortcut="auto", **more):
    how = {"bandwidth": BANDWIDTH, "latency": ALPHA, "endpoint_delay_ns": E} | more
    return collective(name, algorithm, text, size, shortcut=shortcut, **how).time_ns


def near(expected):
    return pytest.approx(expected, abs=1, rel=0)


def part(n, size):
    """s, in ns."""
    return size / n / BANDWIDTH * 1e9


def hops(n):
    return math.log2(n)


def halvings(n, s):
    return sum(2 * (ALPHA + n * s / 2**i + E) for i in range(1, n.bit_length())) + E


# Collective, algorithm, network, time for n ranks whose share takes s (so the whole n s), ranks, with which shortcuts.
GRID = (
    ("all_reduce", "ring", "ring", lambda n, s: 2 * (n - 1) * (ALPHA + s + E) + E, RANKS, SHORTCUTS),
    ("all_reduce", "ring", "fully_connected", lambda n, s: 2 * (n - 1) * (ALPHA + s + E) + E, RANKS, SHORTCUTS),
    ("all_reduce", "ring", "switch", lambda n, s: 2 * (n - 1) * (2 * (ALPHA + s) + E) + E, RANKS, SHORTCUTS),  # 2 hops
    ("reduce_scatter", "ring", "ring", lambda n, s: (n - 1) * (ALPHA + s + E) + E, RANKS, SHORTCUTS),
    ("all_gather", "ring", "ring", lambda n, s: (n - 1) * (ALPHA + s + E) + E, RANKS, SHORTCUTS),
    ("all_to_all", "ring", "ring", lambda n, s: n * (n - 1) / 2 * (ALPHA + s + E) + E, RANKS, SHORTCUTS),
    # bound by the port; one message; two messages
    ("all_to_all", "direct", "switch", lambda n, s: n * s + 2 * ALPHA + 2 * E, RANKS, SHORTCUTS),
    ("all_to_all", "direct", "fully_connected", lambda n, s: ALPHA + s + 2 * E, RANKS, SHORTCUTS),
    ("all_reduce", "direct", "fully_connected", lambda n, s: 2 * (ALPHA + s + E) + E, RANKS, SHORTCUTS),
    ("all_reduce", "halving_doubling", "fully_connected", halvings, POWERS, SHORTCUTS),
    # in one chunk
    (
        "all_reduce",
        "double_binary_tree",
        "fully_connected",
        lambda n, s: 2 * hops(n) * (ALPHA + n * s + E),
        POWERS,
        AUTO,
    ),
    # by a tree log2(n) messages one after the other, along a chain n - 1, and to (from) all at once n at one port
    *(
        row
        for name in ("broadcast", "reduce")
        for row in (
            (name, "tree", "fully_connected", lambda n, s: hops(n) * (ALPHA + n * s + E), POWERS, AUTO),
            (name, "ring", "ring", lambda n, s: (n - 1) * (ALPHA + n * s + E) + E, POWERS, AUTO),
            (name, "direct", "switch", lambda n, s: n * n * s + 2 * ALPHA + 2 * E, POWERS, AUTO),
        )
    ),
)


@pytest.mark.parametrize("name, algorithm, network, expected, ranks, shortcuts", GRID)
def test_one_dimension(name, algorithm, network, expected, ranks, shortcuts):
    for n, size, shortcut in itertools.product(ranks, SIZES, shortcuts):
        found = time_of(name, algorithm, f"{network}:{n}", size, shortcut)
        assert found == near(expected(n, part(n, size))), (n, size, shortcut)


@pytest.mark.parametrize("size, shortcut", cases([80_000_000, 1_048_576 * 8, 400_000_000], SHORTCUTS))
def test_direct_all_to_all_on_a_ring_of_eight(size, shortcut):
    """Clockwise go distances 1 to 4 (ties too): each link carries 1+2+3+4 messages, without a gap while alpha < s."""
    expected = 10 * part(8, size) + 2 * ALPHA + 2 * E
    assert part(8, size) > ALPHA
    assert time_of("all_to_all", "direct", "ring:8", size, shortcut) == near(expected)


@pytest.mark.parametrize("n", [4, 8, 16])
def test_halving_doubling_on_a_ring_sends_large_messages_short_ways(n):
    """At distance d messages have M / 2d bytes and d links; d of them share each: M/2 in each of 2 log2(n) steps."""
    assert collective("all_reduce", "halving_doubling", f"ring:{n}", 4096).time_ns == near(4096 * math.log2(n))


def test_a_chain_of_chunks_is_a_pipeline():
    """Four ranks, 3000 bytes in 3 chunks on a ring without latency: 3 hops, and 2 chunks behind the first."""
    assert collective("broadcast", "ring", "ring:4", 3000, chunks=3).time_ns == near((3 + 2) * 1000)


def test_double_binary_tree_gains_with_chunks_and_spreads_the_work_over_both_trees():
    """16 ranks: one chunk crosses 8 links one after the other; 64 chunks fill them.

    In one tree a leaf sends M, an inner rank 3 M. The leaves of one are inner in the other, except the roots, so with
    both every rank but those two sends M/2 + 3 M/2.
    """
    size = 64_000_000
    one = collective("all_reduce", "double_binary_tree", "fully_connected:16", size)
    many = collective("all_reduce", "double_binary_tree", "fully_connected:16", size, chunks=64)
    assert one.time_ns == near(8 * size)
    assert many.time_ns < one.time_ns / 4
    sent = [sum(many.bytes_on.get(16 * rank + to, 0) for to in range(16)) for rank in range(16)]
    assert sent == [size, *[2 * size] * 14, size]


@pytest.mark.parametrize("inner, outer, size", cases((2, 4, 8), (2, 3, 4), SIZES))
def test_hierarchical_all_reduce_is_its_three_phases(inner, outer, size):
    """Reduce-scatter inside over M, all-reduce across over M / inner, all-gather inside over M; each starts with e."""
    slow, far = 10e9, 2000.0
    s_inside = part(inner, size)
    s_across = size / inner / outer / slow * 1e9
    inside = (inner - 1) * (ALPHA + s_inside + E) + E
    across = 2 * (outer - 1) * (2 * (far + s_across) + E) + E
    for shortcut in SHORTCUTS:
        found = time_of(
            "all_reduce",
            "hierarchical",
            f"fully_connected:{inner},switch:{outer}",
            size,
            shortcut,
            bandwidth=[BANDWIDTH, slow],
            latency=[ALPHA, far],
        )
        assert found == near(2 * inside + across)


def test_hierarchical_algorithms_are_chosen_by_dimension():
    """Direct inside (one message each way), halving-doubling across."""
    size, inner, outer = 1_048_576, 8, 4
    inside = ALPHA + part(inner, size) + 2 * E
    across = sum(2 * (ALPHA + size / inner / 2**i / BANDWIDTH * 1e9 + E) for i in (1, 2)) + E
    for name in ("direct,halving_doubling", "hierarchical:direct,halving_doubling"):
        found = time_of("all_reduce", name, f"fully_connected:{inner},fully_connected:{outer}", size)
        assert found == near(2 * inside + across)


def test_other_spellings_are_understood():
    for name in ("halving-doubling", "halvingDoubling", "halving_doubling"):
        assert time_of("all_reduce", name, "fully_connected:8", 4096) == near(
            sum(2 * (ALPHA + 4096 / 2**i / BANDWIDTH * 1e9 + E) for i in (1, 2, 3)) + E
        )


@pytest.mark.parametrize("name, order", [("reduce_scatter", (1, 1 / 8)), ("all_gather", (1, 1 / 8))])
def test_hierarchical_halves(name, order):
    """8 x 4: 7 steps of M/8 inside and 3 of M/8/4 across, whichever comes first."""
    size = 1_048_576
    expected = sum((n - 1) * (ALPHA + part(n, size * share) + E) + E for n, share in zip((8, 4), order, strict=True))
    assert time_of(name, "hierarchical", "ring:8,ring:4", size) == near(expected)


def test_hierarchical_all_to_all_exchanges_everything_in_each_dimension():
    size = 1_048_576
    inside, across = ALPHA + part(8, size) + 2 * E, 4 * part(4, size) + 2 * ALPHA + 2 * E
    assert time_of("all_to_all", "hierarchical", "fully_connected:8,switch:4", size) == near(inside + across)


@pytest.mark.parametrize(
    "name, algorithm", [("all_reduce", "ring"), ("all_reduce", "direct"), ("all_to_all", "direct")]
)
def test_without_congestion_messages_pass_each_other(name, algorithm):
    """An analytical model: through a switch every message takes 2 alpha + s, however many there are."""
    n, size = 8, 1_048_576
    steps = {("all_reduce", "ring"): 14, ("all_reduce", "direct"): 2, ("all_to_all", "direct"): 1}[name, algorithm]
    expected = steps * (2 * ALPHA + part(n, size) + E) + E
    for shortcut in SHORTCUTS:
        assert time_of(name, algorithm, f"switch:{n}", size, shortcut, congestion=False) == near(expected)


def test_without_congestion_the_slowest_link_counts():
    """fully_connected:2,switch:2, a fifth of the bandwidth across: rank 0's to rank 3 has 3 links, one message."""
    how = {"bandwidth": [BANDWIDTH, BANDWIDTH / 5], "latency": [ALPHA, 3 * ALPHA], "congestion": False}
    expected = 2 * E + ALPHA + 2 * 3 * ALPHA + 5 * part(4, 4096)
    assert time_of("all_to_all", "direct", "fully_connected:2,switch:2", 4096, **how) == near(expected)


def test_a_copy_latency_comes_before_the_messages_of_every_step():
    n, size, copy = 8, 1_048_576, 3000.0
    expected = 2 * (n - 1) * (ALPHA + part(n, size) + E + copy) + E
    for shortcut in SHORTCUTS:
        assert time_of("all_reduce", "ring", f"ring:{n}", size, shortcut, copy_latency_ns=copy) == near(expected)


def test_chunks_of_a_ring_all_reduce_fill_the_pipeline():
    """Two chunks of half the size on a ring without latency: a link is busy with one while the other is received.

    In every step both halves pass each link one behind the other, so a step takes 2 (s/2) and nothing is lost.
    """
    n, size = 4, 4000
    one = collective("all_reduce", "ring", f"ring:{n}", size).time_ns
    two = collective("all_reduce", "ring", f"ring:{n}", size, chunks=2).time_ns
    assert one == near(6 * 1000) and two == near(6 * 1000)
    # With a latency of a step's length, two chunks hide it: 6 steps of s + alpha against 6 of max(s, s/2 + alpha) and
    # the second half of the last one.
    late = {"bandwidth": 1e9, "latency": 500.0}
    assert collective("all_reduce", "ring", f"ring:{n}", size, **late).time_ns == near(6 * 1500)
    assert collective("all_reduce", "ring", f"ring:{n}", size, chunks=2, **late).time_ns == near(6 * 1000 + 500)
