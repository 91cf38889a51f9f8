"""Messages that meet on a link, worked out by hand. Bandwidth 1e9 bytes/s: a byte takes a nanosecond."""

import pytest
from support.simulating import exchange, finish, play, topology


def test_many_to_one_queues_at_the_downlink():
    """Ranks 1, 2, 3 send 100, 200, 300 bytes to rank 0 through a switch with latency 5.

    At the switch: 100+5, 200+5, 300+5. The downlink serves 105-205, 205-405, 405-705; the last is there at 705+5.
    """
    where = topology("switch:4", latency=5)
    result = play([exchange({(1, 0): 100, (2, 0): 200, (3, 0): 300}, 4)], where)
    assert finish(result, "exchange") == [710, 0, 0, 0]
    assert result.refused


def test_equal_messages_to_one_rank_are_served_one_by_one():
    """Three of 300: all at the switch at 305; the downlink serves until 305+900, the last is there at 1210."""
    where = topology("switch:4", latency=5)
    assert play([exchange({(i, 0): 300 for i in (1, 2, 3)}, 4)], where).time_ns == 1210


def test_transit_waits_for_a_ranks_own_message():
    """A ring of 4: 0 sends 100 bytes to 2, by way of 1 (ties go to the next); 1 sends 250 to 2. Latency 5.

    The link 1-2 is busy with rank 1's until 250. Rank 0's is at 1 at 105, waits, is served 250-350, there at 355.
    """
    where = topology("ring:4", latency=5)
    result = play([exchange({(0, 2): 100, (1, 2): 250}, 4)], where)
    assert finish(result, "exchange") == [0, 0, 355, 0]
    # If rank 1's is shorter than rank 0's first hop, nobody waits: 105-205, there at 210.
    assert finish(play([exchange({(0, 2): 100, (1, 2): 90}, 4)], where), "exchange")[2] == 210


def test_the_other_direction_is_another_link():
    """0 sends to 1, and 1 to 0, at the same time: full duplex."""
    where = topology("ring:4", latency=5)
    assert finish(play([exchange({(0, 1): 100, (1, 0): 100}, 4)], where), "exchange") == [105, 105, 0, 0]


def test_two_collectives_share_the_links():
    """Two ranks on a switch with latency 5 exchange 100 bytes and, issued with it but second, 400.

    Uplink 0-100 and 100-500. At the switch at 105 and 505; the downlinks serve 105-205 and 505-905; there at 210, 910.
    """
    where = topology("switch:2", latency=5)
    both = {(0, 1): 1, (1, 0): 1}
    operations = [exchange({k: 100 for k in both}, 2, "small"), exchange({k: 400 for k in both}, 2, "large")]
    for shortcut in ("auto", "never"):
        result = play(operations, where, shortcut)
        assert set(finish(result, "small")) == {210} and set(finish(result, "large")) == {910}
    # The other way round the small one waits: uplink 0-400, 400-500; downlinks 405-805, 805-905; there at 810 and 910.
    result = play(operations[::-1], where)
    assert set(finish(result, "large")) == {810} and set(finish(result, "small")) == {910}


@pytest.mark.parametrize(
    "size, end",
    [
        # 0 to 3 goes over 1: half the bandwidth and latency 10 inside the node: 0-200, at rank 1 at 210. Rank 1's own
        # has left its uplink by 100, and rank 3's downlink (105-205) too. Uplink 210-310, downlink 315-415, there 420.
        (100, 420),
        # At rank 1 at 90, while the uplink is busy until 100: 100-140. At the switch at 145, while the downlink is busy
        # with rank 1's own until 205: 205-245, there at 250.
        (40, 250),
    ],
)
def test_two_dimensions_meet_at_the_second(size, end):
    """fully_connected:2,switch:2: ranks 0, 1 are a node, 2, 3 another. 0 sends to 3; 1 sends 100 bytes to 3."""
    where = topology("fully_connected:2,switch:2", bandwidth=[0.5e9, 1e9], latency=[10, 5])
    result = play([exchange({(0, 3): size, (1, 3): 100}, 4)], where)
    assert finish(result, "exchange") == [0, 0, 0, end]
    # Bytes: rank 0's message crosses three links, rank 1's two.
    assert sum(result.bytes_on.values()) == 3 * size + 2 * 100


def test_a_tree_through_a_switch_waits_for_both_children():
    """Double binary tree of 4 ranks, one chunk of 100 bytes, latency 5: 0 - 2, and 2 has the children 1 and 3.

    Up: 1 and 3 send at once: at the switch at 105; rank 2's downlink serves 105-205 and 205-305: both there at 310.
    2 to 0: 310 + 2 * 105 = 520. Down: 0 to 2: 730. 2 to 1 and 3: uplink 730-830 and 830-930; downlinks 835-935 and
    935-1035: there at 940 and 1040.
    """
    from support.simulating import collective

    result = collective("all_reduce", "double_binary_tree", "switch:4", 100, latency=5)
    assert result.finished[0].tolist() == [520, 940, 730, 1040]
