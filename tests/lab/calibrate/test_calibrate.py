"""`recjax calibrate`, on few cases; no time is compared with anything."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import pytest
from support.commands import assert_refused, inside

from recjax.errors import DeviceError
from recjax.lab.calibrate import calibrate, cases, device_times, kernel_cases, rates
from recjax.lab.calibrate.host_cases import host_cases
from recjax.lab.calibrate.overhead_cases import overheads_of
from recjax.lab.predict import in_training
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.planning.graph import read_graph
from recjax.planning.machine import SIZES, open_machine

FEW = ("matmul.nn_f32", "copy", "elementwise", "transcendental", "scatter.sorted")


@pytest.fixture
def few(monkeypatch):
    """Some classes, of which no size is left out, and of the host and the collectives nothing."""
    of_all = kernel_cases.kernel_cases

    def some(quick, dtypes):
        return [case for case in of_all(quick, dtypes) if case.kernel in FEW and max(case.sizes.values()) <= 2**18]

    monkeypatch.setattr(calibrate, "kernel_cases", some)
    monkeypatch.setattr(calibrate, "QUICK", dataclasses.replace(calibrate.QUICK, compile_s=math.inf))  # however busy
    monkeypatch.setattr(calibrate, "host_cases", lambda mesh, quick: [])
    monkeypatch.setattr(calibrate, "reuse_cases", lambda quick: [])
    monkeypatch.setattr(in_training, "references", lambda quick: [])
    monkeypatch.setattr(in_training.References, "applied", lambda trainings, machine: machine)


@pytest.mark.parametrize("quick", [True, False])
def test_dispatching_is_timed_with_few_arrays_and_with_many(quick):
    cases_of = [case for case in host_cases(make_mesh(MeshConfig(1, "cpu")), quick) if case.kernel == "host_dispatch"]
    arrays = [case.sizes["arguments"] for case in cases_of if not case.held_out]
    assert min(arrays) == 4 and max(arrays) == (64 if quick else 256)


def test_passes_are_over_as_many_elements_as_batches_have():
    for case in kernel_cases.kernel_cases(False, ("f32", "bf16")):
        if case.kernel in ("elementwise", "elementwise.bf16") and not case.held_out:
            elements = case.sizes["bytes"] / (6 if case.kernel.endswith("bf16") else 8)
            assert elements >= 16 and elements.is_integer() and not int(elements) & int(elements) - 1


@pytest.mark.full
def test_a_machine_has_a_point_for_each_case_and_the_error_of_those_held_out(few, tmp_path, monkeypatch):
    order = []
    measured = calibrate._Timed.measure

    def watched(self, budget_s, empty_s):
        order.append(self.case.kernel)
        measured(self, budget_s, empty_s)

    monkeypatch.setattr(calibrate._Timed, "measure", watched)
    out = tmp_path / "machine.json"
    done = inside("calibrate", "--quick", "--devices", 1, "--platform", "cpu", "--name", "mine", "--out", out, "--json")
    machine = open_machine(str(out))
    assert machine.name == "mine" and machine.measured and machine.shared and "--quick" in machine.where["note"]
    assert set(machine.where) >= {"cpu", "device", "versions", "date"}
    assert set(machine.kernels) == set(FEW)
    expected = [case for case in calibrate.kernel_cases(True, ("f32",)) if not case.held_out]
    for kernel, found in machine.kernels.items():
        assert {tuple(p.sizes.values()) for p in found.points} == {
            tuple(case.sizes.values()) for case in expected if case.kernel == kernel
        }
        assert all(p.us > 0 and 1 <= p.cores <= machine.cores for p in found.points)
    assert machine.kernels["copy"].held_out.points == 1 and machine.kernels["copy"].held_out.ratio_mean >= 1
    assert machine.rates["flops_f32"].value > 0 and machine.overheads["kernel"].value > 0
    assert all(of.repeat is not None and of.repeat >= 1 for of in machine.kernels.values())
    assert done.result["kernels"]["copy"]["repeat"] == machine.kernels["copy"].repeat
    assert done.result["kernels"]["copy"]["held_out"]["points"] == 1
    assert done.err.count("pass ") == calibrate.QUICK.passes
    # By turns: no pass does one class after the other.
    turns = [kernel for kernel in order if kernel in FEW]
    assert sum(a != b for a, b in zip(turns, turns[1:], strict=False)) > len(FEW) * calibrate.QUICK.passes


def test_where_compiling_takes_too_long_each_class_has_fewer_points(few):
    """The 1st, 6th and 12th of the products of 256 or 4096 by 1, 16 or 256 by 16 or 256 stay, and a line says so."""
    said, mesh = [], make_mesh(MeshConfig(1, "cpu"))
    effort = dataclasses.replace(calibrate.QUICK, passes=1, case_s=0.0, compile_s=-1.0)
    machine = calibrate.calibrate(mesh, effort, said.append)
    points = {kernel: [tuple(p.sizes.values()) for p in of.points] for kernel, of in machine.kernels.items()}
    assert points["matmul.nn_f32"] == [(256, 1, 16), (256, 256, 256), (4096, 256, 256)]
    assert set(points) == set(FEW) and all(1 <= len(found) <= 3 for found in points.values())
    of_all = len(calibrate.kernel_cases(True, ("f32", "bf16")))
    kept = sum(len(found) for found in points.values()) + sum(
        of.held_out is not None for of in machine.kernels.values()
    )
    assert any(line.startswith(f"left out {of_all - kept} of {of_all} kernels") for line in said)


def test_every_class_is_measured_over_the_sizes_that_the_machine_file_has():
    full = kernel_cases.kernel_cases(False, ("f32", "bf16"))
    for case in [*full, *kernel_cases.kernel_cases(True, ("f32",))]:
        assert tuple(case.sizes) == SIZES[case.kernel.partition(".")[0]]
    held_out = {case.kernel for case in full if case.held_out}
    assert held_out == {case.kernel for case in full}
    for case in full:
        points = [c.sizes for c in full if c.kernel == case.kernel and not c.held_out]
        assert not (case.held_out and case.sizes in points)


@pytest.mark.parametrize(
    "case",
    [
        min(
            (c for c in kernel_cases.kernel_cases(False, ("f32",)) if c.kernel == kernel),
            key=lambda c: tuple(c.sizes.values()),
        )
        for kernel in (f"batched_matmul.{how}{layout}_f32" for how in ("", "each_") for layout in ("nt", "nn"))
    ],
    ids=lambda case: case.kernel,
)
def test_a_batched_product_is_read_as_the_class_that_measures_it(case):
    """In a program of its own: XLA calls a library for each of the smallest, and has a kernel for the others."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel_cases,
            "runner",
            lambda f, *given: texts.append(jax.jit(f).lower(*cases.shapes(given)).compile().as_text()),
        )
        case.make()
    works = [w for n in read_graph(texts[0], 1).nodes for w in n.works if w.kernel.startswith("batched_matmul")]
    assert [(w.kernel, dict(w.sizes)) for w in works] == [(case.kernel, case.sizes)]


@pytest.mark.full
def test_collectives_that_no_profile_has_are_left_to_the_rates_of_links(few, tmp_path, monkeypatch):
    """A profile may not tell the runs of a chain apart: no time is made up for them."""
    monkeypatch.setattr(calibrate, "QUICK", dataclasses.replace(calibrate.QUICK, passes=1))
    monkeypatch.setattr(calibrate, "measure", lambda replays, _: [SimpleNamespace(slots=None)] * len(replays))
    out = tmp_path / "machine.json"
    done = inside("calibrate", "--quick", "--devices", 2, "--platform", "cpu", "--out", out)
    assert done.status == 0 and "collectives are not in the profiles" in done.err
    assert set(open_machine(str(out)).kernels) == set(FEW)


def test_it_needs_a_file_that_can_be_written_before_it_measures(tmp_path):
    assert inside("calibrate", "--quick").status == 2
    for out in (tmp_path, tmp_path / "nowhere/machine.json"):
        done = inside("calibrate", "--out", out)
        assert "compiled" not in assert_refused(done, 2, "--out .* name a file in a folder that exists") + done.err
    (tmp_path / "file").touch()
    done = inside("calibrate", "--out", tmp_path / "machine.json", "--disk", tmp_path / "file")
    assert "compiled" not in assert_refused(done, 2, "--disk .*/file: the folder cannot be made") + done.err


def test_options_of_a_prediction_are_refused_without_it():
    assert_refused(inside("plan", "synthetic", "--measure"), 2, "--measure belongs to --predict")
    assert_refused(inside("plan", "synthetic", "--machine", "h100"), 2, "--machine belongs to --predict, --devices or")
    assert_refused(inside("plan", "synthetic", "--out", "x"), 2, "--out belongs to --predict, --devices or planner")
    assert_refused(inside("plan", "synthetic", "--predict", "--machine", "gone.json"), 2, "recjax calibrate", "h100")


def test_a_damaged_machine_file_is_refused_before_anything_is_compiled(tmp_path):
    bad = tmp_path / "machine.json"
    bad.write_text(json.dumps({"format": "recjax machine", "version": 1}))
    done = inside("plan", "synthetic", "--predict", "--machine", bad)
    assert_refused(done, 3, "machine.json: .* is missing")
    assert "compiling" not in done.err


def kernels(module, *lengths):
    """Events of one stream, as the profiler of an NVIDIA GPU gives them; further ones say nothing of a program."""
    clock = kernels.clock
    found = []
    for length in lengths:
        found.append(("k", clock, length, {"device_ordinal": 0, "hlo_module": f"jit_{module}", "hlo_op": "fusion"}))
        found.append(("MemcpyH2D", clock, 1e6, {"device_ordinal": 0}))
        clock += 10 * length
    kernels.clock = clock
    return found


def test_the_device_tells_the_times_of_each_program(monkeypatch):
    """One of two programs has two kernels. Programs that make arguments, and first runs, do not count."""
    monkeypatch.setattr(device_times, "_RUNS", 3)
    kernels.clock = 0.0
    marker = device_times.recjax_between_cases.__name__
    happened = [
        *kernels("ones", 500.0),
        *kernels(marker, 1.0),
        *kernels("first", 900.0, 900.0),
        *kernels(marker, 1.0),
        *kernels("first", 10.0, 20.0, 11.0, 21.0, 99.0, 99.0),
        *kernels(marker, 1.0),
        *kernels("ones", 500.0),
        *kernels(marker, 1.0),
        *kernels("second", 900.0),
        *kernels(marker, 1.0),
        *kernels("second", 7.0, 5.0),
        *kernels(marker, 1.0),  # a copy that was no kernel
    ]
    assert device_times.of_events(reversed(happened), 2) == pytest.approx([32e-9, 4e-9])
    with pytest.raises(DeviceError, match="2 marks of 6"):
        device_times.of_events(happened[: len(happened) // 2], 2)
    assert device_times.device_seconds([]) == []


def test_overheads_are_what_longer_chains_take():
    """A kernel takes 3 us, 2 of them by the device's clock; a turn of a loop takes 16, 6 of them in two kernels."""
    slope = {"line": 3.0, "loop": 16.0, "launch": 1.5}
    times = {f"{what}.{length}": [1e-6 * (40 + us * length)] for what, us in slope.items() for length in (16, 144)}
    device = {name: [1e-6 * 2 * int(name.partition(".")[2])] if "line" in name else [] for name in times}
    found = overheads_of(times, device)
    assert {name: of.value for name, of in found.items()} == pytest.approx({"kernel": 1.0, "loop": 10.0, "launch": 1.5})
    of_cpu = overheads_of({n: s for n, s in times.items() if "launch" not in n}, dict.fromkeys(times, []))
    assert {name: of.value for name, of in of_cpu.items()} == pytest.approx({"kernel": 3.0, "loop": 10.0})


def test_an_accelerator_has_its_own_memory():
    """The host's memory and caches are not its; where it does not tell, the file says that a size is assumed."""
    timed = [(cases.Case("elementwise", {"bytes": 1000.0}, lambda: None), 2.0)]
    tells, silent = (
        rates.rates_of(timed, SimpleNamespace(platform="gpu", memory_stats=lambda stats=stats: stats))
        for stats in ({"bytes_limit": 7e9}, None)
    )
    assert tells["memory_size"].value == 7e9 and "cache_size" not in tells and tells["line_size"].value == 32
    assert "assumed" in silent["memory_size"].source and tells["memory"].value == pytest.approx(5e8)
