"""The logger "recjax", for lines on standard error that say what goes on.

`logging.getLogger("recjax").setLevel("WARNING")` silences them, and the lines of progress with them. Its handler writes
plain lines; take it away and let records propagate for handlers of your own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO


class _Stderr(logging.Handler):
    """Writes to standard error as it is at that time, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a line; where nobody listens, or in the middle of another print, none: that ends no run."""
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                print(self.format(record), file=sys.stderr, flush=True)


_LOGGER = logging.getLogger("recjax")
if not _LOGGER.handlers:  # else the program has chosen before
    _LOGGER.addHandler(_Stderr())
    _LOGGER.propagate = False
if _LOGGER.level == logging.NOTSET:
    _LOGGER.setLevel(logging.INFO)


def info(*words: str) -> None:
    """Logs a line of words."""
    _LOGGER.info(" ".join(words))


def write(to: TextIO | None, text: str) -> None:
    """Writes text as it is, if there is where; work goes on when nobody listens any more (a closed pipe, say)."""
    if to is not None:
        with contextlib.suppress(OSError, ValueError):
            to.write(text)
            to.flush()


def stream() -> TextIO | None:
    """Returns standard error, for a line of progress; None where the logger is silent."""
    return sys.stderr if _LOGGER.isEnabledFor(logging.INFO) else None
