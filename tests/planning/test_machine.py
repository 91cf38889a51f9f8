"""Machine files: written and read back, refused with the place of what is wrong, and those that are shipped."""

import copy
import json
import math
import re

import pytest
from support.machines import MACHINE, scaled

from recjax.errors import ConfigError, DataError
from recjax.planning import machine as machines


def test_a_written_machine_is_read_back(tmp_path):
    machines.write(MACHINE, tmp_path / "machine.json")
    assert machines.open_machine(str(tmp_path / "machine.json")) == MACHINE


def _at(keys, value):
    """Sets a value in nested JSON."""

    def change(given):
        inner = given
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def _without(*keys):
    def change(given):
        inner = given
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (_at(["format"], "recjax trace"), '"format" is not "recjax machine"'),
        (_at(["version"], 2), '"version" is 2'),
        (_at(["streams"], 1.5), r"streams is 1\.5; it must be a whole number"),
        (_at(["measured"], 1), "measured is 1; it must be true or false"),
        (_at(["colour"], "red"), "colour: there is no such key"),
        (_without("cores"), "cores is missing"),
        (_without("rates", "memory"), r"rates\.memory is missing"),
        (_at(["rates", "memory", "unit"], "GB/s"), r"rates\.memory\.unit is 'GB/s'; write the number in 'B/s'"),
        (_at(["rates", "memory", "value"], -1), r"rates\.memory\.value is -1"),
        (_at(["rates", "memory", "value"], 10**400), r"rates\.memory\.value is 1000"),
        (_at(["rates", "memory", "value"], math.nan), r"rates\.memory\.value is nan"),
        (_at(["rates", "memory", "source"], ""), r"rates\.memory\.source is ''"),
        (_at(["rates", "speed"], {"value": 1, "unit": "B/s", "source": "x"}), r"rates\.speed: there is no such number"),
        (
            _at(["overheads", "step_in_training"], {"value": 0.5, "unit": "times", "source": "x"}),
            r"overheads\.step_in_training\.value is 0\.5; a training takes at least 1 times as long",
        ),
        (_at(["overheads", "kernel"], 3), r"overheads\.kernel is no object"),
        (_at(["kernels", "magic"], {}), r"kernels\.magic: there is no such class"),
        (_at(["kernels", "copy", "points", 0, "us"], True), r"kernels\.copy\.points\[0\]\.us is True"),
        (_at(["kernels", "copy", "points", 0, "sizes"], {"rows": 1}), r"kernels\.copy\.points\[0\]\.sizes\.bytes is"),
        (_at(["kernels", "copy", "held_out", "points"], 0), r"kernels\.copy\.held_out\.points is 0"),
        (_at(["kernels", "copy", "repeat"], 0), r"kernels\.copy\.repeat is 0; it must be a number above 0"),
        (_at(["where", "password"], "x"), "where has 'password'"),
        (_at(["platform"], "abacus"), "platform is 'abacus'"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path, change, pattern):
    machines.write(MACHINE, tmp_path / "machine.json")
    given = json.loads((tmp_path / "machine.json").read_text())
    change(given)
    with pytest.raises(DataError, match=pattern) as refused:
        machines.parse(json.dumps(given), "my.json")
    assert str(refused.value).startswith("my.json") and "\n" not in str(refused.value)


def test_what_is_no_json_is_refused_with_its_line():
    with pytest.raises(DataError, match="my.json:2: not valid JSON"):
        machines.parse('{\n"format": }', "my.json")


def test_a_missing_file_names_what_is_shipped():
    with pytest.raises(ConfigError, match=r"^machine nowhere\.json.*recjax calibrate.*h100"):
        machines.open_machine("nowhere.json")


def test_shipped_machines_say_that_nobody_measured_them_and_where_each_number_is_from():
    assert set(machines.shipped()) == {"a100", "h100", "h200", "tpu_v5e", "tpu_v5p", "tpu_v6e", "v100"}
    for name in machines.shipped():
        found = machines.open_machine(name)
        assert not found.measured and not found.shared
        sources = [q.source for q in (*found.rates.values(), *found.overheads.values())]
        sources += [kernel.source for kernel in found.kernels.values()]
        assert all(re.search("data sheet|documentation|white paper|public|assumption|arXiv", s) for s in sources)
        assert not any(kernel.points for kernel in found.kernels.values())


def test_shipped_numbers_are_those_of_the_data_sheets():
    h100, v5e = machines.open_machine("h100"), machines.open_machine("tpu_v5e")
    assert h100.rates["memory"].value == 3.35e12 and h100.rates["flops_f32"].value == 67e12
    assert v5e.rates["flops_bf16"].value == 197e12 and v5e.rates["memory"].value == 819e9


def test_a_wider_variant_stands_in_for_one_that_is_not_there():
    assert MACHINE.kernel("matmul.nn_f32") is MACHINE.kernels["matmul.f32"]
    assert MACHINE.kernel("matmul.strided_tn_f32") is MACHINE.kernels["matmul.f32"]
    assert MACHINE.kernel("copy.columns") is MACHINE.kernels["copy"]
    assert MACHINE.kernel("matmul.nn_bf16") is None


def test_a_machine_twice_as_fast_has_rates_doubled_and_times_halved():
    before = copy.deepcopy(MACHINE)
    fast = scaled(MACHINE, 2)
    assert before == MACHINE
    assert fast.rates["memory"].value == 2e9 and fast.rates["memory_size"].value == 1e9
    assert fast.overheads["kernel"].value == 1.0
    assert fast.kernels["copy"].points[0].us == 1.75
