"""Several real processes on this machine, joined over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import recjax
from recjax.lazy import load
from recjax.train.checkpoint import Checkpoints

# Joins the others if there are any, then makes the runs that it is told, one after the other.
_RUNS = """
import json, sys
from recjax import distributed, watch
place = distributed.place()
if place:
    distributed.join(place)
    watch.start().joined(place.limit_s)
import recjax
for name, preset, overrides in json.loads(sys.argv[1]):
    recjax.fit(recjax.load(preset, *overrides), out=name)
if place:
    watch.start().done()
    distributed.leave()
"""


def environment(processes: int, process: int, port: int, limit_s: int = 60) -> dict[str, str]:
    """Of one process of several; of the only one, that of this process."""
    here = str(Path(recjax.__file__).parent.parent)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RECJAX_")}
    clean |= {"PYTHONPATH": here, "GLIBC_TUNABLES": ""}
    if processes == 1:
        return clean
    return clean | {
        "RECJAX_COORDINATOR": f"127.0.0.1:{port}",
        "RECJAX_PROCESSES": str(processes),
        "RECJAX_PROCESS": str(process),
        "RECJAX_LIMIT_S": str(limit_s),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def run_together(processes: int, runs: list[tuple[Path, Path, list[str]]], timeout_s: float = 300) -> None:
    """Makes the runs (folder, preset, overrides) in so many processes; fails with what they wrote if one fails."""
    port = free_port()
    plain = json.dumps([(str(out), str(preset), overrides) for out, preset, overrides in runs])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RUNS, plain],
            env=environment(processes, k, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(processes)
    ]
    try:
        wrote = [p.communicate(timeout=timeout_s)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    assert not any(p.returncode for p in started), "\n".join(text[-3000:] for text in wrote)


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def final(run: Path) -> dict[str, Any]:
    """The arrays of a run's newest checkpoint by their path."""

    def flat(arrays: dict[str, Any], at: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in arrays.items():
            found |= flat(value, f"{at}/{key}") if isinstance(value, dict) else {f"{at}/{key}": value}
        return found

    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        found = checkpoints.newest(print, lambda restored: flat(load(restored.arrays), ""))
    assert found is not None
    return found


def assert_equal(one: Path, other: Path, tolerance: float) -> None:
    """Losses, tables, slots and dense parts agree, relative to each value and absolutely near 0."""
    a, b = losses(one), losses(other)
    assert a.keys() == b.keys()
    np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=tolerance)
    arrays, others = final(one), final(other)
    assert arrays.keys() == others.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(others[path], array, rtol=tolerance, atol=tolerance, err_msg=path)
