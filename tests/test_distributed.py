"""What a process is told of its place, and what it concludes from what its peers post."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.errors import ConfigError
from recjax.parallel import distributed, watchdog
from recjax.train import preflight
from recjax.utils.lazy_arrays import Runs, as_lazy, joined

TOLD = {"RECJAX_COORDINATOR": "node1:7777", "RECJAX_PROCESSES": "4", "RECJAX_PROCESS": "2"}


def test_the_environment_says_who_a_process_is():
    assert distributed.place({}) is None
    assert distributed.place(TOLD | {"RECJAX_PROCESSES": "1", "RECJAX_PROCESS": "0"}) is None
    place = distributed.place(TOLD)
    assert place == distributed.Place("node1:7777", 4, 2, "node1:7777", None, None, 60.0)
    place = distributed.place(TOLD | {"RECJAX_BIND": "0.0.0.0:1", "RECJAX_LOCAL_DEVICES": "0,3", "RECJAX_LIMIT_S": "9"})
    assert (place.bind, place.local_devices, place.limit_s) == ("0.0.0.0:1", (0, 3), 9)
    assert distributed.place({"RECJAX_CLUSTER": "slurm"}).cluster == "slurm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RECJAX_PROCESS": ""}, "RECJAX_COORDINATOR and RECJAX_PROCESSES without RECJAX_PROCESS"),
        ({"RECJAX_PROCESS": "4"}, "numbered from 0 to 3"),
        ({"RECJAX_PROCESS": "two"}, "RECJAX_PROCESS='two' is no whole number"),
        ({"RECJAX_COORDINATOR": "node1"}, "Write HOST:PORT"),
        ({"RECJAX_BIND": "node1:99999"}, "RECJAX_BIND='node1:99999' is no address"),
        ({"RECJAX_CLUSTER": "slurm"}, "Unset the one or the other"),
        ({"RECJAX_CLUSTER": "openmpi"} | dict.fromkeys(TOLD, ""), "may be auto, slurm, ompi, mpi4py, gketpu or gcetpu"),
        ({"RECJAX_LIMIT_S": "1"}, "give at least 5"),
        ({"RECJAX_LOCAL_DEVICES": "all"}, "numbers such as 0,1"),
    ],
)
def test_mistakes_in_it_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        distributed.place(TOLD | change)


class Peers:
    """Watches over records that the test writes; this process is number 0."""

    def __init__(self, limit_s=60.0):
        self.watch = watchdog.Watch.__new__(watchdog.Watch)
        self.watch._phase, self.watch._moves, self.watch._limit_s, self.watch._seen = "wait", 0, limit_s, {}

    def judge(self, now, **phases):
        """`phases`: p1="input:3" is process 1 in phase input, which changed 3 times; a "-" ahead: its beat stands."""
        records = {}
        for k, text in enumerate(phases.values()):
            phase, _, moves = text.lstrip("-!").partition(":")
            failed = "its disk is full" if text.startswith("!") else ""
            beat = 0.0 if text.startswith("-") else now
            records[k] = {"phase": phase, "moves": int(moves or 0), "beat": beat, "failed": failed, "where": f"h{k}"}
        return self.watch.judge(records, now)


def test_a_peer_without_a_beat_is_lost_after_half_the_limit():
    peers = Peers()
    assert peers.judge(0, p0="wait:1", p1="-input:1") == ""
    assert peers.judge(29, p0="wait:2", p1="-input:1") == ""
    assert "process 1 (h1) was last heard of 31 s ago, in phase input" in peers.judge(31, p0="wait:3", p1="-input:1")


def test_where_a_collective_broke_off_a_few_missed_beats_tell_whose_end_it_was():
    peers = Peers()
    assert peers.judge(0, p0="wait:1", p1="-input:1", p2="wait:1") == ""
    assert peers.judge(5, p0="wait:1", p1="-input:1", p2="wait:1") == ""
    peers.watch._phase = "lost"
    assert "process 1 (h1) was last heard of 6 s ago" in peers.judge(6, p0="lost:2", p1="-input:1", p2="wait:1")
    peers = Peers()
    peers.watch._phase = "lost"
    assert peers.judge(0, p0="lost:1", p1="-input:1") == peers.judge(4, p0="lost:1", p1="-input:1") == ""
    assert "process 1 (h1) was last heard of 5 s ago" in peers.judge(5, p0="lost:1", p1="-input:1")


def test_a_failed_or_finished_peer_ends_this_process():
    assert "process 1 (h1) failed in phase checkpoint: its disk is full" in Peers().judge(
        0, p0="wait", p1="!checkpoint"
    )
    peers = Peers()
    assert peers.judge(0, p0="wait:1", p1="done") == ""
    assert "process 1 (h1) has ended while this one still works" in peers.judge(31, p0="wait:2", p1="done")


def test_one_that_works_alone_may_take_as_long_as_its_phase():
    peers = Peers()
    for now in range(0, 60 * 30, 10):  # compiling, say: the other waits
        assert peers.judge(now, p0="wait:1", p1="dispatch:1") == ""
    assert "process 1 (h1) has been in phase dispatch for 1810 s" in peers.judge(1810, p0="wait:1", p1="dispatch:1")
    peers = Peers()
    assert peers.judge(0, p0="wait:1", p1="input:1") == ""
    assert "process 1 (h1) has been in phase input for 61 s" in peers.judge(61, p0="wait:1", p1="input:1")


def test_all_that_wait_for_each_other_end_after_the_limit():
    peers = Peers()
    assert peers.judge(0, p0="wait:1", p1="wait:1") == ""
    assert peers.judge(50, p0="wait:1", p1="wait:2") == ""
    assert peers.judge(109, p0="wait:1", p1="wait:2") == ""
    assert "no process has moved for 61 s: 0 in wait, 1 in wait" in peers.judge(111, p0="wait:1", p1="wait:2")


def test_what_a_program_does_between_its_runs_is_its_own_affair():
    peers = Peers()
    assert peers.judge(0, p0="wait:1", p1="outside:1") == ""
    assert peers.judge(9999, p0="wait:1", p1="outside:1") == ""
    assert peers.judge(10_000, p0="wait:1", p1="-outside:1") == ""
    assert "process 1 (h1) was last heard of 31 s ago" in peers.judge(10_031, p0="wait:1", p1="-outside:1")
    peers.watch._phase = "outside"
    assert peers.judge(10_040, p0="outside:2", p1="-outside:1") == ""
    assert peers.judge(10_041, p0="outside:2", p1="!wait:1") == ""


def test_facts_that_differ_stand_side_by_side():
    found = {0: {"jax": "0.10.2", "data": "ab"}, 1: {"jax": "0.12.0", "data": "ab"}, 2: {"jax": "0.10.2"}}
    assert preflight.differences(found) == {
        "jax": {"0.10.2": [0, 2], "0.12.0": [1]},
        "data": {"ab": [0, 1], "nothing": [2]},
    }


@given(st.data())
def test_an_array_is_read_from_scattered_rows(data):
    """Each range of columns has its own owners of the rows: of some a rectangle, of the others whatever is left."""
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    cut = data.draw(st.integers(0, columns))
    pieces = []
    for first, last in {(0, cut), (cut, columns)} - {(0, 0), (columns, columns)}:
        owners = np.array(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
        for owner in set(owners.tolist()):
            own = np.flatnonzero(owners == owner)
            breaks = np.flatnonzero(np.diff(own) > 1) + 1
            runs = np.array([(run[0], run[-1] + 1) for run in np.split(own, breaks)])
            at = (int(own[0]), first) if len(runs) == 1 and data.draw(st.booleans()) else Runs(runs, (first,))
            pieces.append((at, as_lazy(whole[own, first:last])))
    array = joined(whole.shape, whole.dtype, pieces)
    np.testing.assert_array_equal(array.load(), whole)
    spans = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in whole.shape]
    index = tuple(slice(*span) for span in spans)
    np.testing.assert_array_equal(array.read(index), whole[index])
    with pytest.raises(ValueError, match="do not make up"):
        joined(whole.shape, whole.dtype, pieces[1:])


def test_scattered_rows_that_another_piece_has_are_refused():
    """As many values as there are, but row 2 twice and row 3 not at all; or a piece of more rows than its runs."""
    whole = np.arange(8.0).reshape(4, 2)
    first = Runs(np.array([[0, 1], [2, 3]]), (0,)), as_lazy(whole[[0, 2]])
    good = Runs(np.array([[1, 2], [3, 4]]), (0,)), as_lazy(whole[[1, 3]])
    np.testing.assert_array_equal(joined((4, 2), whole.dtype, [first, good]).load(), whole)
    for wrong in (
        [first, (Runs(np.array([[1, 3]]), (0,)), as_lazy(whole[1:3]))],
        [first, ((1, 0), as_lazy(whole[1:3]))],
        [(Runs(np.array([[0, 1]]), (0,)), as_lazy(whole[[0, 2]])), good],
    ):
        with pytest.raises(ValueError, match="do not make up"):
            joined((4, 2), whole.dtype, wrong)


def test_peers_end_with_the_status_of_one_that_a_signal_stopped():
    peers = Peers()
    records = {k: {"phase": "start", "moves": 0, "beat": 1.0, "failed": "", "where": f"h{k}"} for k in range(3)}
    assert watchdog._status(records) == watchdog.LOST
    records[1] |= {"failed": "stopped by SIGTERM", "status": 143}
    assert "process 1 (h1) was stopped in phase start: stopped by SIGTERM" in peers.watch.judge(records, 0)
    assert watchdog._status(records) == 143
    records[2] |= {"failed": "its disk is full", "status": watchdog.LOST}
    assert watchdog._status(records) == watchdog.LOST


class Store:
    """The store of three processes, of which this is the first; each parts so many looks later."""

    def __init__(self, monkeypatch, **looks):
        self.looks, self.said = looks, {k: json.dumps({"parts": False}) for k in looks}
        monkeypatch.setattr(distributed, "post", self.post)
        monkeypatch.setattr(distributed, "posted", self.posted)
        monkeypatch.setattr(distributed, "processes", lambda: 1 + len(looks))

    def post(self, key, value):
        self.said[key.removeprefix("watch/")] = value

    def posted(self, folder):
        self.looks = {k: looks - 1 for k, looks in self.looks.items()}
        return self.said | {k: json.dumps({"parts": True}) for k, looks in self.looks.items() if looks < 0}


@pytest.fixture
def watch(monkeypatch):
    """That of process 0, whose clock goes only while it sleeps; an exit raises SystemExit."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s), time=lambda: now[0])
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.os, "_exit", sys.exit)
    watch = watchdog.Watch.__new__(watchdog.Watch)
    watch._phase, watch._moves, watch._failed, watch._status = "input", 3, "", watchdog.LOST
    watch._parts, watch._joined, watch._limit_s, watch._seen = False, True, 60.0, {}
    watch._pipe, watch._ends, watch._lock = None, None, threading.RLock()
    return watch


@pytest.mark.parametrize(("looks", "stays"), [(3, False), (10**9, True)])
@pytest.mark.parametrize("how", ["after an error", "for a peer", "by a signal"])
def test_process_0_stays_until_all_have_parted_but_not_for_ever(how, looks, stays, watch, monkeypatch):
    store = Store(monkeypatch, **{"1": 1, "2": looks})
    if how == "for a peer":
        with pytest.raises(SystemExit, match="143"):
            watch.end("process 1 was stopped", 143)
    else:
        watch.part(143, "stopped by SIGTERM" if how == "by a signal" else "")
    record = json.loads(store.said["0"])
    assert record["parts"]
    assert (record["failed"], record["status"]) == (
        ("stopped by SIGTERM", 143) if how == "by a signal" else ("", watchdog.LOST)
    )
    assert (watchdog.time.monotonic() >= watchdog._LAST_WORDS_S) == stays and (stays or store.looks["2"] == -1)


def test_process_0_does_not_wait_for_a_lost_one(watch, monkeypatch):
    store = Store(monkeypatch, **{"1": 3, "2": 10**9})
    watch._seen = {k: ({}, beat_at, 0.0) for k, beat_at in ((0, 0.0), (1, -29.0), (2, -31.0))}
    watch.part(4)
    assert store.looks["1"] == -1 and watchdog.time.monotonic() < watchdog._LAST_WORDS_S


def test_a_store_that_does_not_answer_keeps_nobody(watch, monkeypatch):
    monkeypatch.setattr(watchdog, "_LAST_WORDS_S", 0.1)
    answer, answered = threading.Event(), []
    monkeypatch.setattr(distributed, "post", lambda key, value: answered.append(answer.wait(5)))
    watch.part(4)
    assert watch._parts and not answered
    answer.set()


def test_a_broken_collective_is_not_explained_twice(watch, capsys):
    """The other thread holds the lock while it ends the process, and does not give it back."""
    watch._joined = False
    with ThreadPoolExecutor(1) as main:
        with watch._lock:
            ends = main.submit(watch._explain, RuntimeError("connection reset"))
            with pytest.raises(TimeoutError):
                ends.result(0.3)
            assert capsys.readouterr().err == ""
        assert isinstance(ends.exception(), SystemExit)
    said = capsys.readouterr().err
    assert "RuntimeError: connection reset" in said and "all of them still answer" in said


@pytest.mark.parametrize(
    ("error", "is_a_peers"),
    [
        (RuntimeError("connection reset"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:6040: Connection reset by peer"), True),
        (ValueError("the batch has no rows"), False),
        (NotImplementedError("no such thing"), False),
    ],
)
def test_an_error_of_a_collective_that_broke_off_waits_for_its_culprit(error, is_a_peers, watch, monkeypatch, capsys):
    """JAX raises one of two classes for it; such an error ends the process as a lost peer does."""
    Store(monkeypatch)
    with pytest.raises(SystemExit if is_a_peers else type(error)) as ends, watch.reporting():
        raise error
    assert not is_a_peers or ends.value.code == watchdog.LOST
