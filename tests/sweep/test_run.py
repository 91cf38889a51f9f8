"""Runs of a sweep in processes of their own: one fails, one was killed, the others are done once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from support import forked
from support.commands import inside, outside, start
from support.processes import PROGRAM

import recjax
from recjax import settings
from recjax.sweep import run as sweep_run
from recjax.sweep.file import read_sweep
from recjax.train.checkpoint.checkpoints import Checkpoints

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]


@pytest.fixture
def file(preset, tmp_path):
    """Three runs, of which the middle one cannot be: it has nothing to train on."""
    path = tmp_path / "mine.toml"
    recjax.load(preset)  # the sweep lies where its preset does not, so its user has run that before
    path.write_text(
        f'preset = "{preset}"\noverrides = ["train.steps=12", "mesh.devices=2"]\nsort = "validation.auc"\n'
        "[zip]\ntrain.batch_size = [64, 48, 32]\ndata.train_rows = [1500, 0, 1500]\n"
    )
    return path


@pytest.fixture
def forks(monkeypatch):
    """The processes of a sweep are forks instead of new interpreters."""

    def popen(command, **options):
        assert command[:4] == [sys.executable, "-P", "-m", "recjax"]
        environment = os.environ | {"GLIBC_TUNABLES": ""}
        return forked.Popen([sys.executable, "-c", PROGRAM, *command[4:]], env=environment, **options)

    monkeypatch.setattr(sweep_run, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": popen}))


def rows(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_sweep_goes_on_after_a_failure_resumes_and_skips(file, forks, tmp_path):
    out = tmp_path / "out"
    runs = read_sweep(file, out).runs
    # Its first run was killed on the way, after its first checkpoint.
    with start(*runs[0].arguments) as process:
        while process.poll() is None and not Checkpoints(runs[0].out / "checkpoints", 2).steps():
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL

    done = inside("sweep", file, "--out", out, "--json")
    assert done.status == 1
    assert "[run 0 of 0 to 2] resuming" in done.err
    assert done.err.count("[run 1 of 0 to 2] recjax: error: split 'train' of synthetic has no rows") == 1
    assert done.err.splitlines()[-1].startswith("recjax: error: 1 of 3 runs failed: 1. ")
    result = json.loads(done.out)
    assert done.out.count("\n") == 1
    by_index = {row["index"]: row for row in result["runs"]}
    assert [by_index[i]["status"] for i in range(3)] == ["done", "failed", "done"]
    assert by_index[1]["error"].startswith("split 'train' of synthetic has no rows")
    # Sorted by validation AUC, with what has none at the end; the file keeps the order of the runs.
    assert result["runs"][0]["validation"]["auc"] > result["runs"][1]["validation"]["auc"]
    assert result["runs"][2]["index"] == 1
    assert rows(out) == [by_index[i] for i in range(3)]
    # The figures are those of the run folder.
    for run in (runs[0], runs[2]):
        summary = json.loads((run.out / "summary.json").read_text())
        row = by_index[run.index]
        assert (row["steps"], row["test"], row["eval_step"]) == (12, summary["eval"], summary["eval_step"])
        lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
        best = max(line["auc"] for line in lines if line["split"] == "validation")
        assert row["validation"]["auc"] == best
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")

    # Again: what is done stays untouched, what failed is tried again.
    before = {path: path.stat().st_mtime_ns for run in (runs[0], runs[2]) for path in run.out.iterdir()}
    again = inside("sweep", file, "--out", out)
    assert again.status == 1
    assert "[run 0 of 0 to 2] done already" in again.err and "[run 2 of 0 to 2] done already" in again.err
    assert "[run 1 of 0 to 2] recjax train" in again.err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "failed" in again.out and again.out.splitlines()[0].split()[:3] == ["run", "batch_size", "train_rows"]


def test_one_run_by_its_index_and_the_results_of_all(file, forks, tmp_path):
    out = tmp_path / "out"
    one = inside("sweep", file, "--out", out, "--index", "2", "--json")
    (row,) = one.result["runs"]
    assert (row["index"], row["status"]) == (2, "done")
    assert row["swept"] == {"train.batch_size": "32", "data.train_rows": "1500"}
    assert not (out / "results.jsonl").exists()
    table = inside("sweep", file, "--out", out, "--results")
    assert table.status == 0 and "recjax train" not in table.err
    assert len(re.findall(r" open$", table.out, re.MULTILINE)) == 2
    assert [r["status"] for r in rows(out)] == ["open", "open", "done"]
    assert inside("sweep", file, "--out", out, "--index", "1").status == 1


def test_a_folder_of_another_config_is_not_done(file, tmp_path):
    run = read_sweep(file, tmp_path / "out").runs[2]
    assert sweep_run.result(run)["status"] == "open"
    assert outside(*run.arguments).status == 0
    assert sweep_run.result(run)["status"] == "done"
    config = run.out / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    assert sweep_run.result(run)["status"] == "open"
    config.write_text("{")
    assert sweep_run.result(run)["status"] == "open"


def test_a_run_with_a_test_split_too_large_to_be_kept_is_done(file, tmp_path):
    """Its test AUC comes with bounds, which that of a smaller validation split does not have."""
    run = read_sweep(file, tmp_path / "out").runs[0]
    run.out.mkdir(parents=True)
    (run.out / "config.json").write_text(settings.to_json(run.config))
    measures = {"auc": 0.7, "logloss": 0.5, "ne": 0.9, "calibration": 1.0, "samples": 600}
    test = measures | {"auc_low": 0.69, "auc_high": 0.71, "samples": 11_000_000}
    plain = {"steps": 5, "eval_step": 5, "samples_per_s": 1.0, "seconds": 1.0, "devices": 1, "versions": {}}
    (run.out / "summary.json").write_text(json.dumps(plain | {"eval": test, "eval_split": "test"}))
    (run.out / "metrics.jsonl").write_text(json.dumps({"step": 5, "split": "validation", "loss": 0.5, **measures}))
    result = sweep_run.result(run)
    assert (result["status"], result["validation"], result["test"]) == ("done", measures, test)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_sweep_saves_its_run_and_begins_no_other(file, tmp_path, number, status):
    file.write_text(file.read_text().replace("train.steps=12", "train.steps=1000000"))
    out = tmp_path / "out"
    # A process that was started in the background, as CI may be, ignores SIGINT, and so do its children.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    with start("sweep", file, "--out", out, before=heed) as process:
        while not list(out.glob("*/checkpoints/[0-9]*")):  # its first run is under way
            time.sleep(0.05)
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        (child,) = map(int, found.stdout.split())
        if number == signal.SIGINT:  # as a terminal does
            os.kill(child, number)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    *_, last = err.splitlines()
    again = "Give the same command to go on: it skips the runs that are done."
    assert last == f"recjax: error: the sweep was stopped by {name}. {again}"
    label = re.escape("[run 0 of 0 to 2]")
    (step,) = re.findall(rf"{label} recjax: error: stopped by {name} after step (\d+); its checkpoint is complete", err)
    assert "[run 1 of" not in err and [row["status"] for row in rows(out)] == ["open"] * 3
    assert max(Checkpoints(read_sweep(file, out).runs[0].out / "checkpoints", 2).steps()) == int(step)
