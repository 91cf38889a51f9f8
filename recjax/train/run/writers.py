"""Reports of a run while it goes: metrics.jsonl, the progress line or a notebook's bar, and the table at the end."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from recjax.errors import TrainingError
from recjax.train.run.mlflow_run import MlflowRun
from recjax.train.run.tensorboard import EventFile
from recjax.train.run.trackers import Tracker, require
from recjax.train.run.wandb_run import WandbRun
from recjax.utils import log, strict_json
from recjax.utils.files import disk_error, jsonable, write_whole
from recjax.utils.text import aligned


def in_notebook() -> bool:
    """Returns True if this process is the kernel of a notebook. Nothing is imported to find out."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookBar:
    """A bar of tqdm: one of ipywidgets where that is installed, else one of characters."""

    def __init__(self, total: int, step: int, stream: TextIO) -> None:
        """Draws the bar at `step` of `total`; characters go to `stream`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that ipywidgets is missing: the other bar will do
            from tqdm.auto import tqdm
        self._bar: Any = tqdm(total=total, initial=step, file=stream, bar_format="{percentage:3.0f}%|{bar}| {desc}")

    def update(self, step: int, text: str) -> None:
        """Draws it again at `step`, with the text of the progress line."""
        self._bar.set_description_str(text, refresh=False)
        self._bar.n = step
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Writes a line of its own, which the bar does not run into."""
        self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        """Ends the bar, which stays as it is."""
        self._bar.close()


_FEWEST = 2  # whole steps over which throughput is measured at least; of fewer it is not known
_WINDOW_S = 10.0  # throughput and time left are measured over this much recent training
_POINT_EVERY_S = 0.1  # at most one point of that window in this time
_TERMINAL_EVERY_S = 0.1  # a terminal's line is drawn again at most this often
_LOG_EVERY_S = 5.0  # a file or a pipe gets a line this often


# Makes a tracker in a run folder; the settings, by dotted key, are shown beside its lines.
_OPEN: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": lambda run, _: EventFile(run),
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}


class Trackers:
    """The trackers of a run, as one."""

    def __init__(self, names: Sequence[str], run: Path, lines: bytes, settings: Mapping[str, Any]) -> None:
        """Opens them with the lines that are there.

        Args:
          names: which.
          run: the run folder.
          lines: content of metrics.jsonl.
          settings: dotted key -> value, of the run's config.

        Raises:
          ConfigError: a package is missing.
          TrainingError: no space, no permission.
        """
        for name in names:
            require(name)
        self._opened = [_OPEN[name](run, settings) for name in names]
        if self._opened and lines:
            self.write([json.loads(line) for line in lines.splitlines()])

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker.write`."""
        for tracker in self._opened:
            tracker.write(lines)

    def close(self) -> None:
        """See `Tracker.close`."""
        for tracker in self._opened:
            tracker.close()


class MetricsFile(contextlib.AbstractContextManager["MetricsFile"]):
    """metrics.jsonl: one JSON object a line, on the disk as soon as it is written.

    A step appears once even after a resume: lines beyond the checkpoint that the run resumed from are
    dropped when the file is opened, and so are a last line that a killed run left half-written and lines
    of the test split, which the end of the run writes again.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None,
        trackers: Sequence[str] = (),
        without: Collection[str] = (),
        settings: Mapping[str, object] = MappingProxyType({}),
        tested: bool = False,
    ) -> None:
        """Opens the file for more lines.

        Args:
          path: the file, in a folder that exists.
          resume_step: the step that the run continues from; lines of later steps are dropped. None
            for a fresh run: all lines are dropped.
          trackers: names of trackers that take the same lines (see `Trackers`).
          without: splits whose lines of that step are dropped as well.
          settings: dotted key -> value, that trackers show.
          tested: whether lines of the test split stay: the training that they ended is over.

        Raises:
          ConfigError: the package of a tracker is missing.
          TrainingError: a line, other than a torn last one, is no metrics line; or no space, no permission.
        """
        self._path = path
        try:
            old = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise TrainingError(
                f"cannot read {path}: {error.strerror}. Make the file readable for this user, or choose another run "
                "folder with --out."
            ) from error
        kept = b"" if resume_step is None else _lines_up_to(resume_step, without, old, path, tested)
        if kept != old or path.is_symlink():  # which becomes a file of this folder before anything is added
            write_whole(path, kept)
        try:
            self._file = open(path, "ab", buffering=0)  # closed by close
        except OSError as error:
            raise disk_error(path, error, 0, resumes=True) from error
        self._trackers = Trackers(trackers, path.parent, kept, settings)

    def write(self, line: Mapping[str, object]) -> None:
        """Appends one line.

        Args:
          line: JSON values or NumPy scalars; must have an integer `step`. NaN is written as null.

        Raises:
          TrainingError: no space left; a line that is half-written then is dropped by the next run.
        """
        if not isinstance(line["step"], int):
            raise TypeError(f"a metrics line needs an integer step, not {line['step']!r}")
        text = json.dumps(jsonable(dict(line)), allow_nan=False)
        data = text.encode() + b"\n"
        try:
            left = data
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise disk_error(self._path, error, len(data), resumes=True) from error
        self._trackers.write([json.loads(text)])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._trackers.close()

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()


class NoMetrics(contextlib.AbstractContextManager["NoMetrics"]):
    """In place of `MetricsFile` where another process writes it."""

    def write(self, line: Mapping[str, object]) -> None:
        """Nothing."""

    def __exit__(self, *_: object) -> None:
        pass


def _lines_up_to(step: int, without: Collection[str], text: bytes, path: Path, tested: bool) -> bytes:
    kept, lines = [], text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            parsed = strict_json.parse(line)
            line_step = parsed["step"]
            if not isinstance(line_step, int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not line.endswith(b"\n"):
                break  # the killed run was writing it
            raise TrainingError(
                f"{path}, line {number}: {line[:80]!r} is no metrics line (a JSON object with an integer step). The "
                "file was edited or damaged: delete that line, or move the file away to start its record again."
            ) from None
        split = parsed.get("split")
        if line_step <= step and (tested or split != "test") and not (line_step == step and split in without):
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    return b"".join(kept)


class Progress:
    """One line on standard error: step, loss, samples/s, time left. Never on standard output.

    On a terminal the line overwrites itself, and in a notebook it is a bar; elsewhere a line is written every few
    seconds, and for the first and the last step.

    Throughput counts whole steps: from when a result is there, with the next step under way, to when the next result
    is. What is left out: pauses, steps for which a program is compiled, and a step whose result is awaited with no
    other under way, for where dispatching a step takes until its end, as on a CPU, it has gone before. A rate is of
    `_FEWEST` steps at least; the line has neither rate nor time left before.
    """

    def __init__(
        self, total_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts the line, writing nothing yet.

        Args:
          total_steps: the step at which the run ends.
          stream: where to write instead of standard error.
          clock: seconds, monotonic; tests pass their own.
        """
        self._total = total_steps
        self._stream = log.stream() if stream is None else stream
        self._clock = clock
        self._terminal = self._stream is not None and self._stream.isatty()
        self._bar: NotebookBar | None = None
        self._notebook = stream is None and self._stream is not None and in_notebook()
        self._sum = (0.0, 0, 0)  # what counts so far: seconds, steps, samples
        self._window = collections.deque([self._sum])  # recent values of that
        self._before: tuple[float, int, int] | None = None  # seconds, step, samples of the update before
        self._first_at: float | None = None  # when the first result was there, without pauses
        self._compiled = False
        self._paused_s = 0.0
        self._drawn_at = -math.inf
        self._line = ""

    def update(self, step: int, samples: int, loss: float, alone: bool = False) -> None:
        """Tells that `step` is done.

        Args:
          step: steps done, from 1, counted over all resumes.
          samples: samples trained on so far, all devices together; only differences matter.
          loss: the training loss of this step.
          alone: whether its result was awaited with no later step under way.
        """
        now = self._clock()
        self._first_at = now - self._paused_s if self._first_at is None else self._first_at
        if not alone:
            self._count(now - self._paused_s, step, samples)
        if (
            now - self._drawn_at >= (_TERMINAL_EVERY_S if self._terminal or self._notebook else _LOG_EVERY_S)
            or step >= self._total
        ):
            self._drawn_at = now
            self._draw(step, loss)

    def _count(self, seconds: float, step: int, samples: int) -> None:
        if self._before is not None and not self._compiled:
            then, first, trained = self._before
            self._sum = (self._sum[0] + seconds - then, self._sum[1] + step - first, self._sum[2] + samples - trained)
            if self._sum[0] - self._window[-1][0] >= _POINT_EVERY_S:
                self._window.append(self._sum)
            while len(self._window) > 1 and self._is_enough(self._window[1]):
                self._window.popleft()
        self._before, self._compiled = (seconds, step, samples), False

    def _is_enough(self, then: tuple[float, int, int]) -> bool:
        return then[0] <= self._sum[0] - _WINDOW_S and then[1] <= self._sum[1] - _FEWEST

    def compiled(self) -> None:
        """Leaves out what was since the last update: a program was compiled for the step that is under way."""
        self._compiled = True

    @property
    def trained_s(self) -> float:
        """Seconds since the first result, without pauses."""
        return 0.0 if self._first_at is None else self._clock() - self._paused_s - self._first_at

    @property
    def samples_per_s(self) -> float:
        """Throughput over about the last ten seconds of training; nan while it is not known."""
        return _rate(self._window[0], self._sum)

    @property
    def mean_samples_per_s(self) -> float:
        """Throughput of all training that counts; nan while it is not known."""
        return _rate((0.0, 0, 0), self._sum)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what happens inside, such as an evaluation, out of the throughput."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - start

    def note(self, text: str) -> None:
        """Writes a line of its own, above the progress line."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.note(text)
        elif self._terminal and self._line:
            log.write(self._stream, f"\r\x1b[K{text}\n{self._line}")
        else:
            log.write(self._stream, f"{text}\n")

    def close(self) -> None:
        """Ends the line, so that what is printed next starts on its own."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None
        if self._terminal and self._line:
            log.write(self._stream, "\n")
        self._line = ""

    def _draw(self, step: int, loss: float) -> None:
        text = f"step {step:,}/{self._total:,}  loss {loss:.4f}"
        if not math.isnan(rate := self.samples_per_s):
            seconds, steps = (now - then for now, then in zip(self._sum[:2], self._window[0][:2], strict=True))
            text += f"  {rate:,.0f} samples/s  {_clock_time((self._total - step) * seconds / steps)} left"
        if self._notebook and self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar = self._bar or NotebookBar(self._total, step, self._stream)
                self._bar.update(step, text)
            return
        if not self._terminal:
            log.write(self._stream, f"{text}\n")
            return
        # A line that wraps cannot be overwritten.
        self._line = text[: shutil.get_terminal_size().columns - 1]
        log.write(self._stream, f"\r{self._line}\x1b[K")


def _rate(then: tuple[float, int, int], now: tuple[float, int, int]) -> float:
    if now[1] - then[1] < _FEWEST or now[0] <= then[0]:
        return math.nan
    return (now[2] - then[2]) / (now[0] - then[0])


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


TITLES = {"auc": "AUC", "logloss": "log loss", "ne": "NE", "calibration": "calibration"}
OF_TASKS = {"accuracy": "accuracy", "mse": "MSE", "mae": "MAE"}


def results_table(
    rows: Sequence[tuple[str, Mapping[str, float | None]]], titles: Mapping[str, str] = MappingProxyType(TITLES)
) -> str:
    """The final table as aligned plain text, one line a row, without a newline at the end.

    Args:
      rows: a name and its measures, under the names that `metrics.evaluate` gives them: auc, logloss,
        ne, calibration. One that is missing, None or nan shows as "-".
      titles: measure -> head of its column; columns without any value are left out, but for the usual ones.
    """
    titles = {key: title for key, title in titles.items() if key in TITLES or any(key in found for _, found in rows)}
    cells = [["", *titles.values()]]
    for name, measures in rows:
        values = (measures.get(key) for key in titles)
        cells.append([name, *("-" if v is None or math.isnan(v) else f"{v:.4f}" for v in values)])
    lines = aligned(cells)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
