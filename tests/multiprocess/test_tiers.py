"""Rows on the host of several processes: the bits of the same processes with all rows on the devices."""

from __future__ import annotations

import errno
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

# Row-wise Adagrad, D = 8, one table of each kind of bag.
COMMON = ["data.rows=3000,500,2000", "data.zipf=0", "train.steps=24", "train.checkpoint_every=6",
          "train.eval_every=12", "plan=row_wise"]  # fmt: skip
MEMORY = ["tier.device_bytes=24000"]


def on_disk(folder: Path) -> list[str]:
    return [*MEMORY, "tier.dram_bytes=20000", f"tier.disk={folder}"]


def end_of(run: Path) -> dict[str, bytes]:
    """All that a run has learnt and said, with tables whole, bit for bit."""
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
    assert {"/tables/sparse_0/rows", "/opt/0.sum_of_squares.bottom.0.kernel"} & found.keys()
    for split, names in (("train", ("loss",)), ("validation", ("loss", "auc")), ("test", ("loss", "auc"))):
        found[split] = json.dumps([[line[name] for name in ("step", *names)] for line in lines_of(run, split)]).encode()
    return found


def assert_same(one: Path, other: Path) -> None:
    wanted, found = end_of(one), end_of(other)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if wanted[name] != found[name]] == []


def test_slice(tmp_path: Path) -> None:
    preset = write_preset(tmp_path)
    two = [*COMMON, "mesh.devices=2"]
    train_together(2, tmp_path / "whole", preset, two)
    train_together(2, tmp_path / "memory", preset, [*two, *MEMORY])
    print((tmp_path / "memory/summary.json").read_text())
    assert_same(tmp_path / "whole", tmp_path / "memory")
