"""Programs that are compiled beside a training, before a batch needs them."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support import forked
from support.problems import to_host

from recjax.config.presets import load
from recjax.data.batch import Batch
from recjax.data.source import take
from recjax.data.synthetic.clicks import SyntheticSource
from recjax.embedding.routing.capacity import CapacityLadder, Kind, Kinds, rung
from recjax.errors import ConfigError
from recjax.train import loop as loops
from recjax.train.build import build_trainer
from recjax.train.loop import CompileAhead, compile_ahead
from recjax.train.progress import TrainProgress
from recjax.train.step_log import StepLog
from recjax.train.trainer import Trainer

pytestmark = pytest.mark.light_compile


def stream(**capacities: int) -> Any:
    return SimpleNamespace(next_capacities=capacities or None)


class Compiler:
    """Compiles as soon as it is let: for capacities of {"a": n} with n below 0 it fails."""

    def __init__(self, most: int = 2) -> None:
        self.let, self.begun = threading.Event(), threading.Event()
        self.made: list[int] = []
        self.ahead = CompileAhead(self, most)

    def __call__(self, state: Any, capacities: dict[str, int]) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.let.wait(60)
        if capacities["a"] < 0:
            raise RuntimeError("out of registers")
        self.made.append(capacities["a"])

    def settle(self) -> None:
        for under_way in self.ahead._under_way.values():
            under_way.exception(60)

    def foresee(self, a: int) -> None:
        self.ahead.foresee({}, stream(a=a))  # type: ignore[arg-type]


def test_who_needs_a_program_waits_for_the_one_under_way() -> None:
    compiler = Compiler()
    assert compiler.ahead.need({"a": 1}) == 0
    compiler.foresee(2)
    assert compiler.begun.wait(60)
    threading.Timer(0.2, compiler.let.set).start()
    assert 0.1 < compiler.ahead.need({"a": 2}) < 60
    assert (compiler.made, compiler.ahead.found) == ([2], 1)
    assert compiler.ahead.need({"a": 2}) == 0 and compiler.ahead.found == 1
    compiler.ahead.close()


def test_no_program_is_compiled_twice_nor_more_than_two_beside_one() -> None:
    compiler = Compiler()
    compiler.let.set()
    compiler.foresee(9)  # before the first program is known
    compiler.ahead.need({"a": 1})
    for guess in (1, 2, 2, 3, 4):
        compiler.foresee(guess)
    compiler.ahead.foresee({}, stream())  # type: ignore[arg-type]
    compiler.settle()
    compiler.ahead.need({"a": 3})
    for guess in (1, 2, 5):
        compiler.foresee(guess)
    compiler.settle()
    compiler.ahead.need({"a": 5})
    assert (compiler.made, compiler.ahead.found) == ([2, 3, 5], 2)
    compiler.ahead.close()


def test_one_that_has_not_begun_is_left_to_who_needs_it() -> None:
    compiler = Compiler()
    compiler.ahead.need({"a": 1})
    compiler.foresee(2)
    compiler.foresee(3)
    assert compiler.begun.wait(60)
    assert compiler.ahead.need({"a": 3}) == 0
    compiler.let.set()
    compiler.ahead.need({"a": 2})
    assert (compiler.made, compiler.ahead.found) == ([2], 1)
    compiler.ahead.close()


def test_a_fault_is_said_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiler = Compiler()
    compiler.let.set()
    compiler.ahead.need({"a": 1})
    compiler.foresee(-1)
    compiler.settle()
    compiler.ahead.need({"a": -1})
    compiler.foresee(2)
    compiler.settle()
    compiler.ahead.need({"a": 2})
    assert (compiler.made, compiler.ahead.found) == ([2], 1)
    assert "could not be compiled ahead (RuntimeError: out of registers)" in capsys.readouterr().err
    compiler.ahead.close()


def test_the_end_awaits_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiler = Compiler()
    compiler.ahead.need({"a": 1})
    compiler.foresee(2)
    compiler.foresee(3)
    assert compiler.begun.wait(60)
    compiler.ahead.close()
    assert "still being compiled ahead" in capsys.readouterr().err
    compiler.let.set()
    compiler.thread.join(60)
    assert compiler.made == [2] and not compiler.thread.is_alive()


@pytest.mark.full
def test_a_process_ends_well_after_the_program_under_way() -> None:
    code = (
        "import time\n"
        "from types import SimpleNamespace\n"
        "from recjax.train.loop import CompileAhead\n"
        "def slow(state, capacities):\n"
        "    print('begun', flush=True); time.sleep(1); print('compiled', flush=True)\n"
        "ahead = CompileAhead(slow)\n"
        "ahead.need({'a': 1}); ahead.foresee({}, SimpleNamespace(next_capacities={'a': 2}))\n"
        "time.sleep(0.5); ahead.close(); print('done', flush=True)\n"
    )
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.Popen([sys.executable, "-c", code], **pipes) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and out.split() == ["begun", "done", "compiled"] and "Error" not in err


def test_the_next_sizes_are_those_that_a_batch_beyond_the_fullest_takes() -> None:
    kinds = Kinds((Kind(0.0, 1.2, 1.5, names=frozenset("ab")), Kind(0.0, 1.1, 1.1, names=frozenset("x"))))
    ladder = CapacityLadder({"a": 1000, "b": 500, "x": 1000}, {"a": 940, "b": 100, "x": 900}, 5, kinds=kinds)
    assert ladder.next() is None and CapacityLadder().next() is None
    ladder.fit({"a": 960, "b": 100, "x": 930})
    foreseen = ladder.next()
    assert foreseen == {"a": rung(1200), "b": rung(600), "x": rung(int(930 * 1.1))}
    assert ladder.fit({"a": 1100, "b": 100, "x": 930}) == foreseen


class Growing(SyntheticSource):
    """Rows of a block from the shortest bags to the longest."""

    def read(self, split: str, index: int) -> Batch:
        block = super().read(split, index)
        ids: Any = sum(bags.lengths for bags in block.bags.values())
        return take(block, np.argsort(ids, kind="stable"))


STEPS = 20
SETTINGS = (
    "data.rows=400,300",
    "data.ids_per_bag=0,0",
    "data.mean_ids=20",
    "data.weighted=false,true",
    "data.train_rows=1280",
    "data.validation_rows=50",
    "data.test_rows=50",
    "train.batch_size=64",
    "train.shuffle=false",
    "mesh.devices=2",
    "plan=row_wise",
    f"train.steps={STEPS}",
)


def trained(how: str) -> tuple[Trainer, loops.Outcome]:
    config = load("synthetic", (*SETTINGS, f"train.compile_ahead={how}"))
    data: Any = config.data
    made = build_trainer(config, Growing(data))
    return made, loops.fit(made, made.init_state(), TrainProgress(), StepLog(made))


@pytest.mark.full
def test_programs_compiled_ahead_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are compiled as run, each once; the numbers are those of a run that compiles none ahead.

    What comes from the tests' cache counts as compiled: JAX holds it as it holds what was.
    """
    compiled = []

    def before(self: CompileAhead, capacities: Any, original: Any = CompileAhead.need) -> float:
        original(self, capacities)
        for under_way in self._under_way.values():  # as if steps took longer than compiling
            under_way.exception()
        return 0.0

    def watch(event: str, duration_secs: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration") and "train_step" in about.get("fun_name", ""):
            compiled.append(threading.current_thread().name)

    plain, alone = trained("never")
    assert (alone.compiled_ahead, alone.compile_ahead_s) == (0, 0.0) and alone.compilations > 2
    monkeypatch.setattr(CompileAhead, "need", before)
    jax.monitoring.register_event_duration_secs_listener(watch)
    try:
        made, found = trained("always")
    finally:
        jax.monitoring.unregister_event_duration_listener(watch)
    ahead = sum(name.startswith("compile-ahead") for name in compiled)
    assert found.compilations == alone.compilations and found.compiled_ahead > 0
    assert len(compiled) - ahead == found.compilations - found.compiled_ahead
    assert found.compile_ahead_s > 0 and found.compile_s < alone.compile_s + found.compile_ahead_s
    assert found.progress == alone.progress
    left, right = to_host(alone.state, plain.bound), to_host(found.state, made.bound)
    assert jax.tree.all(jax.tree.map(np.array_equal, left, right))


def chosen(platform: str, choice: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> int:
    config = SimpleNamespace(train=SimpleNamespace(compile_ahead=choice))
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    return compile_ahead(SimpleNamespace(config=config, mesh=mesh))._most  # type: ignore[arg-type]


def test_tpus_compile_ahead_unless_asked_not_to_and_gpus_of_several_processes_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for platform, choice, processes, most in (
        ("tpu", "auto", 4, 2),
        ("tpu", "never", 1, 0),
        ("gpu", "auto", 1, 0),
        ("gpu", "always", 1, 2),
        ("gpu", "auto", 8, 0),
        ("cpu", "auto", 1, 0),
        ("cpu", "always", 2, 2),
    ):
        assert chosen(platform, choice, processes, monkeypatch) == most, (platform, choice)
    with pytest.raises(ConfigError, match="compile_ahead=always, but several processes train on GPUs"):
        chosen("gpu", "always", 2, monkeypatch)
