"""Doing the runs of a sweep, one after the other, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from recjax import settings
from recjax.errors import Interrupted, RecjaxError, StoppedError
from recjax.parallel.stopping import handling
from recjax.sweep.file import Run
from recjax.train.run.folder import holds_code_of, read_config
from recjax.utils import log, strict_json
from recjax.utils.files import jsonable, write_whole

_PREFIX = "recjax: error: "


def result(run: Run) -> dict[str, Any]:
    """Result of a run: a line of results.jsonl.

    Returns:
      `index`, `swept`, `config_hash`, `command`, `out` and `status`; of a run that is "done" also `steps`, `eval_step`,
      `samples_per_s`, `seconds`, `devices`, `versions`, and `validation` and `test` with the measures of that step.
      A run that is not done, or whose folder holds another config or other code, is "open".
    """
    known: dict[str, Any] = {
        "index": run.index,
        "status": "open",
        "swept": run.swept,
        "config_hash": settings.config_hash(run.config),
        "command": run.command,
        "out": str(run.out),
    }
    try:
        if not holds_code_of(run.out, run.config):
            return known
        if settings.config_hash(read_config(run.out, type(run.config))) != known["config_hash"]:
            return known
        summary = strict_json.parse((run.out / "summary.json").read_bytes())
        lines = [
            strict_json.parse(line) for line in (run.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        chosen = [line for line in lines if (line["split"], line["step"]) == ("validation", summary["eval_step"])]
        names = ("steps", "eval_step", "samples_per_s", "seconds", "devices", "versions")
        measured = {name: summary[name] for name in names}
        measured["validation"] = (
            {name: chosen[-1][name] for name in summary["eval"] if name in chosen[-1]} if chosen else {}
        )  # only a large split has auc_low and auc_high
        measured["test"] = summary["eval"] if summary.get("eval_split", "test") == "test" else {}
        return known | {"status": "done"} | measured
    except (RecjaxError, OSError, ValueError, KeyError, TypeError):
        return known  # training there again mends what can be mended, and says what cannot


def results_text(results: Sequence[dict[str, Any]]) -> bytes:
    """results.jsonl: one JSON object a run."""
    return b"".join(json.dumps(jsonable(r), allow_nan=False).encode() + b"\n" for r in results)


def train_all(runs: Sequence[Run], results_file: Path | None = None) -> list[dict[str, Any]]:
    """Does all runs that are not done, and goes on when one fails.

    Args:
      runs: of one sweep.
      results_file: path of results.jsonl, written again after every run; None writes none.

    Returns:
      The `result` of every run. The status of one that failed is "failed", and its `error` says why.

    Raises:
      Interrupted, StoppedError: SIGINT or SIGTERM came. The run under way was stopped too, and has saved.
    """
    results = [result(run) for run in runs]
    signals = Signals()
    with handling((signal.SIGINT, signal.SIGTERM), signals.take):
        for place, run in enumerate(runs):
            label = (
                f"[run {run.index} of {runs[0].index} to {runs[-1].index}]" if len(runs) > 1 else f"[run {run.index}]"
            )
            if signals.taken:
                break
            if results[place]["status"] == "done":
                log.info(f"{label} done already: {run.out}")
                continue
            log.info(f"{label} {run.command}")
            error = train_apart(run, label, signals)
            results[place] = result(run)
            if signals.taken and results[place]["status"] != "done":
                error = None  # it stays open
            elif error is not None or results[place]["status"] != "done":
                results[place] |= {"status": "failed", "error": error or "it ended without a result"}
            if results_file is not None:
                write_whole(results_file, results_text(results))
            if signals.taken:
                break
    if signals.taken:
        raise signals.error()
    return results


class Signals:
    """SIGINT and SIGTERM, which go to the run under way too."""

    def __init__(self, what: str = "the sweep", next_time: str = "it skips the runs that are done") -> None:
        """Has taken none; what is stopped, and what the same command does then, stand in the error."""
        self._what, self._next_time = what, next_time
        self.taken: list[int] = []
        self._child: subprocess.Popen[str] | None = None

    def take(self, number: int, frame: object) -> None:
        """Keeps a signal, and hands it to the child."""
        self.taken.append(number)
        if self._child is not None:
            self._child.send_signal(number)

    def give_to(self, child: subprocess.Popen[str]) -> None:
        """From now on; and those that came while it was started."""
        self._child = child
        for number in self.taken:
            child.send_signal(number)

    def error(self) -> Interrupted | StoppedError:
        """With which the sweep ends."""
        text = f"Give the same command to go on: {self._next_time}."
        if self.taken[0] == signal.SIGINT:
            return Interrupted(f"{self._what} was stopped by Ctrl-C. {text}")
        return StoppedError(f"{self._what} was stopped by SIGTERM. {text}")


class Watcher(Protocol):
    """Looks at a run while it trains, in a thread of its own, and may stop it."""

    def __call__(self, run: Run, child: subprocess.Popen[str], ended: threading.Event) -> None:
        """Returns soon after `ended` is set."""


def train_apart(
    run: Run, label: str, signals: Signals, watch: Watcher | None = None, keep: Sequence[int] = ()
) -> str | None:
    """Trains in a process of its own, with its progress on our standard error.

    Args:
      run: to train, or to go on with.
      label: before each of its lines.
      signals: those of this process, which go to it too.
      watch: looks at it meanwhile.
      keep: file descriptors that it inherits.

    Returns:
      Why it failed, if it did.
    """
    # -P: as for the command `recjax`, Python files in the working folder are nobody's modules.
    command = [sys.executable, "-P", "-m", "recjax", *run.arguments, "--json"]
    last: deque[str] = deque(maxlen=1)
    said = None
    # Its result is read from its folder: a run that was done by another call is read in the same way.
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(
            subprocess.Popen(command, encoding="utf-8", errors="replace", pass_fds=keep, **pipes)
        )
        signals.give_to(child)
        if watch is not None:
            watcher = threading.Thread(target=watch, args=(run, child, ended), name="watch")
            watcher.start()
            stack.callback(watcher.join)
        stack.callback(ended.set)
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if text := line.strip():
                    last.append(text)
                    log.info(f"{label} {text}")
                    said = text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else said
        except BaseException:  # no run goes on alone
            child.terminate()  # upon which it saves a checkpoint
            try:
                child.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if child.returncode < 0:
        return f"killed by signal {-child.returncode} ({signal.Signals(-child.returncode).name})"
    return None if child.returncode == 0 else said or "".join(last) or f"exit status {child.returncode}"
