"""Event files hold what metrics.jsonl holds, each step once."""

import json
import struct
import sys

import pytest
from support.commands import assert_refused, inside

from recjax.errors import ConfigError, TrainingError
from recjax.train.run.tensorboard import EventFile
from recjax.train.run.writers import MetricsFile

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


def scalars(folder):
    """(step, tag, value) of the folder's one event file, in its order; the frame as the TFRecord format defines it."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events.out.tfevents.*")
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4  # length, its checksum; the event; its checksum
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    assert at == len(data)
    return found


def expected(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], f"{line['split']}/{key}", pytest.approx(value))
        for line in lines
        for key, value in line.items()
        if key not in ("step", "split") and value is not None
    ]


def line(step):
    return {"step": step, "split": "train", "loss": 1 / step, "samples_per_s": float("nan")}


def test_lines_become_scalars_at_once(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", None, trackers=("tensorboard",)) as log:
        log.write(line(1))
        log.write({"step": 2, "split": "validation", "auc": 0.75, "loss": 0.5})
        assert scalars(tmp_path) == [
            (1, "train/loss", 1.0),
            (2, "validation/auc", 0.75),
            (2, "validation/loss", 0.5),
        ]


def test_a_resumed_file_has_every_step_once(tmp_path):
    """Also when it is switched on later, and when the killed run had gone on after its checkpoint."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, None) as log:
        log.write(line(1))
    for resume_step, more in ((1, [2, 3]), (2, [3, 4, 5]), (4, [5, 6])):
        with MetricsFile(path, resume_step, trackers=("tensorboard",)) as log:
            for step in more:
                log.write(line(step))
        assert [step for step, _, _ in scalars(tmp_path)] == list(range(1, more[-1] + 1))
        assert scalars(tmp_path) == expected(tmp_path)


def test_without_the_setting_there_is_no_event_file(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", None) as log:
        log.write(line(1))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_said(tmp_path):
    file = EventFile(tmp_path)
    file._writer.close()
    file._writer._py_recordio_writer._writer = full = open("/dev/full", "wb")
    with pytest.raises(TrainingError, match=r"events\.out\.tfevents: No space left"):
        file.write([line(1)])
    file.close()  # which must not raise in the middle of that error
    with pytest.raises(OSError):
        full.close()
    (tmp_path / "gone").touch()
    with pytest.raises(TrainingError, match="cannot write"):
        EventFile(tmp_path / "gone")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, preset):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"train\.tensorboard=true needs a package that is not installed"):
        EventFile(tmp_path)
    done = inside("train", preset, "train.tensorboard=true", "--out", tmp_path / "run")
    assert_refused(done, 2, r'pip install -c constraints\.txt -e "\.\[tensorboard\]"')
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_run_writes_them_and_may_begin_to_when_it_goes_on(preset, tmp_path):
    run = tmp_path / "run"
    command = ("train", preset, "mesh.devices=2", "train.eval_every=12", "--out", run)
    assert inside(*command, "train.steps=2").status == 0
    done = inside(*command, "train.steps=12", "train.tensorboard=true")
    assert "resuming" in done.err and done.status == 0
    assert scalars(run) == expected(run)
    tags = {tag for _, tag, _ in scalars(run)}
    assert tags >= {"train/loss", "train/samples_per_s", "validation/auc", "test/auc", "test/logloss"}
    assert [step for step, tag, _ in scalars(run) if tag == "train/loss"] == list(range(1, 13))
