"""`recjax calibrate` on all classes: each is there. No time of theirs is looked at, so kernels compile lightly."""

import dataclasses

import pytest
from support.commands import inside

from recjax.bench import in_training
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.planning import calibrate, cases
from recjax.planning.host_cases import host_cases
from recjax.planning.machine import OVERHEADS, SIZES
from recjax.planning.machine_file import open_machine

pytestmark = [pytest.mark.full, pytest.mark.light_compile]


@pytest.mark.parametrize("sizes", ["ends", pytest.param("all", marks=pytest.mark.wide)])
def test_a_quick_calibration_has_all_classes(sizes, tmp_path, monkeypatch):
    """In one pass, of each class with its first and last sizes and with those held out; or with all."""
    of_devices, of_host = cases.kernel_cases, host_cases

    def ends(made):
        first, last = ({case.kernel: case for case in some if not case.held_out} for some in (made[::-1], made))
        return [case for case in made if case.held_out or case in (first[case.kernel], last[case.kernel])]

    if sizes == "ends":
        monkeypatch.setattr(calibrate, "kernel_cases", lambda quick, dtypes: ends(of_devices(quick, dtypes)))
        monkeypatch.setattr(calibrate, "host_cases", lambda mesh, quick: ends(list(of_host(mesh, quick))))
    monkeypatch.setattr(calibrate, "QUICK", dataclasses.replace(calibrate.QUICK, passes=1, case_s=0.0))
    short = next(in_training.references(True))
    short = dataclasses.replace(short, train=dataclasses.replace(short.train, batch_size=64))
    monkeypatch.setattr(in_training, "references", lambda quick: [short])
    out = tmp_path / "machine.json"
    assert inside("calibrate", "--quick", "--platform", "cpu", "--out", out).status == 0
    found = open_machine(str(out))
    assert {name.partition(".")[0] for name in found.kernels} == set(SIZES)
    assert found.overheads.keys() == OVERHEADS.keys()
    assert make_mesh(MeshConfig(platform="cpu")).devices.size >= 2
