"""A split that several processes evaluate: each reads a part of its own, and the figures are those of one process."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from support.commands import inside, start
from support.processes import environment, free_port

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.storage import blocks
from recjax.data.storage.packed_rows import PackedSplit

pytestmark = [
    pytest.mark.full,
    pytest.mark.multiprocess,
    pytest.mark.light_compile,
    pytest.mark.few_programs,
    pytest.mark.shared_programs,
]

NOTED = """
from recjax.data.storage.packed_rows import PackedSplit
def noted(self, numbers_B, out_BxW, plain=PackedSplit.take):
    with open(LOG, "a") as log:
        print(*numbers_B.tolist(), sep="\\n", file=log)
    return plain(self, numbers_B, out_BxW)
if PackedSplit.take.__name__ != "noted":  # a supervisor starts its program again
    PackedSplit.take = noted
"""
BLOCKS = 37


def block(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    count = 5 + seed % 7
    lengths = rng.integers(0, 3, count).astype(np.int32)
    users, tags = rng.integers(0, 9, (count, 1)), rng.integers(0, 8, lengths.sum())
    labels = (rng.random(count) < 0.2 + 0.6 * (users[:, 0] % 2)).astype(np.float32)
    bags = {"user": Bags(users), "tags": Bags(tags, lengths)}
    dense, weights = rng.normal(size=(count, 1)).astype(np.float32), rng.integers(0, 3, count).astype(np.float32)
    return Batch(dense, bags, labels, weights)


@pytest.fixture(scope="module")
def run(preset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    schema = Schema(("x",), (Feature("user", 9), Feature("tags", 8, None)))
    splits = {"train": [block(40)], "validation": [block(41)], "test": [block(n) for n in range(BLOCKS)]}
    blocks.write_prepared(folder / "data", "clicks", schema, splits, {})
    done = inside(
        "train",
        preset,
        "data=prepared",
        f"data.path={folder / 'data'}",
        "mesh.devices=4",
        "train.steps=2",
        "train.eval_batch_size=30",
        "--out",
        folder / "run",
    )
    assert done.status == 0, done.err
    return folder / "run"


def evaluated(run, log, processes, *options):
    """Returns what `recjax eval` of so many processes says; each notes in the file `log` which rows it reads.

    The only process is this one.
    """
    before, command = NOTED.replace("LOG", repr(str(log))), ("eval", run, "mesh.devices=4", *options, "--json")
    if processes == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedSplit, "take", PackedSplit.take)  # it is put back
            exec(before, {})
            return inside(*command).result
    port, started = free_port(), []
    for process in range(processes):
        started.append(start(*command, before=before, env=environment(processes, process, port)))
    ends = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * processes, ends
    assert [out for out, _ in ends[1:]] == [""] * (processes - 1)
    return json.loads(ends[0][0])


def test_four_processes_read_each_row_once_and_say_what_one_says(run, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert evaluated(run, together, 4) == evaluated(run, alone, 1)
    reads = Counter(together.read_text().split())
    rows = sum(block(number).size for number in range(BLOCKS))
    assert reads == Counter(str(row) for row in range(rows)) == Counter(alone.read_text().split())


def test_slices_and_groups_of_a_split_too_large_to_be_kept(run):
    options = ("--exact-rows", "9", "--by", "tags", "--group", "user", "--top", "3")
    one = evaluated(run, os.devnull, 1, *options)
    two = evaluated(run, os.devnull, 2, *options)
    curves = [[point.pop("predicted") for point in found["calibration_curve"]] for found in (one, two)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-14) and one.pop("ece") == pytest.approx(two.pop("ece"))
    assert one.pop("predictions") and two.pop("predictions")
    assert one == two and one["auc_method"] == "binned" and one["by"]["tags"] and one["grouped"]["groups"]
