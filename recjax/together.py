"""Runs a verb as one of several processes: joins the others before it, and parts from them after it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

from recjax import distributed, supervise, watch
from recjax.errors import RecjaxError, StoppedError
from recjax.masking import masked


def run(place: distributed.Place, work: Callable[[watch.Watch], int]) -> int:
    """What `work` returns: the exit status. After an error the process ends here, or Python would wait for the others.

    Args:
      place: what the environment says of this process.
      work: prints its errors itself.
    """
    # Gloo prints to the process's standard output, which is for results.
    sys.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding)
    os.dup2(sys.stderr.fileno(), 1)
    pipe = os.environ.get(supervise.PIPE)
    watching = watch.start(int(pipe) if pipe else None)
    try:
        distributed.join(place)
        watching.joined(place.limit_s)
        status = work(watching)
    except RecjaxError as error:
        print(f"\nrecjax: error: {masked(str(error))}", file=sys.stderr)
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
        status = 1
    if status not in (0, StoppedError.exit_status):  # in these two all processes end alike
        settle()
        if distributed.is_main():  # with it goes what the others may still have to read
            time.sleep(watch.LAST_WORDS_S)
        os._exit(status)
    watching.done()
    distributed.leave()
    return status


def settle() -> None:
    """Lets go of what an output that nobody can read still holds: Python would fail over it once more at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
