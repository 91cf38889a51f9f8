"""One of several processes, run as a supervised child, so that an abort, a hang or a kill is reported.

When a peer is lost JAX may abort the process, and nothing of Python runs any more. So the command that the user starts
is a small parent, which runs the same command again as its child, passes SIGTERM and SIGINT on, hears from the child
every second (see `watchdog.py`), and turns an abort or a silence into a paragraph and exit status 4. A child that is
aborted on its way out, for its peers were gone first, has said with which status it ends, and that counts.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from recjax.parallel.distributed import Place
from recjax.parallel.stopping import handling
from recjax.parallel.watchdog import AGAIN, LOST

PIPE = "RECJAX_SUPERVISED"  # in the child's environment: the descriptor it writes to
_SILENCE = 0.9  # of the limit, so that all is over within it
_START = 10  # limits: hundreds of processes that import at once from one network disk take minutes


def supervise(place: Place) -> int:
    """Runs this very command as a child, and returns its exit status, or 4 if it was lost.

    A second signal reaches the child as the first did. Of the SIGINT that a terminal sends to both, and that comes from
    here too, the child makes one.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]], env={**os.environ, PIPE: str(write)}, pass_fds=[write]
    )
    os.close(write)
    with handling((signal.SIGTERM, signal.SIGINT), lambda number, frame: child.send_signal(number)):
        return _await(child, read, place)


def _await(child: subprocess.Popen[bytes], read: int, place: Place) -> int:
    phase, heard = "start", time.monotonic()
    ends: int | None = None  # the status that it said it ends with
    limit_s = _START * place.limit_s  # to its first word
    silent = False
    while True:
        ready, _, _ = select.select([read], [], [], 1.0)
        if ready:
            data = os.read(read, 65536)
            if not data:
                break
            heard = time.monotonic()
            for line in data.decode().splitlines():
                phase, _, said = line.partition(" ")
                ends = int(said) if said else ends
            limit_s = _SILENCE * place.limit_s
        elif time.monotonic() - heard > limit_s and not silent:
            silent = True
            child.kill()
    status = child.wait()
    who = "this process" if place.process is None else f"process {place.process}"
    if silent:
        return _lost(
            f"{who} gave no sign for {limit_s:.0f} s, in phase {phase}, and was ended: it had been stopped, or "
            f"its machine was too busy. {AGAIN}"
        )
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    if -status in (signal.SIGTERM, signal.SIGINT):
        return 128 - status
    if -status == signal.SIGABRT and ends is not None:
        return ends
    if -status == signal.SIGABRT:
        return _lost(f"{who} lost its peers in phase {phase}: JAX ended it, see above. {AGAIN}")
    cause = " (out of memory, perhaps)" if -status == signal.SIGKILL else ""
    return _lost(f"{who} was ended by {name}{cause} in phase {phase}. {AGAIN}")


def _lost(message: str) -> int:
    print(f"\nrecjax: error: {message}", file=sys.stderr, flush=True)
    return LOST
