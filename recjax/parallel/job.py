"""Runs a verb as one of several processes: joins the others before it, and parts from them after it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from recjax.errors import Interrupted, RecjaxError, StoppedError
from recjax.parallel import distributed, supervisor, watchdog
from recjax.utils.text import masked

_ALIKE = (0, StoppedError.exit_status, Interrupted.exit_status)  # all processes end with the same of these


def run(place: distributed.Place, work: Callable[[watchdog.Watch], int]) -> int:
    """Returns the exit status of `work`. After an error the process ends here, or Python would wait for the others.

    Args:
      place: what the environment says of this process.
      work: prints its errors itself.
    """
    with contextlib.suppress(OSError):  # a notebook's or a test's have no descriptor
        # Gloo prints to the process's standard output, which is for results.
        out, errors = os.dup(sys.stdout.fileno()), sys.stderr.fileno()
        sys.stdout = os.fdopen(out, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        os.dup2(errors, 1)
    pipe = os.environ.get(supervisor.PIPE)
    watching = watchdog.start(int(pipe) if pipe else None)
    alike = False
    try:
        distributed.join(place)
        watching.joined(place.limit_s)
        status = work(watching)
        alike = status in _ALIKE and not watching.has_failed
        if alike:
            watching.phase("wait")
            distributed.gather("that it is done", "")  # process 0 may have results to write that take a while
    except RecjaxError as error:
        print(f"\nrecjax: error: {masked(str(error))}", file=sys.stderr)
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
        status = 1
    if not alike:
        settle()
        watching.part(status)
        os._exit(status)
    watching.done()
    with contextlib.suppress(RuntimeError):  # a peer that dies now takes nothing with it
        distributed.leave()
    return status


def settle() -> None:
    """Lets go of what an output that nobody can read still holds: Python would fail over it once more at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
