"""The stop button of a notebook: a real kernel gets a real SIGINT, and the same cell goes on."""

import queue
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import lines_of, write_preset

pytestmark = pytest.mark.full

STEPS = 200
# Compiled lightly: what the cell trains is of no account.
CELL = """
import recjax
from support import few_programs, light_compile
light_compile.stay_as()
few_programs.stay_as()
config = recjax.load({preset!r}, "train.steps={steps}", "mesh.devices=1", "train.eval_every=100")
summary = recjax.fit(config, {run!r})
print("steps", summary["steps"])
"""


def outcome(client: Any) -> str:
    """What a cell printed until it ended."""
    printed = ""
    while True:
        message = client.get_iopub_msg(timeout=120)
        content = message["content"]
        printed += content.get("text", "") + "\n".join(content.get("traceback", []))
        if content.get("execution_state") == "idle":
            return printed


def test_an_interrupted_cell_leaves_a_run_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    run = tmp_path / "run"
    cell = CELL.format(preset=str(write_preset(tmp_path)), steps=STEPS, run=str(run))
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path))
    try:
        client.execute(cell)
        shown = ""
        while not re.search(r"step \d+/", shown):
            message = client.get_iopub_msg(timeout=120)
            shown += message["content"].get("text", "")
            assert message["msg_type"] != "error", message["content"]["traceback"]
        kernel.interrupt_kernel()
        printed = outcome(client)
        assert re.search(r"KeyboardInterrupt: stopped by Ctrl-C after step \d+; its checkpoint is complete", printed)
        assert "Traceback" not in printed
        stopped = lines_of(run, "train")[-1]["step"]
        assert stopped < STEPS
        client.execute(cell)
        assert f"steps {STEPS}" in outcome(client)
        assert [line["step"] for line in lines_of(run, "train")] == list(range(1, STEPS + 1))
    except queue.Empty:
        pytest.fail("the kernel does not answer")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
