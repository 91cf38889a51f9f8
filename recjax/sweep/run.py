"""Doing the runs of a sweep, one after the other, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recjax import config as machinery
from recjax import strict_json
from recjax.errors import RecjaxError
from recjax.sweep.file import Run
from recjax.train.files import jsonable, write_whole
from recjax.train.folder import read_config

_PREFIX = "recjax: error: "


def result(run: Run) -> dict[str, Any]:
    """What is known of a run: a line of results.jsonl.

    Returns:
      `index`, `swept`, `config_hash`, `command`, `out` and `status`; of a run that is "done" also `steps`, `eval_step`,
      `samples_per_s`, `seconds`, `devices`, `versions`, and `validation` and `test` with the measures of that step.
      A run that is not done, or whose folder holds another config, is "open".
    """
    known: dict[str, Any] = {
        "index": run.index,
        "status": "open",
        "swept": run.swept,
        "config_hash": machinery.config_hash(run.config),
        "command": run.command,
        "out": str(run.out),
    }
    try:
        if machinery.config_hash(read_config(run.out, type(run.config))) != known["config_hash"]:
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
        return known | {"status": "done"} | measured | {"test": summary["eval"]}
    except (RecjaxError, OSError, ValueError, KeyError, TypeError):
        return known  # training there again mends what can be mended, and says what cannot


def results_text(results: Sequence[dict[str, Any]]) -> bytes:
    """results.jsonl: one JSON object a run."""
    return b"".join(json.dumps(jsonable(r), allow_nan=False).encode() + b"\n" for r in results)


def train_all(runs: Sequence[Run], results_file: Path | None = None) -> list[dict[str, Any]]:
    """Does all runs that are not done, and goes on when one fails.

    Args:
      runs: of one sweep.
      results_file: path of results.jsonl, written anew after every run; None writes none.

    Returns:
      The `result` of every run. The status of one that failed is "failed", and its `error` says why.
    """
    results = [result(run) for run in runs]
    for place, run in enumerate(runs):
        label = f"[run {run.index} of {runs[0].index} to {runs[-1].index}]" if len(runs) > 1 else f"[run {run.index}]"
        if results[place]["status"] == "done":
            _note(f"{label} done already: {run.out}")
            continue
        _note(f"{label} {run.command}")
        error = _train(run, label)
        results[place] = result(run)
        if error is not None or results[place]["status"] != "done":
            results[place] |= {"status": "failed", "error": error or "it ended without a result"}
        if results_file is not None:
            write_whole(results_file, results_text(results))
    return results


def _train(run: Run, label: str) -> str | None:
    """Trains in a process of its own, with its progress on our standard error; returns why it failed, if it did."""
    # -P: as for the command `recjax`, Python files in the working folder are nobody's modules.
    command = [sys.executable, "-P", "-m", "recjax.cli", *run.arguments, "--json"]
    last: deque[str] = deque(maxlen=1)
    said = None
    # Its result is read from its folder: a run that was done by another call is read in the same way.
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with _terminated(), subprocess.Popen(command, encoding="utf-8", errors="replace", **pipes) as child:
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if text := line.strip():
                    last.append(text)
                    _note(f"{label} {text}")
                    said = text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else said
        except BaseException:  # an interrupt, say: no run goes on alone
            child.terminate()  # upon which it saves a checkpoint
            try:
                child.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if child.returncode < 0:
        return f"killed by signal {-child.returncode} ({signal.Signals(-child.returncode).name})"
    return None if child.returncode == 0 else said or "".join(last) or f"exit status {child.returncode}"


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Turns SIGTERM, which would leave the child running, into the end of the program by an exception."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _note(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # training goes on when nobody listens any more
        print(text, file=sys.stderr, flush=True)
