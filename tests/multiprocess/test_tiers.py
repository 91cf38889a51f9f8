"""Rows on the hosts of several processes: the bits of the same mesh with all rows on the devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import forked
from support.commands import lines_of, steps_of, write_preset
from support.processes import Job, environment, free_port, train_together

from recjax.train import state as states
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# Row-wise Adagrad and Adam, D = 8, one table of each kind of bag; the last batch of an evaluation is a short one.
COMMON = [
    "data.rows=3000,500,2000",
    "data.zipf=0",
    "train.steps=40",
    "train.checkpoint_every=5",
    "train.eval_every=20",
    "embedding.tables.sparse_2.optimizer=adam",
    "plan=row_wise",
]
MEMORY = ["tier.device_bytes=40000"]
TWO = [*COMMON, "mesh.devices=2"]


def on_disk(folder: Path) -> list[str]:
    return [*MEMORY, "tier.dram_bytes=40000", f"tier.disk={folder}"]


def end_of(run: Path) -> dict[str, bytes]:
    """All that a run has learnt and measured, with whole tables, bit for bit."""
    step = max(int(p.name) for p in (run / "checkpoints").glob("[0-9]*"))
    saved = Checkpoints(run / "checkpoints", 2).restore(step, lambda of: load(states.one_version(of.arrays)))
    found: dict[str, bytes] = {}

    def walk(tree: dict[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{path}/{key}")
            else:
                found[f"{path}/{key}"] = np.asarray(value).tobytes()

    walk(saved, "")
    assert {"/tables/sparse_0/rows", "/tables/sparse_2/m"} <= found.keys()
    for split, names in (("train", ["loss"]), ("validation", ["loss", "auc", "ne"]), ("test", ["loss", "auc", "ne"])):
        found[split] = json.dumps([[line[name] for name in ["step", *names]] for line in lines_of(run, split)]).encode()
    return found


def assert_same(one: Path, other: Path) -> None:
    wanted, found = end_of(one), end_of(other)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if wanted[name] != found[name]] == []


def tier_of(run: Path) -> dict[str, int]:
    figures: dict[str, int] = json.loads((run / "summary.json").read_text())["tier"]
    return figures


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes of one device, which holds its share of all rows."""
    folder = tmp_path_factory.mktemp("whole")
    train_together(2, folder / "run", write_preset(folder), TWO)
    return folder / "run"


@pytest.mark.wide  # over a disk, two are compared with the same run in the next test
def test_two_processes_in_memory_as_one(whole: Path, tmp_path: Path) -> None:
    preset = write_preset(tmp_path)
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", preset, [*TWO, *MEMORY])
        assert_same(whole, tmp_path / f"by {processes}")
    one, two = tier_of(tmp_path / "by 1"), tier_of(tmp_path / "by 2")
    assert one["misses"] > one["written_rows"] > 1000
    for name in ("hits", "misses", "written_rows", "padded_bytes"):
        assert one[name] == two[name]
    assert 2 * two["directory_bytes"] == one["directory_bytes"]  # a process finds its own rows alone


def test_one_of_two_is_killed_one_goes_on_then_two_that_are_stopped(whole: Path, tmp_path: Path) -> None:
    preset, out, disk = write_preset(tmp_path), tmp_path / "run", on_disk(tmp_path / "disk")
    job = Job(out, preset, [*TWO, *disk], 2, limit_s=20)
    job.wait_for(lambda: job.step() > 6)
    os.kill(job.worker(1), signal.SIGKILL)
    assert job.wait(60) == [4, 4], job.tail()
    assert "process 1 was ended by SIGKILL" in " ".join(job.messages())
    assert list((tmp_path / "disk").iterdir()) == []  # a file of rows has no name
    train_together(1, out, preset, [*TWO, *disk, "train.steps=16", "train.checkpoint_increments=3"])
    newest = max((out / "checkpoints").glob("[0-9]*"))
    assert json.loads((newest / "manifest.json").read_text())["chain"]  # which two processes read
    assert tier_of(out)["disk_rows"] > 200
    job = Job(out, preset, [*TWO, *disk], 2, limit_s=30)
    job.wait_for(lambda: job.step() > 17)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait(60) == [143, 143], job.tail()
    train_together(2, out, preset, TWO)  # with all rows on the devices
    assert steps_of(out, "train") == list(range(1, 41))
    assert_same(whole, out)


@pytest.mark.wide
def test_two_go_on_from_a_chain_that_one_wrote_and_one_from_what_they_write(whole: Path, tmp_path: Path) -> None:
    """Several processes write whole checkpoints, after which one makes increments again."""
    preset, out, disk = write_preset(tmp_path), tmp_path / "run", on_disk(tmp_path / "disk")
    chained = [*TWO, *disk, "train.checkpoint_increments=3"]
    for processes, steps, links in ((1, 10, [5]), (2, 20, []), (1, 25, [20]), (2, 40, [])):
        train_together(processes, out, preset, [*chained, f"train.steps={steps}"])
        content = json.loads((out / "checkpoints" / f"{steps:08}" / "manifest.json").read_text())
        assert [link["step"] for link in content.get("chain", [])] == links
    assert_same(whole, out)


HOT = ["embedding.hot.rows=150", "embedding.hot.batches=2"]
HOW = {
    "two hosts, beside hot rows": (2, ["mesh.hosts=2", *HOT]),
    "two hosts, with a copy of hot rows on each": (2, ["mesh.hosts=2", *HOT, "embedding.hot.copies=host"]),
    "pooled vectors": (2, ["embedding.exchange.kind=pooled"]),
    "four processes in two replica groups": (4, ["mesh.replicas=2"]),
    # Of two devices: in which order gloo adds the means over rows of more depends on how many rows there are.
    "columns of every row in each process": (2, ["plan=column_wise", "mesh.devices=2"]),
    "columns over hosts": (2, ["mesh.hosts=2", "plan=grid"]),
}


@pytest.mark.wide  # over hosts, beside hot rows and with pooled vectors by one process: tests/tiers/test_training.py
@pytest.mark.parametrize("how", HOW)
def test_ways_to_place_rows(how: str, tmp_path: Path) -> None:
    preset, (processes, settings) = write_preset(tmp_path), HOW[how]
    overrides = [*COMMON, "mesh.devices=4", *settings]
    train_together(processes, tmp_path / "whole", preset, overrides)
    train_together(processes, tmp_path / "run", preset, [*overrides, *on_disk(tmp_path / "disk")])
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert tier_of(tmp_path / "run")["disk_rows"] > 200


PROGRAM = """
import errno, os, sys
import numpy as np
from recjax.cli.main import main
from recjax.parallel import distributed
from recjax.tiers.directory import Directory
from recjax.tiers.transfers import Transfers

{}
sys.exit(main())
"""


def ended(program: str, tmp_path: Path, *settings: str) -> tuple[list[int], list[str]]:
    """The statuses of two processes that train in a program of their own, and what they said."""
    command = [sys.executable, "-c", PROGRAM.format(program), "train", write_preset(tmp_path), *TWO, *settings]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    port, out = free_port(), ["--out", str(tmp_path / "run")]
    both = [forked.Popen([*command, *out], env=environment(2, k, port, limit_s=20), **pipes) for k in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert not any("Traceback" in text for text in said), said
    return [process.returncode for process in both], said


# After some batches process 1 gives the slots of rows that go to others than process 0 does. (A supervised child is a
# fork, and patches once more.)
ASTRAY = """
def victims(directory, count, plain=Directory._victims):
    found = plain(directory, count)
    return np.roll(found, 1) if distributed.process() == 1 and directory.misses > 400 else found

Directory._victims = victims
"""


def test_a_process_that_decides_otherwise_ends_both(tmp_path: Path) -> None:
    statuses, said = ended(ASTRAY, tmp_path, *MEMORY, "plan=column_wise")  # each holds columns of every row
    assert statuses == [1, 1], said
    assert all("process 1 decided otherwise than other processes that hold the" in text for text in said), said


@pytest.mark.wide  # where each process has rows of its own, nobody else has to decide as it does
def test_a_process_decides_alone_which_of_its_rows_go(whole: Path, tmp_path: Path) -> None:
    statuses, said = ended(ASTRAY, tmp_path, *MEMORY)
    assert statuses == [0, 0], said
    assert_same(whole, tmp_path / "run")


def test_a_cache_that_is_too_small_is_an_error_of_both(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", write_preset(tmp_path), [*TWO, "tier.device_bytes=6000"], 2)
    assert job.wait(120) == [1, 1], job.tail()
    assert len(job.messages()) == 2
    assert all("two batches in a row name" in message for message in job.messages())
