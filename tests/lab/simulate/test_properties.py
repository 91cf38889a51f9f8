"""What holds of every collective on every network, over random ones."""

import heapq
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.simulating import collective, exchange, play, topology

from recjax.lab.simulate.collectives import ALGORITHMS, Schedule, Send
from recjax.lab.simulate.engine import Engine, Run
from recjax.lab.simulate.lower import Network, Quotient
from recjax.lab.simulate.topology import Topology

PAIRS = [(name, algorithm) for name, found in ALGORITHMS.items() for algorithm in found]
KINDS = ("ring", "fully_connected", "switch")
pair = st.sampled_from(PAIRS)
kind = st.sampled_from(KINDS)
# Powers of two, so that halving-doubling may come up.
flat = st.builds("{}:{}".format, kind, st.sampled_from([2, 4, 8]))
deep = st.builds("{}:{},{}:{}".format, kind, st.sampled_from([2, 4]), kind, st.sampled_from([2, 4]))
networks = st.one_of(flat, deep)
sizes = st.integers(1, 10**7)
latencies = st.integers(0, 3000)
chunks = st.integers(1, 5)


def ranks_of(text):
    return math.prod(int(part.split(":")[1]) for part in text.split(","))


@given(pair, networks, sizes, latencies, chunks, st.integers(1, 8), st.integers(0, 100))
def test_one_rank_for_all_gives_what_all_ranks_give(pair, text, size, latency, chunks, in_flight, delay):
    """Where the shortcut is taken: times of every rank, bytes on every link, to the last bit."""
    how = {"latency": latency, "chunks": chunks, "in_flight": in_flight, "endpoint_delay_ns": delay}
    short = collective(*pair, text, size, **how)
    assume(short.shortcut)
    whole = collective(*pair, text, size, shortcut="never", **how)
    assert not whole.shortcut
    for name in ("ready", "started", "finished", "waited"):
        assert (getattr(whole, name) == getattr(short, name)).all()
    assert sorted(np.repeat(list(short.bytes_on.values()), ranks_of(text))) == sorted(whole.bytes_on.values())


def play_schedule(network, schedule, runs, endpoint=0):
    """Ends of each run on each actor, in ticks; several at once, so that they meet."""
    ends = np.zeros((runs, network.actors), int)
    program = network.program(schedule, np.arange(network.topology.size)[None], 1000)
    engine = Engine(network, endpoint, 0)
    label = 0
    for number in range(runs):
        run = Run(program, label, network.actors, ends[number].__setitem__)
        label += run.labels
        for actor in range(network.actors):
            engine.begin(run, actor)
    engine.play()
    return ends


@given(
    st.sampled_from(["fully_connected:3,switch:4", "switch:3,ring:3", "fully_connected:2,ring:3"]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_one_rank_for_all_where_messages_meet_at_the_same_moment(text, seed, runs):
    """Random steps of rotations, with few sizes, so that messages from different ranks tie at links."""
    rng = np.random.default_rng(seed)
    where = topology(text)
    coordinates = np.array(np.unravel_index(np.arange(where.size), where.shape[::-1]))[::-1]  # [dims, ranks]
    steps = []
    for _ in range(rng.integers(1, 4)):
        sends = []
        for _ in range(rng.integers(1, 7)):
            offset = np.unravel_index(rng.integers(1, where.size), where.shape)
            moved = (coordinates + np.array(offset)[:, None]) % np.array(where.shape)[:, None]
            to = np.ravel_multi_index(moved[::-1], where.shape[::-1])
            sends.append(Send(to, rng.integers(1, 4) / 10))
        steps.append(tuple(sends))
    schedule = Schedule(tuple(steps))
    whole = play_schedule(Network(where), schedule, runs)
    assert (whole == play_schedule(Quotient(where), schedule, runs)).all()


@given(pair, flat, sizes, latencies, chunks)
def test_symmetric_networks_give_symmetric_times(pair, text, size, latency, chunks):
    """All but trees do the same on every rank of a symmetric network; halving-doubling does not on a ring."""
    name, algorithm = pair
    assume(name not in ("broadcast", "reduce") and pair != ("send_recv", "direct"))  # whose root does something else
    assume(algorithm != "double_binary_tree" and not (algorithm == "halving_doubling" and text.startswith("ring")))
    result = collective(name, algorithm, text, size, latency=latency, chunks=chunks, shortcut="never")
    assert len(set(result.finished[0].tolist())) == 1
    assert collective(name, algorithm, text, size, shortcut="always").shortcut


@given(pair, st.sampled_from(["ring:1", "switch:1", "fully_connected:1", "ring:1,switch:1"]), sizes, latencies, chunks)
def test_one_rank_is_free(pair, text, size, latency, chunks):
    result = collective(*pair, text, size, latency=latency, chunks=chunks, endpoint_delay_ns=10)
    assert result.time_ns == 0 and not result.bytes_on


@given(pair, networks, sizes, latencies, chunks, st.integers(2, 10))
def test_more_bandwidth_is_never_slower(pair, text, size, latency, chunks, faster):
    slow = collective(*pair, text, size, latency=latency, chunks=chunks)
    fast = collective(*pair, text, size, latency=latency, chunks=chunks, bandwidth=1e9 * faster)
    assert fast.time_ns <= slow.time_ns


# Sizes that N and the chunks divide: a message's time is rounded to a femtosecond, and here there is nothing to round.
@given(pair, networks, st.integers(1, 2500).map(lambda k: k * 3840), latencies, chunks)
def test_no_time_is_below_what_the_busiest_link_needs_nor_below_the_analytical_one(pair, text, size, latency, chunks):
    result = collective(*pair, text, size, latency=latency, chunks=chunks)
    assert result.time_ns >= max(result.bytes_on.values())
    free = collective(*pair, text, size, latency=latency, chunks=chunks, congestion=False)
    assert free.time_ns <= result.time_ns
    assert free.bytes_on == pytest.approx(result.bytes_on)


def hops(text, a, b):
    """How many links lie between two ranks."""
    count = 0
    for part in text.split(","):
        name, n = part.split(":")[0], int(part.split(":")[1])
        x, y, a, b = a % n, b % n, a // n, b // n
        away = abs(x - y)
        count += {"ring": min(away, n - away), "switch": 2 * (x != y), "fully_connected": int(x != y)}[name]
    return count


@given(networks, st.data(), chunks)
def test_bytes_are_conserved_on_the_links(text, data, chunks):
    """Random sizes between all pairs: the bytes on all links are those of each message times its hops."""
    n = ranks_of(text)
    sent = {(i, j): data.draw(st.integers(0, 1000)) for i in range(n) for j in range(n) if i != j}
    where = topology(text)
    result = play([exchange(sent, n)], where, "never", chunks=chunks)
    assert sum(result.bytes_on.values()) == pytest.approx(sum(s * hops(text, *pair) for pair, s in sent.items()))
    # Through the links at a rank goes what it sends (and, in a ring, what passes by).
    if text.startswith("switch") and "," not in text:
        for rank in range(n):
            out, into = (sum(s for pair, s in sent.items() if pair[end] == rank) for end in (0, 1))
            assert result.bytes_on.get(2 * rank, 0) == pytest.approx(out)
            assert result.bytes_on.get(2 * rank + 1, 0) == pytest.approx(into)


@given(pair, st.sampled_from([2, 4, 8, 16]), sizes, st.sampled_from([2, 4]))
def test_every_rank_sends_at_least_what_the_collective_needs(pair, n, size, chunks):
    """All-reduce 2 (N-1)/N M, the others (N-1)/N M; the least is met exactly but by the ring all-to-all.

    A tree sends as much over all ranks, but its leaves less and its inner ranks more; so does a broadcast, or a reduce.
    A message is sent by one rank, or in a ring by each.
    """
    name, algorithm = pair
    result = collective(name, algorithm, f"fully_connected:{n}", size, shortcut="never", chunks=chunks)
    least = (2 if name == "all_reduce" else 1) * (n - 1) / n * size
    sent = [sum(result.bytes_on.get(n * rank + to, 0) for to in range(n)) for rank in range(n)]
    if algorithm == "double_binary_tree" or name in ("broadcast", "reduce"):
        assert sum(sent) == pytest.approx(n * least)
    elif name == "send_recv":
        assert sent == pytest.approx([size * (algorithm == "ring" or rank == 0) for rank in range(n)])
    elif pair == ("all_to_all", "ring"):
        assert sent == pytest.approx([n * (n - 1) / 2 * size / n] * n)
    else:
        assert sent == pytest.approx([least] * n)


# --- an independent player of schedules ---


def by_hand(network: Topology, schedule: Schedule, groups, size_bytes, endpoint):
    """Times at which the ranks are done, from a plain queue of all hops and all arrivals; in whole ns."""
    n = network.size
    bandwidth, latency = network.per_link()
    free = [0.0] * network.links
    step_of, ends = [-1] * n, [None] * n
    got: dict[Any, int] = {}
    queue: list[Any] = []
    for rank in range(n):
        heapq.heappush(queue, (endpoint if schedule.starts_with_delay else 0.0, 0, rank, ()))
    while queue:
        time, what, rank, more = heapq.heappop(queue)
        if what == 1:  # a message at a link
            step, number, route, bytes_, target = more
            link, *rest = route
            free[link] = max(free[link], time) + bytes_ / bandwidth[link] * 1e9
            there = free[link] + latency[link]
            if rest:
                heapq.heappush(queue, (there, 1, rank, (step, number, tuple(rest), bytes_, target)))
            else:
                heapq.heappush(queue, (there + endpoint, 2, target, step))
            continue
        if what == 2:
            got[rank, more] = got.get((rank, more), 0) + 1
        while ends[rank] is None:
            step = step_of[rank]
            if step >= 0 and got.get((rank, step), 0) < sum(int((s.to == rank).sum()) for s in schedule.steps[step]):
                break
            step_of[rank] = step = step + 1
            if step == len(schedule.steps):
                ends[rank] = time
                break
            for number, send in enumerate(schedule.steps[step]):
                target = int(send.to[rank])
                if target >= 0:
                    route = network.routes(np.array([rank]), np.array([target]))[:, 0]
                    share = float(np.broadcast_to(send.share, n)[rank])
                    route = tuple(int(link) for link in route if link >= 0)
                    heapq.heappush(queue, (time, 1, rank, (step, number, route, share * size_bytes, target)))
    return ends


@settings(max_examples=60)
@given(networks, st.integers(0, 2**32 - 1), latencies, st.integers(0, 50))
def test_the_engine_agrees_with_a_plain_queue_of_events(text, seed, latency, endpoint):
    """Random schedules: some ranks send, some do not, every message of another size (so that no two meet exactly)."""
    rng = np.random.default_rng(seed)
    where = topology(text, latency=latency)
    n = where.size
    steps = []
    for _ in range(rng.integers(1, 5)):
        sends = []
        for _ in range(rng.integers(1, 4)):
            to = rng.integers(0, n, n)
            to = np.where((rng.random(n) < 0.3) | (to == np.arange(n)), -1, to)
            sends.append(Send(to, rng.random(n)))
        steps.append(tuple(sends))
    schedule = Schedule(tuple(steps), bool(rng.random() < 0.5))
    groups = np.arange(n)[None]
    network = Network(where)
    engine = Engine(network, endpoint * 10**6, 0)
    ends = [0] * n
    run = Run(network.program(schedule, groups, 10_000), 0, n, lambda rank, time: ends.__setitem__(rank, time))
    for rank in range(n):
        engine.begin(run, rank)
    engine.play()
    assert np.array(ends) / 1e6 == pytest.approx(by_hand(where, schedule, groups, 10_000, endpoint), abs=0.01)
