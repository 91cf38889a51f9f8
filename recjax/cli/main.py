"""The command line: `recjax VERB ...`. Parses, calls, prints; all work is elsewhere.

Results go to standard output, progress and errors to standard error. Nothing heavy is imported
before a verb runs, so `recjax --help` is quick and starts no device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Sequence

from recjax.cli import lab, usage
from recjax.cli.parser import make_parser
from recjax.cli.program_cache import keep_programs
from recjax.errors import ConfigError, Interrupted, RecjaxError, StoppedError, out_of_memory
from recjax.parallel import distributed, job, stopping, supervisor, watchdog
from recjax.parallel.malloc import restart_with_tunables
from recjax.utils.text import masked

_ASKED = (Interrupted.exit_status, StoppedError.exit_status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: as in `sys.argv[1:]`; None takes those.

    Returns:
      The exit status, see `parser.STATUS`. A command that was stopped by a signal does not return, unless `arguments`
      were given: nothing more of the process may wait, or be interrupted once more.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it; print would take the other one instead
            setattr(sys, name, open(os.devnull, "w"))  # until the process ends
        elif reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="backslashreplace")  # a path may have characters that the terminal has not
    given = lab.join_words(sys.argv[1:] if arguments is None else arguments)
    verb = next((word for word in given if not word.startswith("-")), "")
    try:
        # argparse takes positional arguments in one run only: overrides may also follow an option
        options, rest = make_parser(verb).parse_known_args(given)
    except ConfigError as error:  # a path that cannot be one, or a verb that is not installed
        return _fail(str(error), error.exit_status)
    strange = [r for r in rest if r.startswith("-") or "=" not in r or "overrides" not in options]
    if strange:
        usage.refuse(options, strange[0], given)
    if rest:
        options.overrides += rest
    try:
        place = distributed.place()
    except ConfigError as error:
        return _fail(str(error), error.exit_status)
    if place is not None and "together" not in options:
        return _fail("this verb runs in one process: unset RECJAX_PROCESSES and RECJAX_CLUSTER for it.", 2)
    if arguments is None and place is not None and supervisor.PIPE not in os.environ:
        return supervisor.supervise(place)
    if arguments is None and "tunables" in options:
        restart_with_tunables()
    own = arguments is None  # the process is ours
    hearing = stopping.command_line("saves" in options, options.interrupted) if own else contextlib.nullcontext()
    with hearing:
        status = _run(options, own) if place is None else job.run(place, functools.partial(_run, options, own))
        job.settle()
        if own and status in _ASKED:
            os._exit(status)
    return status


def _run(options: argparse.Namespace, keep: bool, watching: watchdog.Watch | None = None) -> int:
    try:
        with watching.reporting() if watching else contextlib.nullcontext():
            if keep and "tunables" in options and getattr(options, "compiles", True):
                keep_programs()
            options.run(options)
        sys.stdout.flush()
    except (RecjaxError, StoppedError, KeyboardInterrupt) as error:
        status = getattr(error, "exit_status", Interrupted.exit_status)
        if status in _ASKED and "ends_by_signal" in options:  # how else
            print(f"\nrecjax: {masked(str(error) or options.interrupted)}", file=sys.stderr)
            return status
        return _fail(str(error) or options.interrupted, status)
    except BrokenPipeError:  # the reader of our output (head, say) has left
        return 1
    except (OSError, MemoryError, RuntimeError, ImportError) as error:  # the last: of a library that finds no room
        if isinstance(error, OSError) and not out_of_memory(error):
            where = f" ({error.filename})" if error.filename else ""
            return _fail(f"the system refused: {error.strerror or error}{where}. Check space and permissions there.", 1)
        if not out_of_memory(error):
            raise
        return _fail(
            f"out of memory: {' '.join(str(error).split())[:300].rstrip('.')}. The tables with their optimizer state "
            "and one batch must fit, as `recjax plan` shows them: take more devices (mesh.devices), a smaller "
            "embedding.dim, fewer rows, or a smaller train.batch_size or train.eval_batch_size.",
            1,
        )
    return 0


def _fail(message: str, status: int) -> int:
    print(f"\nrecjax: error: {masked(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
