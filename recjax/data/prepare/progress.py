"""One line on standard error that says how far a preparation is."""

from __future__ import annotations

import shutil
import time

from recjax.utils import log

_TERMINAL_EVERY_S, _LOG_EVERY_S = 0.2, 5.0


class PrepareProgress:
    """Stage, rows, rows/s, time left. A terminal's line overwrites itself; else a line every few seconds.

    A stage that ends before a line was due writes none.
    """

    def __init__(self) -> None:
        """Writes nothing yet."""
        self._stream = log.stream()
        self._terminal = self._stream is not None and self._stream.isatty()
        self._stage, self._rows, self._done, self._start = "", 0, 0.0, time.monotonic()
        self._drawn_at, self._open = self._start, False

    def stage(self, name: str, rows: int = 0, done: float = 0.0) -> None:
        """Begins a stage of which `rows` rows and the share `done` were finished before."""
        self.close()
        self._stage, self._rows, self._done, self._start = name, rows, done, time.monotonic()

    def update(self, rows: int, done: float | None) -> None:
        """Tells that `rows` rows of the stage are finished, which is the share `done` of it (None: unknown)."""
        now = time.monotonic()
        if now - self._drawn_at < (_TERMINAL_EVERY_S if self._terminal else _LOG_EVERY_S):
            return
        self._drawn_at = now
        seconds = max(now - self._start, 1e-9)
        left = "-"
        if done is not None and done > self._done:
            minutes, rest = divmod(round(seconds * (1 - done) / (done - self._done)), 60)
            left = f"{minutes}:{rest:02}"
        text = f"{self._stage}: {rows:,} rows  {(rows - self._rows) / seconds:,.0f} rows/s  {left} left"
        if self._terminal:
            self._open = True
            log.write(self._stream, f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        else:
            log.write(self._stream, f"{text}\n")

    def note(self, text: str) -> None:
        """Writes a line of its own."""
        self.close()
        log.write(self._stream, f"{text}\n")

    def close(self) -> None:
        """Ends an open line."""
        if self._open:
            log.write(self._stream, "\n")
        self._open = False
