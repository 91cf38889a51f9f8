"""Trackers hold the lines of metrics.jsonl, each once, also after a run was killed and resumed."""

import json
import os
import struct
import sys
import time
from pathlib import Path

import pytest
from support.commands import SMALL, assert_refused, inside

from recjax.errors import ConfigError, TrainingError
from recjax.train.run.writers import MetricsFile, Trackers

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


def line(step, **more):
    return {"step": step, "split": "train", "loss": 1 / step, "samples_per_s": float("nan"), **more}


def of_wandb(run: Path):
    """Rows of the one offline run, read without W&B's own code: LevelDB's log, as its documentation defines it."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    data, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block is padded
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                found = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in found.items() if not key.startswith("_")})
    return [(row.pop("step"), row) for row in rows]


def of_mlflow(run: Path):
    """(step, values) of the one run that is not deleted, as MLflow's plain files have them: "time value step"."""
    (meta,) = [
        path for path in run.glob("mlruns/*/*/meta.yaml") if "lifecycle_stage: active" in path.read_text().splitlines()
    ]
    rows = [
        (int(text.split()[2]), str(path.relative_to(meta.parent / "metrics")), float(text.split()[1]))
        for path in (meta.parent / "metrics").rglob("*")
        if path.is_file()
        for text in path.read_text().splitlines()
    ]
    return [(step, {key: value}) for step, key, value in rows]


READERS = {"wandb": of_wandb, "mlflow": of_mlflow}


def shown(name, run):
    """Every (step, measure, value) that a tracker holds, sorted; a repeated one would stand twice."""
    end = time.monotonic() + 20  # W&B's own process writes the last rows when the run has ended
    while not (rows := _shown(name, run)) == expected(run) and time.monotonic() < end:
        time.sleep(0.1)
    return rows


def _shown(name, run):
    return sorted((step, key, value) for step, row in READERS[name](run) for key, value in row.items())


def expected(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return sorted(
        (each["step"], f"{each['split']}/{key}", pytest.approx(value))
        for each in lines
        for key, value in each.items()
        if key not in ("step", "split") and value is not None
    )


@pytest.fixture(params=sorted(READERS))
def tracker(request, monkeypatch):
    pytest.importorskip(request.param)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # and back, for what follows this test
    return request.param


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # of these packages
def test_a_resumed_run_has_each_line_once(tracker, tmp_path):
    """Also when it is switched on later, and when the killed run had gone on after its checkpoint."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, None) as log:
        log.write(line(1))
    for resume_step, more in ((1, [2, 3]), (2, [3, 4, 5]), (4, [5, 6])):
        with MetricsFile(path, resume_step, (tracker,), settings={"train.steps": "7"}) as log:
            for step in more:
                log.write(line(step))
            log.write({"step": 2, "split": "test", "auc": 0.75})  # the chosen step, which is an earlier one
    assert [step for step, key, _ in shown(tracker, tmp_path) if key == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert shown(tracker, tmp_path) == expected(tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_a_run_of_the_command_line_tells_its_tracker(tracker, preset, tmp_path):
    run = tmp_path / "run"
    done = inside("train", preset, *SMALL, f"train.trackers={tracker}", "--out", run)
    assert done.status == 0, done.err
    assert shown(tracker, run) == expected(run)
    assert {"train/loss", "test/auc"} <= {key for _, key, _ in shown(tracker, run)}


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_missing_package_names_the_extra(name, preset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"train\.trackers={name} needs a package that is not installed"):
        Trackers((name,), tmp_path, b"", {})
    done = inside("train", preset, f"train.trackers={name}", "--out", tmp_path / "run")
    assert_refused(done, 2, rf'pip install -c constraints\.txt -e "\.\[{name}\]"')
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused_with_those_that_there_are(preset, tmp_path):
    done = inside("train", preset, "train.trackers=comet", "--out", tmp_path / "run")
    assert_refused(done, 2, r"train\.trackers=comet", "wandb or mlflow")


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_a_folder_that_cannot_be_written_is_said(tracker, tmp_path):
    (tmp_path / {"wandb": "wandb", "mlflow": "mlruns"}[tracker]).touch()
    with pytest.raises(TrainingError, match=r"cannot (write|keep)"):
        Trackers((tracker,), tmp_path, b"", {})
