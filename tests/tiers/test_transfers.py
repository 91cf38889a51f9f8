"""Many pieces of a file: what is there comes, and what goes is there, by the kernel's queue, by threads, or by both."""

import ctypes
import errno
import os
import threading

import numpy as np
import pytest

from recjax.tiers import transfers as module
from recjax.tiers.transfers import Transfers

pytestmark = pytest.mark.skipif(module._CALLS is None, reason="there are no such calls here")
UNIT = 4096


@pytest.fixture
def file(tmp_path):
    """600 units of random bytes: the content, and a descriptor around the page cache."""
    content = np.random.default_rng(0).integers(0, 256, (600, UNIT), np.uint8)
    content.tofile(tmp_path / "file")
    try:
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no reads around the page cache")
    yield content, descriptor
    os.close(descriptor)


@pytest.fixture
def reads():
    made = Transfers()
    yield made
    made.close()


def pieces_of(descriptor, units):
    """Pieces of one unit each, and the memory that they go to."""
    room = np.zeros((len(units) + 1) * UNIT, np.uint8)
    start = -room.ctypes.data % UNIT
    memory = room[start : start + len(units) * UNIT].reshape(-1, UNIT)
    address = memory.ctypes.data + UNIT * np.arange(len(units))
    columns = [np.full(len(units), descriptor), UNIT * np.asarray(units), np.full(len(units), UNIT), address]
    return np.stack(columns, axis=1).astype(np.int64), memory


def by_queue(monkeypatch):
    """Fails a test where anything is read by a plain call."""
    monkeypatch.setattr(module, "_plain", lambda *given: pytest.fail("by a plain call"))


@pytest.mark.parametrize("count", [2, 128, 129, 500])
def test_the_queue_reads_everything(file, reads, monkeypatch, count):
    """Also more than it holds at a time."""
    by_queue(monkeypatch)
    units = np.random.default_rng(count).integers(0, 600, count)
    pieces, memory = pieces_of(file[1], units)
    for _ in range(2):
        memory[:] = 0
        assert (reads.read(pieces, True) == UNIT).all()
        np.testing.assert_array_equal(memory, file[0][units])
    assert reads.queued


def test_threads_at_the_same_time(file, reads, monkeypatch):
    by_queue(monkeypatch)
    failed = []

    def work(seed):
        for turn in range(20):
            units = np.random.default_rng([seed, turn]).integers(0, 600, 90)
            pieces, memory = pieces_of(file[1], units)
            if not ((reads.read(pieces, True) == UNIT).all() and np.array_equal(memory, file[0][units])):
                failed.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class Calls:
    """The kernel's calls, of which those of one number end otherwise."""

    def __init__(self, monkeypatch, number, answer):
        """`answer` takes how often it was called, and what makes the true call."""
        self.count, true = 0, module._Queue._call

        def call(queue, which, *given):
            if which != number:
                return true(queue, which, *given)
            self.count += 1
            return answer(self.count, lambda *other: true(queue, which, *(other or given)), given)

        monkeypatch.setattr(module._Queue, "_call", call)


def failing(number):
    ctypes.set_errno(number)
    return -1


def test_a_kernel_without_queues(file, reads, monkeypatch):
    """Then threads read, and it is not asked a second time; where others have all queues just now, it is."""
    units = np.arange(0, 600, 7)
    for number, queued in ((errno.EAGAIN, True), (errno.ENOSYS, False)):
        calls = Calls(monkeypatch, module._CALLS[0], lambda count, true, given, number=number: failing(number))
        for _ in range(2):
            pieces, memory = pieces_of(file[1], units)
            assert (reads.read(pieces, True) == UNIT).all()
            np.testing.assert_array_equal(memory, file[0][units])
        assert reads.queued == queued and calls.count == (2 if queued else 1)


def test_a_queue_that_takes_a_few_at_a_time(file, reads, monkeypatch):
    by_queue(monkeypatch)
    units = np.arange(100)
    pieces, memory = pieces_of(file[1], units)

    calls = Calls(monkeypatch, module._CALLS[3], lambda count, true, given: true(given[0], min(3, given[1]), given[2]))
    assert (reads.read(pieces, True) == UNIT).all() and calls.count >= 100 / 3
    np.testing.assert_array_equal(memory, file[0][units])


def test_a_queue_that_takes_some_and_no_more(file, reads, monkeypatch):
    """The rest comes from threads, once what it took has come, one by one."""
    units = np.arange(100)
    pieces, memory = pieces_of(file[1], units)

    def once(count, true, given):
        return true(given[0], 40, given[2]) if count == 1 else failing(errno.EAGAIN)

    plain, by_threads = module._plain, []
    monkeypatch.setattr(
        module, "_plain", lambda code, p, got, some: (by_threads.append(len(some)), plain(code, p, got, some))
    )
    Calls(monkeypatch, module._CALLS[3], once)
    Calls(monkeypatch, module._CALLS[2], lambda count, true, given: true(given[0], 1, 1, *given[3:]))
    assert (reads.read(pieces, True) == UNIT).all() and sum(by_threads) == 60
    np.testing.assert_array_equal(memory, file[0][units])


def test_interrupted_waits_go_on(file, reads, monkeypatch):
    by_queue(monkeypatch)
    pieces, memory = pieces_of(file[1], np.arange(50))
    Calls(monkeypatch, module._CALLS[2], lambda count, true, given: true() if count > 2 else failing(errno.EINTR))
    assert (reads.read(pieces, True) == UNIT).all()
    np.testing.assert_array_equal(memory, file[0][:50])


def test_an_error_while_reads_are_under_way(file, reads, monkeypatch):
    """Their queue ends, which waits for them; the next read takes another one."""
    pieces, memory = pieces_of(file[1], np.arange(50))

    def interrupted(count, true, given):
        if count == 1:
            raise KeyboardInterrupt
        return true()

    Calls(monkeypatch, module._CALLS[2], interrupted)
    ended = Calls(monkeypatch, module._CALLS[1], lambda count, true, given: true())
    with pytest.raises(KeyboardInterrupt):
        reads.read(pieces, True)
    assert ended.count == 1
    np.testing.assert_array_equal(memory, file[0][:50], "nothing is written to this memory from here on")
    assert (reads.read(pieces, True) == UNIT).all()


def test_reads_that_come_short(file, reads, monkeypatch):
    """A piece past the end gets nothing; one of which a part came is read once more, as a whole."""
    pieces, memory = pieces_of(file[1], [3, 599, 600, 700])
    assert reads.read(pieces, True).tolist() == [UNIT, UNIT, 0, 0]
    np.testing.assert_array_equal(memory[:2], file[0][[3, 599]])
    true = module._Queue.move

    def half(queue, code, given, got):
        true(queue, code, given, got)
        got[1] = 512

    monkeypatch.setattr(module._Queue, "move", half)
    memory[:] = 0
    assert reads.read(pieces[:2], True).tolist() == [UNIT, UNIT]
    np.testing.assert_array_equal(memory[:2], file[0][[3, 599]])
    parts = iter((1000, 2000, 96, 1000))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [memoryview(to[0])[: next(parts)]], at))
    buffered = os.open(f"/proc/self/fd/{file[1]}", os.O_RDONLY)
    pieces, memory = pieces_of(buffered, [5])
    assert reads.read(pieces, False).tolist() == [UNIT]
    np.testing.assert_array_equal(memory, file[0][[5]])
    os.close(buffered)


@pytest.mark.parametrize("direct", [True, False])
def test_a_closed_file_is_an_error(file, reads, direct):
    """Wherever it comes among others, whose reads end before."""
    content, descriptor = file
    closed = os.dup(descriptor)
    os.close(closed)
    pieces, _ = pieces_of(descriptor, np.arange(200))
    pieces[140, 0] = closed
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        reads.read(pieces, direct)
    pieces, memory = pieces_of(descriptor, np.arange(200))
    assert (reads.read(pieces, direct) == UNIT).all()
    np.testing.assert_array_equal(memory, content[:200])


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("count", [2, 129, 500])
def test_what_is_written_is_there(file, reads, monkeypatch, queued, count):
    """And nothing else has changed; also more than a queue holds at a time."""
    content, descriptor = file
    if queued:
        by_queue(monkeypatch)
    reads.queued = queued
    units = np.random.default_rng(count).permutation(600)[:count]
    pieces, memory = pieces_of(descriptor, units)
    memory[:] = np.random.default_rng(count + 1).integers(0, 256, memory.shape, np.uint8)
    content[units] = memory
    reads.write(pieces, True)
    pieces, found = pieces_of(descriptor, np.arange(600))
    assert (reads.read(pieces, True) == UNIT).all()
    np.testing.assert_array_equal(found, content)


def test_writes_that_come_short(file, reads, monkeypatch):
    """One of which a part went is written once more, as a whole; a disk that takes nothing more is an error."""
    content, descriptor = file
    pieces, memory = pieces_of(descriptor, [5])
    memory[:] = ~content[5]
    parts = iter((1000, 2000, 96, 1000))
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, of, at: pwritev(fd, [memoryview(of[0])[: next(parts)]], at))
    buffered = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    pieces[:, 0] = buffered
    reads.write(pieces, False)
    assert os.pread(buffered, 3 * UNIT, 4 * UNIT) == content[4].tobytes() + memory.tobytes() + content[6].tobytes()
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reads.write(pieces, False)
    os.close(buffered)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_may_not_be_written_is_an_error(file, reads, direct):
    """Wherever it comes among others; these are written."""
    content, descriptor = file
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    pieces, memory = pieces_of(descriptor, np.arange(200))
    memory[:] = 7
    pieces[140, 0] = other
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        reads.write(pieces, direct)
    os.close(other)
    pieces, found = pieces_of(descriptor, np.arange(120, 160))
    reads.read(pieces, True)
    np.testing.assert_array_equal(found[20], content[140])
    assert (found[0] == 7).all()
