"""Two processes give the numbers of one for a model of two sides: losses, weights, measures and candidates."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from support.commands import inside, lines_of
from support.processes import assert_equal, train_together

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]


@pytest.mark.parametrize("loss", ["softmax", "ccl", "full_softmax"])
def test_two_processes_train_and_rank_as_one(loss: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    table = tmp_path / "clicks.csv"
    with table.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["user", "item"])
        rows.writerows((user, 4 * int(rng.integers(0, 50)) + user % 4) for user in rng.integers(0, 40, 1500).tolist())
    overrides = [
        f"data.from={table}", "data.user=user", "data.item=item", f"model.loss={loss}", "embedding.dim=8",
        "train.optimizer=adagrad", "train.batch_size=100", "train.epochs=2", "train.log_every=1",
        "compute_dtype=float64", "mesh.devices=4", "plan=row_wise", "train.checkpoint_every=0",
    ]  # fmt: skip
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", Path("configs/two_tower.py").resolve(), overrides)
    assert_equal(tmp_path / "by 1", tmp_path / "by 2", 1e-9)
    one, two = (lines_of(tmp_path / f"by {processes}", "validation") for processes in (1, 2))
    assert [line["ndcg@20"] for line in two] == pytest.approx([line["ndcg@20"] for line in one], rel=1e-9)
    assert inside("predict", tmp_path / "by 2", "mesh.devices=1", "--topk", 3, "--out", tmp_path / "c.csv").status == 0
