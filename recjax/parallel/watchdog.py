"""A thread that watches over this process and its peers, so that none waits forever for one that is gone.

Every process posts a record once a second: its phase, how often the phase has changed, and a beat. It reads those of
the others, and ends itself (exit status 4, with a paragraph that names the process and its phase) when

  a peer has failed, and says so in its record;
  a peer's beat stands still for half the limit: it was killed or stopped, its machine or the link is lost; where a
    collective has broken off, a few beats are enough;
  a peer has ended while this one is still at work;
  a process does not leave a phase in which it works alone within that phase's limit;
  no process has moved for the limit, and of steps that are one program for so many limits, though none of them works
    alone.

The records lie in the store of JAX's distributed runtime, which goes down with process 0; that JAX itself notices.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from recjax.errors import RecjaxError, out_of_memory
from recjax.parallel import distributed
from recjax.utils.text import masked

LOST = 4  # exit status
# Phases in which a process works alone, and after how many limits in one of them it counts as stuck. In the others it
# waits for its peers, or does what none of them waits for.
ALONE = {"start": 30, "input": 1, "count": 30, "dispatch": 30, "restore": 30, "checkpoint": 30, "report": 30}
_DONE = "done"
# Between runs that a Python program starts: what it does there, and for how long, is its own affair.
_OUTSIDE = "outside"
# After an error that a lost peer may have caused.
_BROKEN = "lost"
_MISSED_BEATS = 4  # of a peer, then: it has most likely ended, and nobody gains by waiting
_BEAT_S = 1.0
_LAST_WORDS_S = 3.0  # that process 0, with which the store goes down, stays at most for the others to read why
_PER_PROCESS_S = 1 / 64  # with many processes records go around more seldom


class Watch:
    """Reports this process's state to its peers, and watches theirs. Its thread ends with the process.

    Attributes:
      steps: of a program that all wait for.
    """

    steps = 1

    def __init__(self, pipe: int | None) -> None:
        """Starts to tell the supervisor, if there is one.

        Args:
          pipe: file descriptor that the supervisor reads; see `supervisor.py`.
        """
        self._pipe = pipe
        self._phase, self._moves = "start", 0
        self._limit_s = distributed.limit_s()
        self._failed, self._status = "", LOST
        self._ends: int | None = None  # the exit status of this process, once that is sure
        self._seen: dict[int, tuple[dict[str, Any], float, float]] = {}  # record, when its beat, and its phase changed
        self._joined = self._parts = False
        self._lock = threading.RLock()  # held by the thread that ends the process
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def joined(self, limit_s: float) -> None:
        """From now on the peers are watched too, also one that will not have said a word."""
        now = time.monotonic()
        silent = {"phase": "start", "moves": -1, "beat": None, "failed": "", "where": "not a word from it yet"}
        self._seen = {k: (silent, now, now) for k in range(distributed.processes())}
        self._limit_s, self._joined = limit_s, True

    def phase(self, name: str) -> None:
        """Says what this process does from now on."""
        self._phase = name
        self._moves += 1

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """The peers learn of an error in it, and end too, unless they have the same one.

        An error that a lost peer may have caused ends this process as well, once it is known which one it was.
        """
        try:
            yield
        except BaseException as error:
            if not getattr(error, "everywhere", False):
                if _perhaps_a_peers(error):
                    self._explain(error)
                kind = "" if isinstance(error, RecjaxError) else f"{type(error).__name__}: "
                self.failed(f"{kind}{error}")
            raise

    def failed(self, message: str) -> None:
        """Posts that this process ends, and why; its peers end too."""
        self._failed = _in_short(message)
        if self._joined:
            with contextlib.suppress(Exception):  # they will see that it is gone
                self._tell()

    @property
    def has_failed(self) -> bool:
        """Returns whether the peers know that this process ends, for a reason of its own."""
        return bool(self._failed)

    def done(self) -> None:
        """Tells them that it has nothing left to do."""
        self.phase(_DONE)
        with contextlib.suppress(Exception):
            self._tell()
        self._joined = False

    def part(self, status: int, message: str = "") -> None:
        """Reports to the supervisor and to the peers that this process ends now. Takes at most `_LAST_WORDS_S`.

        JAX aborts those that outlive process 0. So that waits until all others that are not lost have posted it too.
        One that has may still be aborted before its exit; then its supervisor knows the status.

        Args:
          status: the exit status of this process.
          message: as for `failed`, if the peers are to end for it with the same exit status.
        """
        with self._lock:
            self._ends = status
            self._tell_supervisor()
            if not self._joined:
                return
            if message:
                self._failed, self._status = _in_short(message), status
            self._parts = True
            thread = threading.Thread(target=self._last_words, daemon=True)  # process 0 may not answer
            thread.start()
            thread.join(_LAST_WORDS_S)

    def _last_words(self) -> None:
        with contextlib.suppress(Exception):
            self._tell()
            now = time.monotonic()
            lost = {k for k, (_, beat_at, _) in self._seen.items() if now - beat_at > self._silence_s()}
            while distributed.is_main() and time.monotonic() < now + _LAST_WORDS_S and not self._is_last(lost):
                time.sleep(0.05)

    def _is_last(self, lost: set[int]) -> bool:
        records = distributed.posted("watch").items()
        parted = {int(k) for k, text in records if json.loads(text)["parts"]}
        return len(parted | lost) == distributed.processes()

    def _explain(self, error: BaseException) -> None:
        self.phase(_BROKEN)
        deadline = time.monotonic() + self._silence_s() + 3 * self._interval_s()
        while time.monotonic() < deadline:
            time.sleep(0.2)  # meanwhile the thread may find the culprit
        text = " ".join(str(error).split())[:300]
        with self._lock:  # not while the thread, which has found it, waits for the others to part
            traceback.print_exception(error)  # it may as well be a mistake of ours
            self.end(
                f"a step failed as it does when the connection to a peer breaks, though all of them still answer "
                f"({text}). The traceback above says where; if it is no such error, mend it. {AGAIN}"
            )

    def end(self, message: str, status: int = LOST) -> None:
        """Prints the paragraph and ends the process at once: a thread that waits in a collective cannot be woken."""
        with self._lock:
            print(f"\nrecjax: error: process {distributed.process()}: {masked(message)}", file=sys.stderr, flush=True)
            self.part(status)
            os._exit(status)

    def _interval_s(self) -> float:
        return max(_BEAT_S, distributed.processes() * _PER_PROCESS_S)

    def _silence_s(self) -> float:
        """Seconds that a peer may be silent."""
        usual_s = self._limit_s / 2
        return min(usual_s, _MISSED_BEATS * self._interval_s()) if self._phase == _BROKEN else usual_s

    def _record(self) -> dict[str, Any]:
        where = f"{socket.gethostname()}, pid {os.getpid()}"
        return {
            "phase": self._phase,
            "moves": self._moves,
            "beat": time.time(),
            "failed": self._failed,
            "status": self._status,
            "parts": self._parts,
            "where": where,
        }

    def _tell(self) -> None:
        distributed.post(f"watch/{distributed.process()}", json.dumps(self._record()))

    def _run(self) -> None:
        due = 0.0
        while True:
            self._tell_supervisor()
            if self._joined and time.monotonic() >= due:
                due = time.monotonic() + self._interval_s()
                try:
                    self._tell()
                    records = {int(k): json.loads(text) for k, text in distributed.posted("watch").items()}
                except Exception as error:
                    if self._joined and self._phase != _OUTSIDE and not self._parts:
                        self._joined = False  # there is nobody to part from
                        self.end(
                            f"process 0, which the others meet at, cannot be reached any more; it ended, or the link "
                            f"to it broke. This process was in phase {self._phase} ({_first(error)}). {AGAIN}"
                        )
                    continue
                # One that parts ends by a signal, which may have reached the others too, or by an error.
                if not self._parts and (message := self.judge(records, time.monotonic())):
                    if self._joined:
                        self.end(message, _status(records))
            time.sleep(_BEAT_S)

    def _tell_supervisor(self) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, f"{self._phase} {'' if self._ends is None else self._ends}\n".encode())
        except BlockingIOError:
            pass  # it was stopped; its pipe is full
        except OSError:
            os._exit(LOST)  # it is gone, and nobody else would end this process

    def judge(self, records: Mapping[int, dict[str, Any]], now: float) -> str:
        """Describes what is wrong, or returns nothing.

        Args:
          records: those that the processes have posted, by process.
          now: seconds, monotonic; when they were read.
        """
        me = distributed.process()
        for k, record in records.items():
            before, beat_at, moved_at = self._seen.get(k, (record, now, now))
            if record["beat"] != before["beat"]:
                beat_at = now
            if (record["phase"], record["moves"]) != (before["phase"], before["moves"]):
                moved_at = now
            self._seen[k] = record, beat_at, moved_at
        if self._phase == _OUTSIDE:
            return ""
        here = f"This process was in phase {self._phase}. {AGAIN}"
        for k, (record, beat_at, moved_at) in self._seen.items():
            name, phase, still_s = f"process {k} ({record['where']})", record["phase"], now - moved_at
            if record["failed"] and k != me:
                did = "failed" if record.get("status", LOST) == LOST else "was stopped"
                return f"{name} {did} in phase {phase}: {record['failed']} {here}"
            if phase == _DONE:
                if self._phase != _DONE and still_s > self._limit_s / 2:
                    return f"{name} has ended while this one still works: their data or settings differ. {here}"
                continue
            if now - beat_at > self._silence_s() and k != me:
                return (
                    f"{name} was last heard of {now - beat_at:.0f} s ago, in phase {phase}: it was killed or stopped, "
                    f"or the link to its machine is lost. {here}"
                )
            if still_s > ALONE.get(phase, 1e9) * self._limit_s:
                return f"{name} has been in phase {phase} for {still_s:.0f} s. {here}"
        alone = any(record["phase"] in (*ALONE, _DONE, _OUTSIDE) for record, _, _ in self._seen.values())
        still_s = now - max((moved_at for _, _, moved_at in self._seen.values()), default=now)
        if not alone and still_s > self._limit_s * self.steps:
            phases = ", ".join(f"{k} in {record['phase']}" for k, (record, _, _) in sorted(self._seen.items()))
            return (
                f"no process has moved for {still_s:.0f} s: {phases}. (Steps that take so long need a larger "
                f"RECJAX_LIMIT_S, or fewer train.steps_per_call.) {AGAIN}"
            )
        return ""


AGAIN = "Start the same command again, on as many processes as there are: the run goes on from its last checkpoint."
_watch: Watch | None = None


def start(pipe: int | None = None) -> Watch:
    """Starts the thread."""
    global _watch
    _watch = _watch or Watch(pipe)
    return _watch


@contextlib.contextmanager
def from_python() -> Iterator[None]:
    """A run that a Python program starts in each of several processes is watched too; the command line's already is."""
    if distributed.processes() == 1 or (_watch is not None and _watch._phase != _OUTSIDE):
        yield
        return
    watching = start()
    if not watching._joined:
        watching.joined(distributed.limit_s())
    watching.phase("start")
    try:
        with watching.reporting():
            yield
    finally:
        watching.phase(_OUTSIDE)


def ending(message: str, status: int) -> None:
    """Parts from supervisor and peers, if there are any: this process ends now, and the peers end with its status."""
    if _watch is not None:
        _watch.part(status, message)


def phase(name: str) -> None:
    """Says what this process does from now on, if it is watched."""
    if _watch is not None:
        _watch.phase(name)


@contextlib.contextmanager
def steps_at_once(count: int) -> Iterator[None]:
    """Takes so many steps for one program meanwhile, which moves no process before its end."""
    if _watch is None:
        yield
        return
    _watch.steps = count
    try:
        yield
    finally:
        _watch.steps = 1


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """A phase, after which the one before goes on."""
    before = _watch._phase if _watch is not None else ""
    phase(name)
    try:
        yield
    finally:
        phase(before)


def _status(records: Mapping[int, dict[str, Any]]) -> int:
    """The exit status of those that have failed, if they agree on one."""
    statuses = {record.get("status", LOST) for record in records.values() if record["failed"]}
    return statuses.pop() if len(statuses) == 1 else LOST


_STATUSES = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")  # of XLA's errors


def _perhaps_a_peers(error: BaseException) -> bool:
    # JAX tells of a collective that broke off, as when a peer is lost, with a RuntimeError of no class of its own; or,
    # where this thread ran the program, with a ValueError whose text begins with the status: "UNKNOWN: Gloo ...".
    own = isinstance(error, (NotImplementedError, RecursionError)) or out_of_memory(error)
    broken = isinstance(error, ValueError) and str(error).partition(":")[0] in _STATUSES
    return (isinstance(error, RuntimeError) or broken) and not own


def _in_short(message: str) -> str:
    return " ".join(message.split())[:600]


def _first(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
