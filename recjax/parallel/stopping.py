"""Ends a run, or another command, on Ctrl-C (SIGINT) and SIGTERM.

A run that is asked to stop does so after the step under way, with a checkpoint. Before its first step there is nothing
to save, and a second Ctrl-C is meant to save nothing: both end it at once.

Python handles a signal only between two of its own instructions, and XLA may start devices, compile or run a step for
minutes within one. So in a process of the command line a thread hears the signals (`signal.set_wakeup_fd`), and ends
the process itself. In a Python program that calls recjax, such as the kernel of a notebook, a run ends by exceptions
alone: the process is not ours.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recjax.errors import Interrupted, RecjaxError, StoppedError
from recjax.parallel import distributed, watchdog
from recjax.utils import log
from recjax.utils.text import masked

_NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
# Two SIGINT within this time are one: a terminal sends it to all processes of a command, and a parent passes it on.
_SAME_S = 1.0
_COMMAND, _CALL = "Give the same command", "Make the same call"


class Stop:
    """Keeps the signal that has asked a run to stop. Called, it returns that signal, or 0.

    Attributes:
      training: True once this process has trained a step, so that there is something to save.
      steps: returns the steps that have a complete checkpoint; None while the run folder is not known.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None, again: str = _CALL) -> None:
        """Starts with no signal.

        Args:
          say: prints at once, for the sender of the signal, that it was heard.
          again: the beginning of a sentence that says how to start the run once more.
        """
        self.training = False
        self.steps: Callable[[], Sequence[int]] | None = None
        self._say, self._again = say, again
        self._asked = 0
        self._interrupts, self._interrupted_at = 0, 0.0

    def __call__(self) -> int:
        """Returns the signal that asked first; 0 if none has."""
        return self._asked

    def heard(self, number: int, early: bool = True) -> str | None:
        """Takes in a signal.

        Args:
          number: SIGINT or SIGTERM. Schedulers may send several SIGTERM, which are as one.
          early: True if a run that has not trained a step ends at once.

        Returns:
          None if the run goes on, if only to the end of its step; else why it ends at once.
        """
        name, second = _NAMES[number], False
        if number == signal.SIGINT:
            now, before = time.monotonic(), self._interrupted_at
            second = self._interrupts > 0
            if second and now - before < _SAME_S:
                return None
            self._interrupts, self._interrupted_at = self._interrupts + 1, now
        if early and not self.training:
            return self._with_step(f"stopped by {name} before a step was trained")
        if second:
            return self._with_step("ended at once by a second Ctrl-C")
        if not self._asked or number == signal.SIGINT:
            self._say(f"{name}: stopping after this step, with a checkpoint. Ctrl-C once more ends at once, without.")
        self._asked = self._asked or number
        return None

    def stopped(self, number: int, step: int) -> Interrupted | StoppedError:
        """Makes the error with which a run ends that was asked to stop.

        Args:
          number: the signal.
          step: the last step, whose checkpoint is complete.
        """
        text = f"stopped by {_NAMES[number]} after step {step}; its checkpoint is complete."
        return _error(number, f"{text} {self._again} to go on from there.", everywhere=True)

    def _with_step(self, why: str) -> str:
        try:
            steps = None if self.steps is None else self.steps()
        except RecjaxError:  # the folder cannot be read, which the next start explains
            steps = None
        if steps is None:
            return f"{why}. {self._again} to go on."
        if not steps:
            return f"{why}; no checkpoint is complete yet. {self._again} to start from the beginning."
        return f"{why}. {self._again} to go on from step {max(steps)}, the last complete checkpoint."


def _error(number: int, message: str, everywhere: bool = False) -> Interrupted | StoppedError:
    return Interrupted(message, everywhere) if number == signal.SIGINT else StoppedError(message)


_command: Stop | None = None  # that of the process, within `command_line` for a verb that saves


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Stop]:
    """Makes SIGINT and SIGTERM ask the run to stop while the context is open; the former handlers return after it.

    In a Python program a signal raises `Interrupted` or `StoppedError` where the run ends at once; one of several
    processes always trains a step first, for the others would wait for it. In a thread other than the main one, where
    Python does not let signals be handled, nothing asks the run to stop. An ignored signal stays ignored.
    """
    if _command is not None and _in_main_thread():
        yield _command
        return
    stop = Stop(log.info)

    def handle(number: int, frame: object) -> None:
        if why := stop.heard(number, early=distributed.processes() == 1):
            raise _error(number, why)

    with handling((signal.SIGINT, signal.SIGTERM), handle):
        yield stop


@contextlib.contextmanager
def handling(numbers: Sequence[int], handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Gives these signals to `handle` while the context is open, but for ignored ones. In the main thread only."""
    before = {}
    if _in_main_thread():
        before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's


@contextlib.contextmanager
def command_line(saves: bool, interrupted: str) -> Iterator[None]:
    """Makes signals end a command while the context is open, as the module says, also while it is in C++ code.

    Args:
      saves: True if the verb trains, and saves when it is asked to stop. Any other verb ends at the first SIGINT by
        `KeyboardInterrupt`, and at the second at once; SIGTERM ends it as any program.
      interrupted: the message of any other verb that a second SIGINT has ended.
    """
    global _command
    if not _in_main_thread():
        yield
        return
    stderr = sys.stderr.fileno()  # of one that the caller closed, another
    read, write = os.pipe()
    os.set_blocking(write, False)
    stop = Stop(lambda text: _write(stderr, f"{text}\n"), _COMMAND)
    interrupts: list[float] = []

    def handle(number: int, frame: object) -> None:
        if saves:
            return  # the thread has heard it
        interrupts.append(time.monotonic())
        if len(interrupts) == 1:
            raise KeyboardInterrupt

    def listen() -> None:
        first_at: float | None = None
        while heard := os.read(read, 1):
            number, why = heard[0], None
            if saves and number in _NAMES:
                why = stop.heard(number)
            elif number == signal.SIGINT:
                now = time.monotonic()
                if first_at is None:
                    first_at = now
                elif now - first_at >= _SAME_S:
                    why = f"{interrupted} (ended at once by a second Ctrl-C)"
            if why:
                _end(stderr, why, number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    waked = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    numbers = (signal.SIGINT, signal.SIGTERM) if saves else (signal.SIGINT,)
    _command = stop if saves else None
    try:
        with handling(numbers, handle):
            yield
    finally:
        _command = None
        signal.set_wakeup_fd(waked)
        os.close(write)
        thread.join()
        os.close(read)


def _end(stderr: int, why: str, number: int) -> None:
    """Ends this process at once, and with it those that train together with it. Nothing is printed after the reason."""
    last = os.dup(stderr)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stderr)  # the main thread goes on until the exit, and may be about to print
    _write(last, f"\nrecjax: error: {masked(why)}\n")
    watchdog.ending(why, 128 + number)
    os._exit(128 + number)


def _write(descriptor: int, text: str) -> None:
    # Not by sys.stderr, whose lock the main thread may hold; nor where it would wait for a reader.
    with contextlib.suppress(OSError, ValueError):
        start = "\r\x1b[K" if os.isatty(descriptor) else ""  # the line of the progress
        if select.select([], [descriptor], [], 0.2)[1]:
            os.write(descriptor, (start + text).encode(errors="replace"))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
