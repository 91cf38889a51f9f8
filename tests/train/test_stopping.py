"""Signals in this process, which recjax does not own: a run saves, raises, and leaves everything as it was."""

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.commands import arrays, assert_refused, assert_same_arrays, inside, lines_of

import recjax
from recjax import main as runs
from recjax.config.run import RunConfig
from recjax.errors import Interrupted, RecjaxError, StoppedError
from recjax.parallel import stopping
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.trainer import Trainer

pytestmark = [
    pytest.mark.full,
    pytest.mark.shared_programs,
    pytest.mark.usefixtures("heeded"),
    pytest.mark.light_compile,
    pytest.mark.few_programs,
]

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
STEPS = 12


@pytest.fixture
def heeded():
    """A process that was started in the background, as CI may be, ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is put back"
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def config(preset: Path) -> RunConfig:
    return recjax.load(str(preset), f"train.steps={STEPS}", "mesh.devices=2", "train.checkpoint_every=0")


def raising(monkeypatch: pytest.MonkeyPatch, at: int, *numbers: int) -> None:
    """Raises signals, each after the one before has had its effect, when step `at` of this process is under way."""
    done = itertools.count(1)

    def train_step(*arguments: Any, original: Any = Trainer.train_step) -> Any:
        trained = original(*arguments)
        for number in numbers if next(done) == at else ():
            signal.raise_signal(number)
        return trained

    monkeypatch.setattr(Trainer, "train_step", train_step)


def kept(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints", 2).steps()


@pytest.mark.parametrize(
    ("number", "error", "name"), [(INT, KeyboardInterrupt, "Ctrl-C"), (TERM, StoppedError, "SIGTERM")]
)
def test_the_first_signal_saves_and_the_same_call_goes_on(config, tmp_path, monkeypatch, capsys, number, error, name):
    with monkeypatch.context() as patch, pytest.raises(error) as raised:
        raising(patch, 4, number)
        recjax.fit(config, tmp_path / "run")
    (step,) = kept(tmp_path / "run")
    assert 4 <= step <= 6, "the step under way, or one that had been begun"
    text = f"stopped by {name} after step {step}; its checkpoint is complete. Make the same call to go on from there."
    assert str(raised.value) == text
    assert f"{name}: stopping after this step, with a checkpoint." in capsys.readouterr().err
    summary = recjax.fit(config, tmp_path / "run")  # the lock is free
    assert f"at step {step}\n" in capsys.readouterr().err
    whole = recjax.fit(config, tmp_path / "whole")
    assert summary["eval"] == whole["eval"]
    assert [line["loss"] for line in lines_of(tmp_path / "run", "train")] == [
        line["loss"] for line in lines_of(tmp_path / "whole", "train")
    ]
    assert_same_arrays(arrays(tmp_path / "run", STEPS), arrays(tmp_path / "whole", STEPS))


def test_sigterm_ends_a_loop_over_runs(preset, tmp_path):
    """As a program has it that takes what recjax refuses for a run without a result, and goes on."""
    program = f"""
import signal, recjax
from recjax.errors import RecjaxError
from recjax.train.trainer import Trainer
train_step, steps = Trainer.train_step, []
def stopped_in_step_4(*arguments):
    steps.append(None)
    if len(steps) == 4:
        signal.raise_signal(signal.SIGTERM)
    return train_step(*arguments)
Trainer.train_step = stopped_in_step_4
for seed in (1, 2):
    try:
        recjax.fit(recjax.load({str(preset)!r}, "train.steps={STEPS}", f"seed={{seed}}"), f"{tmp_path}/{{seed}}")
    except RecjaxError as error:
        print("refused", error)
    except Exception as error:
        print("failed", error)
print("after the loop")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (StoppedError.exit_status, ""), done.stderr
    assert "its checkpoint is complete. Make the same call to go on" in done.stderr and "Traceback" not in done.stderr
    assert kept(tmp_path / "1") and not (tmp_path / "2").exists()


def test_a_second_interrupt_raises_at_once(config, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_SAME_S", 0.0)
    raising(monkeypatch, 4, INT, INT)
    with pytest.raises(
        Interrupted, match="ended at once by a second Ctrl-C; no checkpoint is complete yet. Make the same"
    ):
        recjax.fit(config, tmp_path / "run")
    assert kept(tmp_path / "run") == []
    monkeypatch.undo()
    assert recjax.fit(config, tmp_path / "run")["steps"] == STEPS


@pytest.mark.parametrize(("number", "error"), [(INT, Interrupted), (TERM, StoppedError)])
def test_before_the_first_step_the_first_signal_ends_it(config, tmp_path, monkeypatch, number, error):
    def init_state(self: Trainer) -> Any:
        signal.raise_signal(number)
        raise AssertionError("it went on")

    with (
        monkeypatch.context() as patch,
        pytest.raises(error, match="before a step was trained; no checkpoint is complete"),
    ):
        patch.setattr(Trainer, "init_state", init_state)
        recjax.fit(config, tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(error, match=f"to go on from step {STEPS}, the last complete"):
        recjax.fit(config, tmp_path / "run")
        patch.setattr(runs, "_chosen", lambda *_: signal.raise_signal(number))  # nothing is left to train
        recjax.fit(config, tmp_path / "run")


def test_a_command_in_a_program_ends_with_its_status(preset, tmp_path, monkeypatch):
    command = ("train", preset, f"train.steps={STEPS}", "mesh.devices=2", "--out", tmp_path)
    for number, status in ((INT, 130), (TERM, 143)):
        with monkeypatch.context() as patch:
            raising(patch, 3, number)
            assert_refused(inside(*command), status, "stopped by .* after step .*; its checkpoint is complete")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "open_run", lambda *_, **__: signal.raise_signal(INT))
        assert_refused(inside("eval", tmp_path), 130, "stopped by Ctrl-C, without a result")


def test_in_another_thread_signals_are_left_alone(config, tmp_path, monkeypatch):
    found: list[Any] = []

    def init_state(self: Trainer, original: Any = Trainer.init_state) -> Any:
        found.append(signal.getsignal(signal.SIGINT))
        return original(self)

    monkeypatch.setattr(Trainer, "init_state", init_state)
    thread = threading.Thread(target=lambda: found.append(recjax.fit(config, tmp_path / "run")["steps"]))
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler, STEPS]


def heard(*numbers: int, training: bool = True, early: bool = True) -> tuple[list[str | None], int, list[str]]:
    said: list[str] = []
    stop = stopping.Stop(said.append)
    stop.training, stop.steps = training, lambda: (5, 10)
    return [stop.heard(number, early) for number in numbers], stop(), said


def test_what_signals_mean(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    assert heard(TERM, TERM, TERM)[:2] == ([None] * 3, TERM), "schedulers send several"
    ended, asked, said = heard(INT, INT)
    assert (ended, asked, len(said)) == ([None, None], INT, 1), "a terminal and a parent send one each"
    ended, asked, said = heard(TERM, INT)
    assert (ended, asked, len(said)) == ([None, None], TERM, 2), "whoever presses Ctrl-C hears that it stops already"
    last = "Make the same call to go on from step 10, the last complete checkpoint."
    assert heard(INT, training=False)[0] == [f"stopped by Ctrl-C before a step was trained. {last}"]
    assert heard(INT, training=False, early=False)[:2] == ([None], INT), "the other processes would wait for it"
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock.__setitem__(0, clock[0] + 1) or clock[0])
    assert heard(INT, INT)[0] == [None, f"ended at once by a second Ctrl-C. {last}"]


def test_a_folder_that_cannot_be_read_does_not_hide_why_it_ended():
    def steps() -> list[int]:
        raise RecjaxError("cannot read it")

    stop = stopping.Stop()
    stop.steps = steps
    assert stop.heard(TERM) == "stopped by SIGTERM before a step was trained. Make the same call to go on."


def test_a_notebook_shows_one_line():
    shells = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell()
    shown: list[Any] = []
    shell._showtraceback = lambda kind, value, lines: shown.append(lines)
    shell.run_cell("from recjax.errors import Interrupted\nraise Interrupted('stopped after step 5')")
    assert shown == [["KeyboardInterrupt: stopped after step 5"]]
