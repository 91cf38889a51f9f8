"""Hot rows by several processes, which others replace in the middle: the numbers of one process without any."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.commands import write_preset
from support.processes import environment, free_port

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# Row-wise Adagrad, D = 8, one table of each kind of bag.
COMMON = ["compute_dtype=float64", "data.zipf=0", "train.checkpoint_every=0", "train.eval_every=24"]
# Of 550 rows; ids of all are alike frequent, so that each period has a set of its own.
MANY = ["embedding.hot.rows=120", "embedding.hot.batches=2", "embedding.hot.refresh=5"]


# What process 1 counts later on is something else, as if its data were.
ASTRAY = """
import sys
from recjax.cli.main import main
from recjax.parallel import distributed
from recjax.train import hot_periods

def count(*args, plain=hot_periods.first_batches):
    return plain(*args[:-1], args[-1] + 64 * distributed.process())

hot_periods.first_batches = count
sys.exit(main())
"""


def test_processes_that_count_otherwise_stop_before_rows_are_mixed_up(tmp_path: Path) -> None:
    settings = [*COMMON, *MANY, "mesh.devices=2", "plan=row_wise", "train.steps=8"]
    command = [sys.executable, "-c", ASTRAY, "train", write_preset(tmp_path), *settings, "--out", tmp_path / "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    port = free_port()
    both = [forked.Popen(command, env=environment(2, k, port, limit_s=20), **pipes) for k in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], said
    assert all("the processes differ in their settings: hot rows from step 5 on: " in text for text in said)
