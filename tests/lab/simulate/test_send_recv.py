"""Messages between two ranks against closed forms: alone, in a pipeline, and from traces of both ends."""

import itertools

import pytest
from support.commands import assert_refused, inside
from support.simulating import GIB, collective, finish, play, topology, write_trace

from recjax.errors import ConfigError, DataError
from recjax.lab.formats import chakra_protobuf, recjax_json
from recjax.lab.formats.trace import Event
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import System
from recjax.lab.simulate.tcp import Tcp
from recjax.lab.simulate.workload import Operation
from recjax.lab.trace.workload import read_workload

ALPHA, E, BANDWIDTH = 500.0, 10.0, 50 * GIB


def near(expected):
    return pytest.approx(expected, abs=1, rel=0)


@pytest.mark.parametrize("n, size", list(itertools.product((2, 5, 8), (4096, 100_000_000))))
def test_one_message(n, size):
    """Over one link alpha + M/B, through a switch twice that; the endpoint delay before it leaves and at its end."""
    how = {"bandwidth": BANDWIDTH, "latency": ALPHA, "endpoint_delay_ns": E}
    hop = ALPHA + size / BANDWIDTH * 1e9
    assert collective("send_recv", "direct", f"fully_connected:{n}", size, **how).time_ns == near(hop + 2 * E)
    through = collective("send_recv", "direct", f"switch:{n}", size, **how)
    assert through.time_ns == near(2 * hop + 2 * E) and sum(through.bytes_on.values()) == 2 * size
    assert collective("send_recv", "direct", f"switch:{n}", size, congestion=False, **how).time_ns == near(
        hop + ALPHA + 2 * E
    )


@pytest.mark.parametrize("shortcut", ["always", "never"])
def test_every_rank_to_the_next_at_once(shortcut):
    """Ports are full duplex, so all take the time of one; of 4 chunks each link passes one behind the other."""
    assert collective("send_recv", "ring", "switch:8", 4000, latency=300.0, shortcut=shortcut).time_ns == 2 * 4300
    assert collective("send_recv", "ring", "switch:8", 4000, chunks=4, shortcut=shortcut).time_ns == (4 + 1) * 1000


def test_a_window_bounds_a_message():
    """Eight segments of 1000 bytes over a link of 300 ns: a segment is acknowledged 1600 ns after it left."""
    tcp = Tcp(window_bytes=2000, segment_bytes=1000)
    found = collective("send_recv", "direct", "fully_connected:2", 8000, latency=300.0, tcp=tcp).time_ns
    assert found == 8 * 1000 + 300  # a window of 2000 is more than goes in a round trip
    narrow = Tcp(window_bytes=1000, segment_bytes=1000)
    found = collective("send_recv", "direct", "fully_connected:2", 8000, latency=300.0, tcp=narrow).time_ns
    assert found == 7 * 1600 + 1300  # a round trip for each but the last


def message(number, source, target, size, *after):
    return Operation(
        f"{number}: {source} to {target}",
        "collective",
        collective="send_recv",
        bytes=size,
        ranks=((source, target),),
        depends_on=after,
    )


@pytest.mark.parametrize("stages, batches", [(2, 1), (4, 1), (4, 6), (3, 8)])
def test_a_pipeline(stages, batches):
    """Forward passes of 700 ns with messages of 400 ns between stages: (p-1) (t + c) + m t, for messages hide."""
    made = []
    for batch, stage in itertools.product(range(batches), range(stages)):
        after = (f"{batch}: {stage - 1} to {stage}",) if stage else ()
        made.append(Operation(f"{batch} on {stage}", "compute", 700.0, ranks=((stage,),), depends_on=after))
        if stage + 1 < stages:
            made.append(message(batch, stage, stage + 1, 400, f"{batch} on {stage}"))
    found = play(made, topology(f"fully_connected:{stages}"))
    assert found.time_ns == (stages - 1) * (700 + 400) + batches * 700


def test_pairs_of_one_operation_go_at_once_and_share_a_port_only_if_they_must():
    pairs = Operation("pairs", "collective", collective="send_recv", bytes=1000, ranks=((0, 1), (2, 3)))
    assert play([pairs], topology("switch:4")).time_ns == 2000
    to_one = [message(0, 0, 3, 1000), message(1, 1, 3, 1000), message(2, 2, 3, 1000)]
    assert play(to_one, topology("switch:4")).time_ns == 1000 + 3 * 1000  # three at the port of rank 3


def stream(rank, *events):
    """Events of a rank, each waiting for the one before; times in us, messages in bytes."""
    found = []
    for i, (kind, value, *peer) in enumerate(events):
        deps = (i - 1,) if i else ()
        if kind == "compute":
            found.append(Event(i, kind, start_ns=0, duration_ns=value * 1000, deps=deps))
        else:
            found.append(Event(i, kind, group=(rank, *peer), in_bytes=value, out_bytes=value, deps=deps, dtype="int8"))
    return tuple(found)


@pytest.mark.parametrize("format", [recjax_json, chakra_protobuf], ids=["recjax", "et"])
def test_a_trace_with_messages(tmp_path, format):
    """4000 bytes leave at 2 us and are there at 6, when the sender goes on; the receiver comes at 10, and needs 1.

    An all-reduce of both then takes twice 3 us from 11.
    """
    reduced = {"group": (0, 1), "in_bytes": 6000, "out_bytes": 6000, "dtype": "int8", "deps": (2,)}
    ranks = [
        stream(0, ("compute", 2), ("send", 4000, 1), ("compute", 3)),
        stream(1, ("compute", 10), ("recv", 4000, 0), ("compute", 1)),
    ]
    ranks = [(*events, Event(3, "all_reduce", **reduced)) for events in ranks]
    where = topology("fully_connected:2")
    found = simulate(read_workload(write_trace(tmp_path / "trace", format, ranks), where), where, System())
    assert finish(found, "message 1 of rank 0 to rank 1") == [6000, 10_000]
    assert finish(found, "2 compute of rank 0")[0] == 9000 and found.time_ns == 11_000 + 6000


def test_messages_of_a_pair_are_matched_in_order_and_both_ways(tmp_path):
    """A ball of 1000, 2000 and 3000 bytes goes to and fro between two ranks."""
    ranks = [
        stream(0, ("send", 1000, 1), ("recv", 2000, 1), ("send", 3000, 1)),
        stream(1, ("recv", 1000, 0), ("send", 2000, 0), ("recv", 3000, 0)),
    ]
    where = topology("fully_connected:2")
    found = simulate(read_workload(write_trace(tmp_path / "trace", recjax_json, ranks), where), where, System())
    assert found.time_ns == 6000 and finish(found, "message 2 of rank 0 to rank 1") == [6000, 6000]


def test_refusals(tmp_path):
    where = topology("fully_connected:2")
    alone = [stream(0, ("send", 1000, 1)), stream(1, ("compute", 1))]
    with pytest.raises(DataError, match="message 1 of rank 0 to rank 1 has no recv. Rank 1 lacks"):
        read_workload(write_trace(tmp_path / "alone", recjax_json, alone), where)
    crossed = [stream(0, ("send", 1000, 1), ("recv", 1000, 1)), stream(1, ("send", 1000, 0), ("recv", 1000, 0))]
    with pytest.raises(ConfigError, match="wait for each other"):
        read_workload(write_trace(tmp_path / "crossed", recjax_json, crossed), where)
    how = "simulate collective --collective send_recv --topology ring:2,ring:2 --bytes 1MB --bandwidth 1GB/s".split()
    assert_refused(inside(*how, "--algorithm", "hierarchical"), 2, "take direct or ring")
    assert "send_recv (direct) of 976.6 KiB on ring:2,ring:2, 1 chunk(s): 2.00 ms" in inside(*how).out
