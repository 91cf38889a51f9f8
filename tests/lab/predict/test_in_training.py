"""References of `recjax calibrate`: whose CPU time is whose, and what comes of it. No time is compared with another."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
from support.machines import MACHINE

from recjax.errors import ConfigError
from recjax.lab.predict import in_training as module
from recjax.lab.predict.in_training import Busy
from recjax.planning.machine import OVERHEADS, parse, write


def test_what_a_training_takes_goes_into_the_machine(monkeypatch, tmp_path):
    """Three references of 100 us on the host and of 2 x (250, 500, 1000) us in kernels, in three rounds each.

    Steps are predicted that keep two cores busy, and are measured that keep busy 1, 1.6 and 1.9 of them. A third of the
    host's work is done by threads that do not run Python.
    """
    sums = [1.7 * 100 + 1.3 * kernels for kernels in (500, 1000, 2000)]
    busy = [(115.0, cpu - 115.0, cpu / cores) for cpu, cores in zip(sums, (1, 1.6, 1.9), strict=True)]
    rounds = [
        [Busy(host + turn, kernels - turn, step + turn) for host, kernels, step in busy] for turn in (-9.0, 40.0, 0.0)
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
    alone = [
        SimpleNamespace(
            stages={"host_read": 30.0, "host_place": 70.0},
            host=SimpleNamespace(devices=2),
            schedule=SimpleNamespace(core_us=core_us),
            graph=None,
        )
        for core_us in (250.0, 500.0, 1000.0)
    ]
    ratios = []

    def again(graph, machine, host):
        ratios.append({name: machine.overheads[name].value for name in ("host_in_training", "kernels_in_training")})
        assert "step_in_training" not in machine.overheads
        return SimpleNamespace(cpu_us=600.0, step_us=300.0)

    monkeypatch.setattr(module, "predict", again)
    monkeypatch.setattr(module.concurrent.futures, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(module, "references", lambda quick: range(3))
    monkeypatch.setattr(module, "predicted", lambda config, machine: alone[config])
    monkeypatch.setattr(module, "_ALIKE", 1e-9)
    with module.References(True) as trainings:
        for _ in rounds:
            trainings.round()
    assert ended
    found = trainings.applied(MACHINE)
    assert found.overheads["host_in_training"].value == pytest.approx(1.7)
    assert found.overheads["kernels_in_training"].value == pytest.approx(1.3)
    assert found.overheads["step_in_training"].value == pytest.approx((8 / 1.6 / 1.9) ** (1 / 3))
    assert ratios == [{"host_in_training": pytest.approx(1.7), "kernels_in_training": pytest.approx(1.3)}] * 3
    points = found.kernels["training"].points
    assert [(point.sizes["reference"], point.us, point.cores) for point in points] == [
        (place, pytest.approx(of[2]), pytest.approx(cores))
        for place, of, cores in zip((1, 2, 3), busy, (1, 1.6, 1.9), strict=True)
    ]
    # The last round alone is as the middle one; the one before took 40 us longer in each.
    again_on = module.References.of(found)
    again_on.found = trainings.found
    assert again_on.slower(1) == pytest.approx(1)
    longer = [(of[2] + 40) / of[2] for of in busy]
    assert again_on.slower(2) == pytest.approx((longer[0] * longer[1] * longer[2]) ** (1 / 6))
    write(found, tmp_path / "machine.json")
    assert parse((tmp_path / "machine.json").read_bytes(), "here") == found
    assert len(again_on._configs) == 3 and module.References.of(MACHINE) is None
    fewer = dataclasses.replace(found.kernels["training"], points=points[1:] + points[:2])
    with pytest.raises(
        ConfigError, match="4 trainings, which are not those of this version.*Measure the machine again"
    ):
        module.References.of(dataclasses.replace(found, kernels=found.kernels | {"training": fewer}))
    # A machine file may have its points in any order: each reference is compared with its own.
    turned = dataclasses.replace(found.kernels["training"], points=points[::-1])
    other = module.References.of(dataclasses.replace(found, kernels=found.kernels | {"training": turned}))
    assert other._calibrated_us == again_on._calibrated_us
    # All that a machine may lack, but for what accelerators alone have.
    of_cpus = {name for name, (_, optional) in OVERHEADS.items() if optional and name != "launch"}
    assert of_cpus == found.overheads.keys() - MACHINE.overheads


def test_a_process_that_was_stopped_is_told_in_words():
    with module.References(True) as trainings:
        trainings._configs.clear()
        trainings._pool.submit(os._exit, 9)
        with pytest.raises(module.ReferencesEnded, match="want of memory.*--quick"):
            trainings.round()


def test_references_are_of_both_models_and_dtypes():
    few, many = (list(module.references(quick)) for quick in (True, False))
    assert few == many[:2]
    for configs in (few, many):
        assert len({type(config.model) for config in configs}) == 2
        assert {config.compute_dtype for config in configs} == {"float32", "bfloat16"}
