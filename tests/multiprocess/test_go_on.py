"""Several processes start from another run, and go on with further data, as one process does."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.days import MODEL, TABLE, train, write_day
from support.processes import PROGRAM, assert_equal, environment, free_port

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]


def together(*arguments: object, processes: int = 2) -> None:
    """Runs a command in several processes, and fails with what they wrote."""
    command, port = [sys.executable, "-c", PROGRAM, *map(str, arguments)], free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [forked.Popen(command, env=environment(processes, k, port), **pipes) for k in range(processes)]
    texts = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, b"\n".join(texts).decode()


def test_two_processes_do_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    days = [write_day(tmp_path / f"{d}.csv", range(20 * d, 60 + 20 * d), 280, d) for d in range(3)]
    exact = ("compute_dtype=float64", "plan=row_wise", "train.log_every=1")
    train(days[0], tmp_path / "run", *exact)
    for name in ("one", "two"):
        start = (f"train.init_from={tmp_path / 'run'}", "train.epochs=1", *exact)
        words = ("train", "table", f"data.from={days[1]}", *TABLE, *MODEL, *start, "--out", tmp_path / name)
        further = ("train", tmp_path / name, "--more", days[2])
        if name == "one":
            together(*words, processes=1)
            together(*further, processes=1)
        else:
            together(*words, "mesh.devices=2")
            together(*further, "mesh.devices=2")
    assert_equal(tmp_path / "one", tmp_path / "two", 1e-9)
    ahead = [(tmp_path / name / "metrics.jsonl").read_text().count('"ahead"') for name in ("one", "two")]
    assert ahead == [1, 1]
