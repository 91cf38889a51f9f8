"""Process 0 chooses who computes the products of dense layers, and its refusal is that of all."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.commands import write_preset
from support.processes import environment, free_port
from support.products import times, write_table

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# Process 1 says what it was told, and cannot read the table itself.
TELLING = """
import sys
from recjax.cli.main import main
from recjax.parallel import distributed
from recjax.train import products, trainer

def tell(*args, plain=products.set_products):
    found = plain(*args)
    distributed.process() and print("told:", found.in_words(), flush=True)
    return found

def by_file(*args, plain=products._by_file):
    assert not distributed.process()
    return plain(*args)

trainer.set_products, products._by_file = tell, by_file
sys.exit(main())
"""


def in_two(tmp_path: Path, table: Path) -> tuple[list[int], list[str]]:
    """Exit statuses of two processes that train, and what they said."""
    settings = ["mesh.devices=2", "train.steps=2", f"train.products={table}"]
    command = [sys.executable, "-c", TELLING, "train", write_preset(tmp_path), *settings, "--out", tmp_path / "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    port = free_port()
    both = [forked.Popen(command, env=environment(2, k, port, limit_s=20), **pipes) for k in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    return [process.returncode for process in both], said


def test_all_take_the_choice_of_process_0(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.json", times(forward={"kernels": 20.0, "xla": 10.0}))
    statuses, said = in_two(tmp_path, table)
    assert statuses == [0, 0], said
    assert "told: by table: 8 of 12 by kernels, the others by XLA" in said[1]
    assert (tmp_path / "run/products.json").exists()
