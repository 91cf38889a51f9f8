"""Signals to real processes of the command line: also while they are in C++ code, save, start or run other verbs."""

import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from support.commands import Done, assert_refused, inside, outside, start

from recjax.train.checkpoint.checkpoints import Checkpoints

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# Python that a command runs first. `hang` never returns to Python, as C++ code may; it says on standard error that it
# is there. A process that was started in the background, as CI may be, ignores SIGINT.
HANGS = """
import ctypes, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
def hang(*_, **__):
    lock, libc, text = ctypes.create_string_buffer(64), ctypes.CDLL(None), "it hangs\\n"
    libc.pthread_mutex_lock(lock)
    while True:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
            text = ""
            libc.pthread_mutex_lock(lock)  # for ever
        except KeyboardInterrupt:  # it came in between
            pass
from recjax.parallel import stopping, waiting
stopping._SAME_S = waiting._FIRST_S = 0.0
"""
IN_EVALUATION = "from recjax.train.trainer import Trainer\nTrainer.predict = hang"
IN_SAVE = """
from recjax.train.checkpoint import checkpoints
def write(folder, arrays, number=[0], plain=checkpoints.array_store.write):
    number[0] += 1
    if number[0] == 2:
        plain(folder, {key: arrays[key] for key in list(arrays)[:1]})
        hang()
    return plain(folder, arrays)
checkpoints.array_store.write = write
"""
AT_START = "from recjax import main\nmain.build_trainer = hang"
SHORT = ("train.steps=9", "mesh.devices=2", "train.checkpoint_every=3")


def until(process: subprocess.Popen[str], pattern: str) -> str:
    """Reads standard error until a line has the pattern; gives all of it."""
    assert process.stderr is not None
    text = ""
    for line in process.stderr:
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(f"it ended without {pattern!r}:\n{text}")


def signalled(process: subprocess.Popen[str], *plan: tuple[str, signal.Signals]) -> Done:
    """Sends a signal whenever a line has come, and awaits the end."""
    err = ""
    for pattern, number in plan:
        err += until(process, pattern)
        process.send_signal(number)
    return ended(process, err)


def ended(process: subprocess.Popen[str], err: str) -> Done:
    """What has come of it; `err` is what was read before."""
    too_late = threading.Timer(60, process.kill)
    too_late.start()
    assert process.stdout is not None and process.stderr is not None
    err += process.stderr.read()
    out = process.stdout.read()
    process.wait()
    too_late.cancel()
    assert "Exception ignored" not in err
    return Done(process.returncode, out, err)


def steps(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints", 2).steps()


def test_ctrl_c_saves_then_the_same_command_goes_on(preset, tmp_path):
    command = ("train", preset, "train.steps=3000", "mesh.devices=2", "train.checkpoint_every=0", "--out", tmp_path)
    with start(*command, before=HANGS) as process:
        done = signalled(process, ("^step 1/", signal.SIGINT), ("Ctrl-C: stopping after this step", signal.SIGTERM))
    (step,) = {int(number) for number in re.findall(r"stopped by Ctrl-C after step (\d+); its checkpoint is", done.err)}
    assert_refused(done, 130, "Give the same command to go on from there")
    assert max(steps(tmp_path)) == step
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert f"resuming {tmp_path} at step {step}\n" in inside(*command, f"train.steps={step + 1}").err


def test_a_second_ctrl_c_ends_a_save_at_once_and_the_checkpoint_before_stays(preset, tmp_path):
    command = ("train", preset, *SHORT, "--out", tmp_path)
    with start(*command, before=HANGS + IN_SAVE) as process:
        plan = (("it hangs", signal.SIGINT), ("stopping after this step", signal.SIGINT))
        done = signalled(process, *plan)
    assert_refused(done, 130, "ended at once by a second Ctrl-C. .* from step 3, the last complete checkpoint")
    assert steps(tmp_path) == [3] and list((tmp_path / "checkpoints").glob(".unfinished-00000006-*"))
    assert inside(*command).status == 0 and not list((tmp_path / "checkpoints").glob(".*"))


def test_a_second_ctrl_c_ends_an_evaluation_that_does_not_return(preset, tmp_path):
    command = ("train", preset, *SHORT, "train.eval_every=2", "--out", tmp_path)
    with start(*command, before=HANGS + IN_EVALUATION) as process:
        plan = (("it hangs", signal.SIGINT), ("stopping after this step", signal.SIGINT))
        done = signalled(process, *plan)
    assert_refused(done, 130, "ended at once by a second Ctrl-C; no checkpoint is complete yet")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_while_it_starts_one_signal_ends_it(preset, tmp_path, number, status):
    with start("train", preset, *SHORT, "--out", tmp_path, before=HANGS + AT_START) as process:
        done = signalled(process, ("it hangs", number))
    assert_refused(done, status, "before a step was trained; no checkpoint is complete yet")


def test_sigterm_ends_a_start_of_many_devices(preset, tmp_path):
    """In XLA itself, which takes seconds for so many; and it says what takes so long."""
    with start("train", preset, "mesh.devices=300", "train.batch_size=600", "--out", tmp_path, before=HANGS) as process:
        done = signalled(process, (r"^compiling the step and running it once on 300 devices \.\.\.$", signal.SIGTERM))
    assert_refused(done, 143, "stopped by SIGTERM before a step was trained")
    assert "starting 300 devices ..." in done.err and "making the tables" in done.err


def test_other_verbs_end_by_ctrl_c_too(preset, tmp_path):
    assert outside("train", preset, *SHORT, "--out", tmp_path).status == 0
    asks = "from recjax import main\nmain.open_run = lambda *_, **__: signal.raise_signal(signal.SIGINT)"
    done = outside("eval", tmp_path, before=f"{HANGS}\n{asks}")
    assert assert_refused(done, 130) == "recjax: error: stopped by Ctrl-C, without a result."
    with start("eval", tmp_path, before=f"{HANGS}\nfrom recjax import main\nmain.open_run = hang") as process:
        until(process, "it hangs")
        process.send_signal(signal.SIGINT)  # Python cannot handle it
        while not pending_is_read(process.pid):
            pass
        process.send_signal(signal.SIGINT)
        done = ended(process, "")
    assert_refused(done, 130, r"stopped by Ctrl-C, without a result. \(ended at once by a second Ctrl-C\)")


def pending_is_read(pid: int) -> bool:
    """Whether no SIGINT waits for the process any more: the kernel makes one of two that wait."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)]
    return not any(mask & 1 << signal.SIGINT - 1 for mask in masks)


def test_a_signal_that_is_ignored_stays_so(preset, tmp_path):
    """That of a background job of a script, which Ctrl-C is not meant for."""
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    raising = """
from recjax.train.trainer import Trainer
def train_step(*arguments, plain=Trainer.train_step):
    signal.raise_signal(signal.SIGINT)
    return plain(*arguments)
Trainer.train_step = train_step
"""
    done = outside("train", preset, *SHORT, "--out", tmp_path, before=ignored + raising)
    assert done.status == 0 and steps(tmp_path)[-1] == 9
