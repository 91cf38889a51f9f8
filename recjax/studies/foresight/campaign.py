"""Cases predicted and measured in passes, each result a line of a file: what was done is not done again.

DIR/machine.json    the machine: measured at the beginning, or a copy of the one that was given
DIR/campaign.json   what the records depend on
DIR/records.jsonl   a line for each prediction and each pass of a measurement
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, DataError, RecjaxError
from recjax.planning.machine import Machine
from recjax.studies.foresight import measure
from recjax.studies.foresight.analysis import Found
from recjax.studies.foresight.cases import Case
from recjax.utils.files import write_json

RECORDS, SETUP = "records.jsonl", "campaign.json"


def begin(folder: Path, setup: dict[str, Any]) -> None:
    """Begins a campaign in a folder, or goes on with one of the same setup.

    Raises:
      ConfigError: the folder has records of another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETUP
    if path.is_file():
        then = json.loads(path.read_text(encoding="utf-8"))
        if differing := sorted(key for key in setup if then.get(key) != setup[key]):
            raise ConfigError(
                f"{folder} holds a campaign with other settings ({', '.join(differing)}). Give the same ones to go on "
                "with it, or another --out."
            )
    write_json(path, setup)


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a campaign; a last line that a killed run left unfinished is none.

    Raises:
      DataError: another line is damaged.
    """
    path, found = folder / RECORDS, []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise DataError(
                    f"{path}:{number}: {error}. Delete that line; what it said is then measured again."
                ) from error
    return found


def run(
    folder: Path, cases: Sequence[Case], machine: Machine, passes: int, seconds: float, minutes: float,
    tell: Callable[[str], None],
) -> bool:  # fmt: skip
    """Runs the rest of a campaign: every case once in every pass, all others between.

    Args:
      folder: of the campaign.
      cases: all of it.
      machine: to predict on.
      passes: over all cases.
      seconds: that a case is timed in a pass.
      minutes: after which it stops; 0: when all is done.
      tell: called with what is being done.

    Returns:
      Whether all is done.
    """
    done = {(record["case"], record["pass"]) for record in records(folder)}
    began = time.monotonic()
    with (folder / RECORDS).open("a", encoding="utf-8") as file:
        if file.tell() and not (folder / RECORDS).read_bytes().endswith(b"\n"):
            file.write("\n")

        def keep(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        for number in range(passes):
            for place, case in enumerate(cases, 1):
                for turn in (-1, 0) if number == 0 else (number,):  # -1: a prediction, before what it is compared with
                    if (case.name, turn) in done:
                        continue
                    if minutes and time.monotonic() - began > 60 * minutes:
                        return False
                    doing = "predicting" if turn < 0 else f"pass {turn + 1} of {passes},"
                    tell(f"{doing} case {place} of {len(cases)}: {case.name}")
                    keep({"case": case.name, "pass": turn, **_figures(case, machine, turn, seconds)})
    return True


def _figures(case: Case, machine: Machine, turn: int, seconds: float) -> dict[str, Any]:
    """Result of a prediction or a pass, or why it was refused."""
    try:
        if turn < 0:
            return dict(measure.foreseen(case.config, machine))
        return measure.measured(case.config, seconds)
    except RecjaxError as error:
        return {"refused": str(error)}


def found(folder: Path, cases: Sequence[Case]) -> tuple[list[Found], dict[str, str]]:
    """The cases that were predicted and measured at least once, and why others were refused."""
    predicted: dict[str, dict[str, Any]] = {}
    passes: dict[str, list[dict[str, Any]]] = {}
    refused: dict[str, str] = {}
    for record in records(folder):
        if "refused" in record:
            refused[record["case"]] = record["refused"]
        elif record["pass"] < 0:
            predicted[record["case"]] = record
        else:
            passes.setdefault(record["case"], []).append(record)
    known = [
        Found(case.kind, case.name, case.base, case.config.mesh.devices, predicted[case.name], passes[case.name])
        for case in cases
        if case.name in predicted and case.name in passes and case.name not in refused
    ]
    return known, refused
