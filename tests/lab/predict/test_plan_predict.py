"""`recjax plan PRESET --predict`, from the preset to the files that it writes."""

import json

import pytest
from support.commands import inside, write_preset

pytestmark = [pytest.mark.full, pytest.mark.light_compile]  # each compiles a training step


def predicted(preset, *more, machine="h100"):
    return inside("plan", preset, *more, "--predict", "--machine", machine, "--json").result["predicted"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return write_preset(tmp_path_factory.mktemp("preset"))


def test_it_prints_parts_and_bounds_and_writes_the_picture_and_the_trace(preset, tmp_path):
    done = inside("plan", preset, "mesh.devices=2", "--predict", "--machine", "h100", "--out", tmp_path / "out")
    assert done.status == 0, done.err
    says = (
        "predicted for NVIDIA H100",
        "NOT measured",
        "compiled for cpu",
        "critical path",
        "bound by",
        "says nothing of read, route, pack, dispatch",
        "dense_forward",
        "row_exchange",
    )
    for text in says:
        assert text in done.out
    assert (tmp_path / "out/prediction.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "out/prediction.json").read_text())
    events = json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"]
    nodes = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert len(nodes) >= found["device"]["kernels"] + found["device"]["collectives"]
    assert max(e["ts"] + e["dur"] for e in nodes) / 1e3 == pytest.approx(found["bounds_ms"]["devices"])


def test_the_products_of_the_step_are_those_of_its_layers(preset):
    """Three products a layer but for the first, whose input needs no gradient, and those of the interaction."""
    found = predicted(preset, "mesh.devices=2")
    b, layers = 32, [(3, 16, 2), (16, 8, 3), (14, 16, 3), (16, 1, 3)]  # the top one sees 8 + 4 * 3 / 2
    products = sum(times * 2 * b * rows * columns for rows, columns, times in layers) / 1e9
    interaction = 3 * 2 * b * 4 * 4 * 8 / 1e9
    assert products + interaction * 2 / 3 <= found["device"]["gflop"] < 2.5 * (products + interaction)


def test_larger_batches_never_take_less_and_more_devices_exchange(preset):
    times = [predicted(preset, f"train.batch_size={size}", "mesh.devices=2")["step_ms"] for size in (64, 128, 512)]
    assert times == sorted(times)
    alone, together = predicted(preset, "mesh.devices=1"), predicted(preset, "mesh.devices=2")
    assert alone["device"]["exposed_ms"] < together["device"]["exposed_ms"]


def test_devices_that_route_do_it_in_the_step(preset):
    """The program sorts, and lays out, which is its own part; the host looks for no distinct rows."""
    by_host, by_devices = (
        predicted(preset, "mesh.devices=2", f"train.routing={where}")["parts_ms"] for where in ("host", "device")
    )
    assert by_devices["route"] > 0 and "route" not in by_host
    rest = {name: ms for name, ms in by_devices.items() if name != "route"}
    assert rest.keys() == by_host.keys()


def test_the_measured_step_stands_beside_the_predicted_one(preset, monkeypatch):
    from recjax.lab.predict import prediction

    monkeypatch.setattr(prediction, "ROUNDS", 1)
    monkeypatch.setattr(prediction, "STEPS", 2)
    done = inside("plan", preset, "mesh.devices=2", "--predict", "--machine", "v100", "--measure", "--json")
    found = done.result["predicted"]
    measured = found["measured"]
    assert measured["ratio"] == pytest.approx(found["step_ms"] / measured["step_ms"])
    assert measured["samples_per_s"] > 0 and measured["parts_ms"] and measured["cpu_ms"] > 0
    assert "measured: " in prediction.to_text(found) and "predicted / measured" in prediction.to_text(found)
