"""`recjax trace --compile --machine`: times of a machine that nobody here has, and simulated networks for them."""

import pytest
from support.commands import assert_refused, inside, write_preset

from recjax.lab.formats import read_trace
from recjax.lab.formats.trace import COMPUTE

pytestmark = [pytest.mark.full, pytest.mark.light_compile(as_text=True)]  # it compiles a training step
HOW = ("mesh.devices=2", "train.batch_size=128")


def test_a_trace_has_the_times_of_the_prediction_and_can_be_simulated(tmp_path):
    preset, folder = write_preset(tmp_path), tmp_path / "trace"
    made = inside("trace", preset, *HOW, "--compile", "--machine", "h200", "--out", folder)
    assert made.status == 0, made.err
    trace = read_trace(folder)
    assert trace.about["predicted_for"].startswith("NVIDIA H200") and trace.about["measured_machine"] is False
    predicted = inside("plan", preset, *HOW, "--predict", "--machine", "h200", "--json").result["predicted"]
    ends = [max(e.end_ns for e in events) for events in trace.ranks.values()]
    assert ends == pytest.approx([predicted["bounds_ms"]["devices"] * 1e6] * 2, rel=0.02)
    computed = sum(e.duration_ns for e in trace.ranks[0] if e.kind == COMPUTE)
    exposed = predicted["device"]["exposed_ms"] * 1e6
    assert computed == pytest.approx(predicted["bounds_ms"]["devices"] * 1e6 - exposed, rel=0.02)
    network = ("--topology", "switch:2", "--latency", "1us", "--bandwidth")
    slow, fast = (
        inside("simulate", "workload", folder, *network, rate, "--json").result for rate in ("1MB/s", "1TB/s")
    )
    assert fast["compute_ns"] == slow["compute_ns"] == computed
    assert computed < fast["time_ns"] < 0.5 * slow["time_ns"]


def test_a_machine_is_for_what_is_compiled(tmp_path):
    done = inside("trace", write_preset(tmp_path), "--machine", "h200", "--out", tmp_path / "x")
    assert_refused(done, 2, "give --compile too")
