"""The transport, worked out by hand: 1e9 bytes/s, so a byte takes a nanosecond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulating import collective, exchange, finish, play, topology

from recjax.errors import ConfigError
from recjax.lab.simulate.tcp import Tcp


def one_message(size, text="switch:2", latency=5.0, **tcp):
    return play([exchange({(0, 1): size}, 2)], topology(text, latency=latency), tcp=Tcp(**tcp))


def test_a_message_within_one_segment_goes_as_without_a_transport():
    assert one_message(100, window_bytes=100).time_ns == 2 * 105


def test_segments_follow_each_other_through_the_hops():
    """Ten of 100 bytes: the first takes 2 * 105, each further one 100 more."""
    assert one_message(1000, window_bytes=1000, segment_bytes=100).time_ns == 210 + 900


@pytest.mark.parametrize("ack_delay", [0, 40])
def test_a_window_of_one_segment_waits_for_every_acknowledgement(ack_delay):
    """A segment takes 210, its acknowledgement the delay and two latencies of 5."""
    found = one_message(1000, window_bytes=100, segment_bytes=100, ack_delay_ns=ack_delay)
    assert found.time_ns == 10 * 210 + 9 * (ack_delay + 10)


def test_the_window_bounds_the_rate_by_the_round_trip():
    """Two segments of 100 in a round trip of 210 + 190 + 10 = 410: a fifth pair is there four round trips later."""
    found = one_message(1000, window_bytes=200, segment_bytes=100, ack_delay_ns=190)
    assert found.time_ns == 210 + 100 + 4 * 410


def test_a_window_above_bandwidth_times_round_trip_costs_nothing():
    """Round trip 210 + 40 + 10 = 260: three segments of 100 keep the link busy, two do not."""
    how = {"segment_bytes": 100, "ack_delay_ns": 40}
    assert one_message(10_000, window_bytes=300, **how).time_ns == 210 + 9900
    assert one_message(10_000, window_bytes=200, **how).time_ns == 210 + 100 + 49 * 260


def test_a_sender_begins_slowly_and_doubles_its_window_in_a_round_trip():
    """Round trip of a segment 210 + 190 + 10 = 410: one segment, two, four, then three that are left of ten.

    The last three leave one after the other as acknowledgements come: the first is there 3 * 410 + 210 after the start.
    """
    how = {"window_bytes": 10_000, "segment_bytes": 100, "ack_delay_ns": 190}
    assert one_message(1000, start_segments=1, **how).time_ns == 3 * 410 + 210 + 200
    assert one_message(1000, start_segments=10, **how).time_ns == 210 + 900
    assert one_message(1000, **how).time_ns == 210 + 900


def test_a_window_grows_no_further_than_the_receivers():
    """From one segment to two, of the receiver's window of 200: then pairs as with a fixed one, a round trip later."""
    how = {"window_bytes": 200, "segment_bytes": 100, "ack_delay_ns": 190}
    fixed = one_message(800, **how).time_ns
    assert fixed == 210 + 100 + 3 * 410
    assert one_message(900, start_segments=1, **how).time_ns == fixed + 410


def test_a_loss_halves_what_a_window_may_double_to():
    """Rank 1's segment and the first of rank 2's five meet at 105 at a port with room for one; the latter is lost.

    Rank 2's window of three falls to one segment, and may double to two. Its second and third segment are acknowledged
    at 510 (two may be under way, as many as are) and 610 (two and a half: the fourth leaves), the fourth at 1020 (2.9:
    the fifth leaves). The lost one leaves after that, at 1120 in place of 1105, and is there 210 later. A fixed window
    of three sends the fourth and fifth at 510 and 610, and the lost one at 1105.
    """
    both = exchange({(1, 0): 100, (2, 0): 500}, 4)
    how = {"ack_delay_ns": 190, "segment_bytes": 100, "buffer_bytes": 199, "timeout_ns": 1000}
    where = topology("switch:4", latency=5)
    own = play([both], where, tcp=Tcp(1000, start_segments=3, **how))
    assert (own.lost, own.time_ns) == (1, 1330)
    fixed = play([both], where, tcp=Tcp(300, **how))
    assert (fixed.lost, fixed.time_ns) == (1, 1315)


def test_incast_is_lost_at_a_full_port_and_sent_again():
    """Ranks 1 and 2 send 100 bytes to rank 0; the switch has room for 100.

    Both are at the switch at 105; one fits (there at 210), the other is lost, and leaves again at 105 + 1000:
    1105-1205, at the switch 1210, there at 1315.
    """
    both = exchange({(1, 0): 100, (2, 0): 100}, 4)
    where = topology("switch:4", latency=5)
    small = play([both], where, tcp=Tcp(1000, buffer_bytes=199, timeout_ns=1000))
    assert finish(small, "exchange")[0] == 1315 and small.lost == 1
    # With room for both the second one waits: 205-305, there at 310.
    large = play([both], where, tcp=Tcp(1000, buffer_bytes=200, timeout_ns=1000))
    assert finish(large, "exchange")[0] == 310 and large.lost == 0


def test_the_ports_of_a_switch_share_its_buffer_and_other_switches_have_their_own():
    """Both ports are free, but the buffer has room for one of two segments that come at once: 1 to 0, and 0 to 1.

    Each node of 2 by itself: as many segments, but in two switches.
    """
    both = exchange({(1, 0): 100, (0, 1): 100}, 2)
    how = {"tcp": Tcp(1000, buffer_bytes=150, timeout_ns=1000)}
    result = play([both], topology("switch:2", latency=5), **how)
    assert sorted(finish(result, "exchange")) == [210, 1315] and result.lost == 1
    assert result.refused.startswith("TCP loses segments")
    apart = exchange({(1, 0): 100, (2, 3): 100}, 4)
    assert play([apart], topology("switch:2,switch:2", latency=5), **how).lost == 0


def test_a_buffer_is_free_again_when_its_port_has_sent():
    """Segments of 100 from 1 to 0 come at 105 and 205, when the first has left: room for one is enough."""
    where = topology("switch:4", latency=5)
    result = play([exchange({(1, 0): 200}, 4)], where, tcp=Tcp(1000, segment_bytes=100, buffer_bytes=100))
    assert (result.lost, result.time_ns) == (0, 310)


def test_messages_of_a_pair_share_a_window():
    """Two all-to-alls at once between two ranks: their segments of 100 take turns behind one window of 100."""
    where = topology("switch:2", latency=5)
    steps = [exchange({(0, 1): 100, (1, 0): 100}, 2, name) for name in ("a", "b")]
    for shortcut in ("auto", "never"):
        result = play(steps, where, shortcut, tcp=Tcp(100))
        assert bool(result.shortcut) == (shortcut == "auto")
        assert finish(result, "a")[0] == 210 and finish(result, "b")[0] == 210 + 10 + 210


PAIRS = [("all_reduce", "ring"), ("all_reduce", "direct"), ("all_reduce", "halving_doubling"), ("all_to_all", "direct")]


@given(
    st.sampled_from(PAIRS),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 10**5),
    st.integers(1, 4),
    st.sampled_from([300, 1000, 4000]),
    st.sampled_from([10**3, 10**4, 10**6]),
)
def test_one_rank_stands_for_all_here_too(pair, n, size, chunks, window, buffer):
    how = {"latency": 20, "chunks": chunks, "tcp": Tcp(window, 30, buffer * n, 250, 5000)}
    whole = collective(*pair, f"switch:{n}", size, shortcut="never", **how)
    short = collective(*pair, f"switch:{n}", size, **how)
    assert (whole.finished == short.finished).all()
    assert whole.lost == short.lost and bool(short.shortcut) == (whole.lost == 0)
    # Nothing is lost where the buffer holds all that the windows let out.
    if buffer * n >= n * (n - 1) * window:
        assert whole.lost == 0


@given(st.sampled_from([*PAIRS, ("all_reduce", "double_binary_tree")]), st.integers(1, 10**5), st.integers(1, 4))
def test_every_byte_arrives_whatever_is_lost(pair, size, chunks):
    """What a downlink carries is what arrives; uplinks carry it as often as it was sent."""
    ideal = collective(*pair, "switch:4", size, shortcut="never", chunks=chunks)
    tcp = collective(*pair, "switch:4", size, shortcut="never", chunks=chunks, tcp=Tcp(2000, 0, 1100, 500, 3000))
    for link, carried in ideal.bytes_on.items():
        if link % 2:
            assert tcp.bytes_on[link] == pytest.approx(carried)
        else:
            assert tcp.bytes_on[link] >= carried * (1 - 1e-9)


@pytest.mark.parametrize(
    "tcp, why",
    [
        ({"window_bytes": 0}, "must be above 0"),
        ({"window_bytes": 100, "buffer_bytes": 50}, "never holds a segment of 100"),
    ],
)
def test_what_could_never_send_is_refused(tcp, why):
    with pytest.raises(ConfigError, match=why):
        one_message(100, **tcp)


@pytest.mark.parametrize(
    "window, buffer, tree, incast",
    [
        (5e5, 1e9, (37633664.0, 0, 3700), (5126045.375, 0, 188)),
        (5e5, 1e6, (65090928.0, 325, 4377), (5886536.375, 40, 269)),
        (1e5, 1e9, (39096651.047472, 0, 5063), (5091954.36363, 0, 292)),
        (3e5, 3e5, (142506196.0, 739, 5289), (14769041.25, 72, 345)),
    ],
)
def test_times_losses_and_events_stay_what_they_were(window, buffer, tree, incast):
    """Golden values, to a tick: making the transport faster may change none of them."""
    tcp = Tcp(window, 1000, buffer, 2.0**17, 1e6, start_segments=1)
    whole = collective("all_reduce", "double_binary_tree", "switch:16", 2**23, latency=500, chunks=4, tcp=tcp)
    assert (whole.time_ns, whole.lost, whole.events) == tree
    steps = [exchange({(i, i % 3): 1e6 + i for i in range(3, 16)}, 16)]
    whole = play(steps, topology("switch:16", latency=500), tcp=tcp)
    assert (whole.time_ns, whole.lost, whole.events) == incast
