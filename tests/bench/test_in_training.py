"""References of `recjax calibrate`: whose CPU time is whose, and what comes of it. No time is compared with another."""

import os
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support.machines import MACHINE

from recjax.bench import in_training as module
from recjax.bench.in_training import Busy
from recjax.errors import TrainingError
from recjax.planning.machine import OVERHEADS
from recjax.planning.machine_file import parse, write


def test_cpu_time_is_of_python_threads_or_of_others():
    before, began = module._busy(), time.thread_time()
    while time.thread_time() - began < 0.05:
        pass
    middle = module._busy()
    assert middle.host - before.host >= 50_000

    product = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ x), x))
    x = product(jnp.ones((256, 256)))
    while (after := module._busy()).kernels - middle.kernels < 50_000:  # by the pool of XLA alone
        x = product(x)
    assert after.kernels + after.host == pytest.approx(time.process_time() * 1e6, abs=50_000)


def test_ratios_are_the_medians_over_references_and_never_below_one(monkeypatch, tmp_path):
    """Three references of 100 us on the host and of 2 x 500 us in kernels, in three rounds each."""
    rounds = [
        [Busy(host + turn, kernels - turn) for host, kernels in ((150.0, 700.0), (190.0, 800.0), (170.0, 2000.0))]
        for turn in (-9.0, 40.0, 0.0)
    ]

    class Here:
        """A pool whose process gives these, a round after another."""

        def __init__(self, processes, context, prepare, given):
            assert (processes, context.get_start_method()) == (1, "spawn")
            assert prepare is module._build and len(*given) == 3

        def submit(self, work):
            assert work is module._round
            return self

        def result(self):
            return next(left)

        def shutdown(self):
            ended.append(True)

    left, ended = iter(rounds), []
    alone = SimpleNamespace(
        stages={"host_read": 30.0, "host_place": 70.0},
        host=SimpleNamespace(devices=2),
        schedule=SimpleNamespace(core_us=500.0),
    )
    monkeypatch.setattr(module.concurrent.futures, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(module, "references", lambda quick: [None] * 3)
    monkeypatch.setattr(module, "predicted", lambda config, machine: alone)
    with module.References(True) as trainings:
        for _ in rounds:
            trainings.round()
    assert ended
    found = trainings.applied(MACHINE)
    assert found.overheads["host_in_training"].value == pytest.approx(1.7)
    assert found.overheads["kernels_in_training"].value == 1
    write(found, tmp_path / "machine.json")
    assert parse((tmp_path / "machine.json").read_bytes(), "here") == found
    assert {name for name, (_, optional) in OVERHEADS.items() if optional} == found.overheads.keys() - MACHINE.overheads


def test_a_process_that_was_stopped_is_told_in_words():
    with module.References(True) as trainings:
        trainings._configs.clear()
        trainings._pool.submit(os._exit, 9)
        with pytest.raises(TrainingError, match="want of memory.*--quick"):
            trainings.round()


def test_references_are_of_both_models_and_dtypes():
    few, many = (list(module.references(quick)) for quick in (True, False))
    assert few == many[:2]
    for configs in (few, many):
        assert len({type(config.model) for config in configs}) == 2
        assert {config.compute_dtype for config in configs} == {"float32", "bfloat16"}
