"""metrics.jsonl, the progress line and the final table."""

import contextlib
import io
import json
import math
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.errors import TrainingError
from recjax.train.run import writers
from recjax.train.run.writers import MetricsFile, Progress, in_notebook, results_table


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(path, steps):
    with MetricsFile(path, None) as file:
        for step in steps:
            file.write({"step": step, "split": "train", "loss": step / 10})


def test_a_line_is_on_the_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, None)
    file.write({"step": 10, "split": "train", "loss": np.float32(0.5), "auc": float("nan")})
    assert path.read_text() == '{"step": 10, "split": "train", "loss": 0.5, "auc": null}\n'
    file.close()
    file.close()


def test_a_line_needs_an_integer_step(tmp_path):
    with MetricsFile(tmp_path / "m", None) as file:
        with pytest.raises(TypeError, match="integer step"):
            file.write({"step": "10"})
        with pytest.raises(KeyError):
            file.write({"loss": 1.0})


def test_resume_drops_later_steps_and_a_fresh_run_drops_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, [10, 20, 30, 40])
    with MetricsFile(path, 20) as file:
        assert [line["step"] for line in read(path)] == [10, 20]
        file.write({"step": 30, "loss": 9.0})
    assert read(path)[:2] == [{"step": s, "split": "train", "loss": s / 10} for s in (10, 20)]
    assert read(path)[2:] == [{"step": 30, "loss": 9.0}]
    MetricsFile(path, None).close()
    assert path.read_text() == ""


def test_lines_are_not_added_to_what_a_link_points_to(tmp_path):
    path, there = tmp_path / "metrics.jsonl", tmp_path / "there"
    fill(there, [10, 20])
    before = there.read_bytes()
    path.symlink_to(there)
    with MetricsFile(path, 20) as file:
        file.write({"step": 30, "split": "train", "loss": 3.0})
    assert there.read_bytes() == before and [line["step"] for line in read(path)] == [10, 20, 30]


def test_lines_of_the_step_itself_are_dropped_by_split(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "split": split} for step in (10, 20) for split in ("train", "validation", "test")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    MetricsFile(path, 20, without=["validation"]).close()
    assert [(line["step"], line["split"]) for line in read(path)] == [(10, "train"), (10, "validation"), (20, "train")]


@given(st.integers(0, 200), st.integers(0, 60))
def test_a_file_cut_anywhere_has_each_step_once_after_resume(tmp_path_factory, cut, resume):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    steps = [10, 20, 30, 40, 50]
    fill(path, steps)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    complete = [s for i, s in enumerate(steps) if len(b"".join(whole.splitlines(True)[: i + 1])) <= cut + 1]
    with MetricsFile(path, resume) as file:
        file.write({"step": resume + 1})
    assert [line["step"] for line in read(path)] == [s for s in complete if s <= resume] + [resume + 1]


def test_garbage_that_no_kill_leaves_is_refused_with_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in ('{"step": 1}\nnonsense\n{"step": 2}\n', '{"step": 1}\n{"loss": 1}\n', '{"step": 1}\n[1]\n'):
        path.write_text(text)
        with pytest.raises(TrainingError, match=r"metrics\.jsonl, line 2: .*delete that line"):
            MetricsFile(path, 5)
        assert path.read_text() == text


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"cannot write .*nowhere/metrics\.jsonl: No such file"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl", None)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_a_training_error(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", None) as file:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file._file.fileno())
        os.close(full)
        with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
            file.write({"step": 1})


def test_a_write_that_the_system_takes_in_parts_is_completed(tmp_path):
    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[:3])

        def close(self):
            self.file.close()

    with MetricsFile(tmp_path / "metrics.jsonl", None) as file:
        file._file = Slow(file._file)
        file.write({"step": 1, "loss": 0.5})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_progress_in_a_file_is_one_line_every_few_seconds():
    stream, clock = io.StringIO(), Clock()
    with contextlib.closing(Progress(1000, stream, clock)) as progress:
        for step in range(1, 1001):  # eight steps a second
            progress.update(step, step * 256, 0.5)
            clock.now += 0.125
    lines = stream.getvalue().splitlines()
    assert len(lines) == 26, "125 s: the first step, one each five seconds, the last step"
    assert lines[0] == "step 1/1,000  loss 0.5000"
    assert lines[2] == "step 81/1,000  loss 0.5000  2,048 samples/s  1:55 left"
    assert lines[-1] == "step 1,000/1,000  loss 0.5000  2,048 samples/s  0:00 left"
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_progress_in_a_notebook_is_one_bar_with_notes_above_it(monkeypatch):
    stream, clock = io.StringIO(), Clock()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(writers, "in_notebook", lambda: True)
    with contextlib.closing(Progress(1000, clock=clock)) as progress:
        for step in range(501, 1001):  # a run that goes on
            progress.update(step, step * 256, 0.5)
            if step == 700:
                progress.note("step 700: validation AUC 0.7")
            clock.now += 0.125
    text = stream.getvalue()
    assert text.count("\n") == 2 and text.endswith("\n"), "the note and the end"
    assert "\rstep 700: validation AUC 0.7\n" in text
    assert " 60%|" in text and "step 600/1,000  loss 0.5000  2,048 samples/s  0:50 left" in text
    last = text.rpartition("\r")[2]
    assert last.startswith("100%|") and "step 1,000/1,000  loss 0.5000" in last


def test_who_is_the_kernel_of_a_notebook(monkeypatch):
    class Shell:
        pass

    class Kernels:
        shell = None
        get_ipython = classmethod(lambda cls: cls.shell)

    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook() and "IPython" not in sys.modules
    monkeypatch.setitem(sys.modules, "IPython", Kernels)
    assert not in_notebook()
    Kernels.shell = Shell()  # IPython in a terminal
    assert not in_notebook()
    Kernels.shell.kernel = object()
    assert in_notebook()


def test_progress_leaves_compilation_out_and_follows_the_recent_rate():
    clock = Clock()
    progress = Progress(10_000, io.StringIO(), clock)
    clock.now += 300  # compiling
    progress.update(1, 100, 0.0)
    assert math.isnan(progress.samples_per_s) and math.isnan(progress.mean_samples_per_s)
    for step in range(2, 102):  # 100 samples/s for 100 s
        clock.now += 1
        progress.update(step, step * 100, 0.0)
    assert progress.samples_per_s == pytest.approx(100)
    for step in range(102, 142):  # then 400 samples/s for 10 s
        clock.now += 0.25
        progress.update(step, step * 100, 0.0)
    assert progress.samples_per_s == pytest.approx(400, rel=0.1)
    assert progress.mean_samples_per_s == pytest.approx((141 - 1) * 100 / 110)


def test_progress_measures_steps_that_are_longer_than_the_window():
    clock = Clock()
    progress = Progress(10, io.StringIO(), clock)
    for step in range(1, 5):
        progress.update(step, step * 60, 0.0)
        clock.now += 30
    assert progress.samples_per_s == pytest.approx(2)


def test_progress_measures_steps_that_are_much_shorter_than_its_points():
    clock = Clock()
    progress = Progress(100_000, io.StringIO(), clock)
    for step in range(1, 50_001):
        progress.update(step, step, 0.0)
        clock.now += 0.001
    assert progress.samples_per_s == pytest.approx(1000, rel=0.02)
    assert len(progress._window) < 200


def test_a_pause_is_left_out_of_the_throughput():
    clock = Clock()
    progress = Progress(10, io.StringIO(), clock)
    for step in range(1, 5):
        progress.update(step, step * 10, 0.0)
        clock.now += 1
        with progress.paused():
            clock.now += 50
    assert progress.samples_per_s == progress.mean_samples_per_s == pytest.approx(10)


@pytest.mark.parametrize("dispatch_waits", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9])
def test_a_rate_is_of_whole_steps_however_they_are_dispatched(steps, dispatch_waits):
    """Steps of 10 samples take 2 s, whether dispatching one takes until its end, or the device works on by itself."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(steps, stream, clock)
    ends, free = [], clock.now  # of the steps, and when the device has done all of them
    for step in range(1, steps + 1):
        free = max(free, clock.now) + 2
        ends.append(free)
        if dispatch_waits:
            clock.now = free
        if step > 1:  # the result of the step before
            clock.now = max(clock.now, ends[-2])
            progress.update(step - 1, 10 * (step - 1), 0.5)
    clock.now = ends[-1]
    progress.update(steps, 10 * steps, 0.5, alone=True)
    measured = steps - 2
    for rate in (progress.samples_per_s, progress.mean_samples_per_s):
        assert math.isnan(rate) if measured < 2 else rate == pytest.approx(5)
    known = "  5 samples/s  0:00 left" if measured >= 2 else ""
    assert stream.getvalue().splitlines()[-1] == f"step {steps}/{steps}  loss 0.5000{known}"


def test_a_step_that_compiles_counts_neither_in_time_nor_in_samples():
    clock = Clock()
    progress = Progress(20, io.StringIO(), clock)
    for step in range(1, 9):
        if step in (3, 6):  # for the step that comes next
            clock.now += 100
            progress.compiled()
        clock.now += 1
        progress.update(step, 10 * step, 0.5)
    assert progress.mean_samples_per_s == pytest.approx(10)
    assert progress.trained_s == pytest.approx(207)  # since the first result: a checkpoint is due by what could be lost


def screen(text):
    """What a terminal shows: carriage return, clear to the end of the line, newline."""
    lines, column = [""], 0
    text = text.replace("\x1b[K", "\x00")
    for character in text:
        if character == "\n":
            lines, column = [*lines, ""], 0
        elif character == "\r":
            column = 0
        elif character == "\x00":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1], column = lines[-1][:column] + character + lines[-1][column + 1 :], column + 1
    return lines


def test_progress_on_a_terminal_overwrites_itself(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stream, clock = Terminal(), Clock()
    with contextlib.closing(Progress(5, stream, clock)) as progress:
        progress.update(1, 100_000, 1e12)
        for step in (2, 3, 4):
            clock.now += 1
            progress.update(step, step * 100_000, 0.25)
        assert screen(stream.getvalue()) == ["step 4/5  loss 0.2500  100,000 samples/s  0:01 left"]
        progress.note("checkpoint 4 written")
        clock.now += 1
        progress.update(5, 500_000, 0.25)
    print("table", file=stream)
    assert screen(stream.getvalue()) == [
        "checkpoint 4 written",
        "step 5/5  loss 0.2500  100,000 samples/s  0:00 left",
        "table",
        "",
    ]


def test_progress_on_a_narrow_terminal_does_not_wrap(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    Progress(3, stream, Clock()).update(1, 1, 0.5)
    assert len(screen(stream.getvalue())[0]) == 19


def test_progress_writes_to_standard_error_only(capsys):
    with contextlib.closing(Progress(1)) as progress:
        progress.update(1, 1, 0.5)
        progress.note("a note")
    out, err = capsys.readouterr()
    assert out == "" and "step 1/1" in err and "a note\n" in err


def test_training_goes_on_when_nobody_reads_the_progress(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w", buffering=1)
    progress = Progress(2, stream)
    progress.update(1, 1, 0.5)
    progress.update(2, 2, 0.5)
    progress.close()
    with pytest.raises(BrokenPipeError):
        stream.close()
    monkeypatch.setattr(sys, "stderr", None)
    Progress(1).update(1, 1, 0.5)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.6, "1:00:00"), (90061, "25:01:01")]
)
def test_time_left(seconds, shown):
    clock, stream = Clock(), io.StringIO()
    progress = Progress(5, stream, clock)
    for step in (1, 2, 3, 4):
        progress.update(step, step, 0.5)
        clock.now += seconds
    if seconds >= 5:
        assert stream.getvalue().splitlines()[-1].endswith(f"  {shown} left")


def test_results_table():
    rows = [
        ("recjax, test", {"auc": 0.76543, "logloss": 0.51, "ne": 0.87654, "calibration": 1.0123, "samples": 20000}),
        ("per-movie mean", {"auc": 0.7}),
        ("no skill", {"auc": float("nan"), "logloss": None, "ne": 10.0}),
    ]
    assert results_table(rows).splitlines() == [
        "                   AUC  log loss       NE  calibration",
        "------------------------------------------------------",
        "recjax, test    0.7654    0.5100   0.8765       1.0123",
        "per-movie mean  0.7000         -        -            -",
        "no skill             -         -  10.0000            -",
    ]


def test_the_test_line_of_a_finished_run_is_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsFile(path, resume_step=2) as log:
            log.write({"step": 1, "split": "test", "loss": 0.5})
    assert len(path.read_text().splitlines()) == 1
