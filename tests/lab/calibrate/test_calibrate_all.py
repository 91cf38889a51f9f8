"""`recjax calibrate` on all classes: each is there. No time of theirs is looked at, so kernels compile lightly."""

import dataclasses

import pytest
from support.commands import inside

from recjax.lab.calibrate import calibrate
from recjax.lab.calibrate.host_cases import host_cases
from recjax.lab.calibrate.kernel_cases import kernel_cases
from recjax.lab.calibrate.reuse_cases import reuse_cases
from recjax.lab.predict import in_training
from recjax.planning.machine import OVERHEADS, SIZES, open_machine

pytestmark = [pytest.mark.full, pytest.mark.light_compile]


@pytest.mark.parametrize("sizes", ["first", pytest.param("all", marks=pytest.mark.wide)])
def test_a_quick_calibration_has_all_classes(sizes, tmp_path, monkeypatch):
    """In one pass, of each class with its first size, and of gathering with one that is held out; or with all."""

    def first(made):
        made = list(made)
        chosen = {case.kernel: case for case in made[::-1] if not case.held_out}
        return [case for case in made if case is chosen[case.kernel] or case.held_out and case.kernel == "gather"]

    if sizes == "first":
        for plain in (kernel_cases, host_cases, reuse_cases):
            monkeypatch.setattr(calibrate, plain.__name__, lambda *of, plain=plain: first(plain(*of)))
        monkeypatch.setattr(
            "recjax.lab.calibrate.host_cases._WINDOW", 2**8
        )  # samples that are read to open the next one
    monkeypatch.setattr(calibrate, "QUICK", dataclasses.replace(calibrate.QUICK, passes=1, case_s=0.0))
    short = next(in_training.references(True))
    short = dataclasses.replace(short, train=dataclasses.replace(short.train, batch_size=64))
    monkeypatch.setattr(in_training, "references", lambda quick: [short])
    out = tmp_path / "machine.json"
    assert inside("calibrate", "--quick", "--devices", 2, "--platform", "cpu", "--out", out).status == 0
    found = open_machine(str(out))
    assert {name.partition(".")[0] for name in found.kernels} == set(SIZES)
    assert found.overheads.keys() == OVERHEADS.keys() - {"launch"}  # which accelerators have
