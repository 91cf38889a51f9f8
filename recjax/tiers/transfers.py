"""Moves pieces of files from and to memory, many at once: by a queue of the kernel, or from threads that wait.

Needs NumPy alone, and is copied beside the loader of an export that has tables on disk.

Linux takes any number of reads and writes in one call (io_submit) and gives them back in another (io_getevents), for a
few microseconds of the processor each, where a thread takes tens. It does so for files that are opened around the page
cache; of others these calls move one piece after the other. So those are left to threads, and so is everything where
the kernel has no such queue, or gives no room in one, and each piece that came short: the plain call then says what is
wrong with it.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import os
import platform
import sys

import numpy as np

_DEPTH = 128  # pieces that a queue holds
_THREADS = 16  # that wait for the disk
_LEAST = 8  # pieces for which another thread is worth it
_READ, _WRITE = 0, 1  # codes of a command
# Of linux/aio_abi.h, as processors of small end first have it.
_COMMAND = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("flags", "<u4"),
        ("code", "<u2"),
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("address", "<u8"),
        ("length", "<u8"),
        ("place", "<i8"),
        ("more", "<u8", 2),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("command", "<u8"), ("got", "<i8"), ("got_2", "<i8")])
_NUMBERS = {  # of the calls io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_CALLS = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 2**32 else None


class Transfers:
    """Reads and writes for any number of threads, each of which waits for its own.

    Attributes:
      queued: whether the kernel has queues for them.
    """

    def __init__(self) -> None:
        """Starts nothing before it is asked to."""
        self.queued = _CALLS is not None
        self._free: list[_Queue] = []  # each is used by one thread at a time
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "transfers")

    def read(self, pieces_Nx4: np.ndarray, direct: bool) -> np.ndarray:
        """Reads pieces into memory; returns the bytes that each got, int64 [N], fewer where a file ends.

        Args:
          pieces_Nx4: of each the file's descriptor, the place in it, the length, and the address in memory that may not
            go before this returns; in bytes, int64.
          direct: whether their files were opened around the page cache, in which case places, lengths and addresses
            are multiples of what the disk can be asked for.

        Raises:
          OSError: of the first read that failed; none goes on then.
        """
        return self._move(_READ, pieces_Nx4, direct)

    def write(self, pieces_Nx4: np.ndarray, direct: bool) -> None:
        """Writes pieces of memory, none of which reaches into another; the arguments are those of `read`.

        Raises:
          OSError: of the first write that failed; none goes on then.
        """
        if (self._move(_WRITE, pieces_Nx4, direct) != pieces_Nx4[:, 2]).any():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _move(self, code: int, pieces_Nx4: np.ndarray, direct: bool) -> np.ndarray:
        done_N = np.zeros(len(pieces_Nx4), np.int64)
        if direct and self.queued and len(pieces_Nx4) > 1:
            self._by_queue(code, pieces_Nx4, done_N)
        rest = np.flatnonzero(done_N != pieces_Nx4[:, 2])
        if len(rest):
            self._by_threads(code, pieces_Nx4, done_N, rest)
        return done_N

    def _by_queue(self, code: int, pieces_Nx4: np.ndarray, done_N: np.ndarray) -> None:
        try:
            queue = self._free.pop()
        except IndexError:
            try:
                queue = _Queue()
            except OSError as error:
                self.queued = error.errno == errno.EAGAIN  # others have all queues just now
                return
        try:
            queue.move(code, pieces_Nx4, done_N)
        except BaseException:
            queue.close()  # waits for what is under way, before its memory goes
            raise
        self._free.append(queue)

    def _by_threads(self, code: int, pieces_Nx4: np.ndarray, done_N: np.ndarray, rest: np.ndarray) -> None:
        parts = np.array_split(rest, max(1, min(_THREADS, len(rest) // _LEAST)))
        tasks = [self._pool.submit(_plain, code, pieces_Nx4, done_N, part) for part in parts[1:]]
        try:
            _plain(code, pieces_Nx4, done_N, parts[0])
        finally:
            concurrent.futures.wait(tasks)
        for task in tasks:
            task.result()

    def close(self) -> None:
        """Ends queues and threads."""
        self._pool.shutdown()
        while self._free:
            self._free.pop().close()


def _plain(code: int, pieces_Nx4: np.ndarray, done_N: np.ndarray, some: np.ndarray) -> None:
    move = os.pwritev if code == _WRITE else os.preadv
    for at, (descriptor, place, length, address) in zip(some.tolist(), pieces_Nx4[some].tolist(), strict=True):
        memory = (ctypes.c_char * length).from_address(address)
        done = 0
        while done < length and (more := move(descriptor, [memoryview(memory)[done:]], place + done)):
            done += more
        done_N[at] = done


class _Queue:
    """A queue of the kernel, for one thread at a time."""

    def __init__(self) -> None:
        """Asks for one; OSError if the kernel gives none."""
        assert _CALLS is not None
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._system.restype = ctypes.c_long
        self._setup, self._destroy, self._wait, self._submit = _CALLS
        made = np.zeros(1, np.uint64)
        if self._call(self._setup, _DEPTH, made.ctypes.data):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._context = int(made[0])
        self._events = np.zeros(_DEPTH, _EVENT)

    def _call(self, number: int, *arguments: int) -> int:
        """Calls the kernel, and gives what it returns: -1 of a call that failed."""
        found: int = self._system(*(ctypes.c_long(each) for each in (number, *arguments)))
        return found

    def move(self, code: int, pieces_Nx4: np.ndarray, done_N: np.ndarray) -> None:
        """Moves pieces; `done_N` gets the bytes of each, and stays as it was where the kernel did not take it."""
        N = len(pieces_Nx4)
        commands = np.zeros(N, _COMMAND)
        commands["code"] = code
        commands["data"] = np.arange(N)
        for name, column in zip(("descriptor", "place", "length", "address"), pieces_Nx4.T, strict=True):
            commands[name] = column
        pointers = commands.ctypes.data + _COMMAND.itemsize * np.arange(N, dtype=np.int64)
        sent = done = 0
        while True:
            if room := min(N - sent, _DEPTH - (sent - done)):
                taken = self._call(self._submit, self._context, room, pointers.ctypes.data + 8 * sent)
                if taken <= 0 and sent == done:
                    return
                sent += max(0, taken)
            under_way = sent - done
            least = under_way if sent == N else -(-under_way // 2)  # the disk gets more while it has others
            found = self._call(self._wait, self._context, least, under_way, self._events.ctypes.data, 0)
            if found < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            events = self._events[: max(0, found)]
            done_N[events["data"].astype(np.int64)] = np.maximum(events["got"], 0)
            done += len(events)
            if done == N:
                return

    def close(self) -> None:
        """Waits for what is under way, and gives the queue back."""
        self._call(self._destroy, self._context)
