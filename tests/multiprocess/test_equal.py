"""Several processes give the numbers of one: losses, tables, slots and dense part, after 50 steps in float64."""

from pathlib import Path

import pytest
from commands import write_preset
from process_support import assert_equal, train_together

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# Every kind of slot, in float64; 50 steps of one epoch and a quarter, the end of which is a batch of 4 samples.
COMMON = [
    "compute_dtype=float64",
    "train.steps=50",
    "train.checkpoint_every=0",
    "train.eval_every=50",
    "embedding.tables.sparse_0.optimizer=adam",
    "embedding.tables.sparse_1.optimizer=ftrl",
    "embedding.features.sparse_1.pooling=mean",
]


def placed(*placements: str) -> list[str]:
    return [f"embedding.tables.sparse_{n}.placement={placement}" for n, placement in enumerate(placements)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    train_together(1, folder / "run", write_preset(folder), [*COMMON, "mesh.devices=8", "plan=row_wise"])
    return folder / "run"


HOW = {
    "one step": ["mesh.devices=4", *placed("row_wise", "table_wise", "column_wise")],
    "two steps": ["mesh.devices=4", "mesh.hosts=2", "train.dense=sharded",
                  *placed("grid", "data_parallel", "table_row_wise")],
    "replica groups, routed by devices": ["mesh.devices=4", "mesh.replicas=2", "train.routing=device",
                                          "train.accumulate=2", *placed("row_wise", "data_parallel", "column_wise")],
}  # fmt: skip
AVERAGED = ["mesh.devices=4", "mesh.replicas=2", "train.replica_sync=average", "train.average_every=7"]


@pytest.mark.parametrize("how", HOW)
def test_two_processes_of_two_devices(how: str, alone: Path, tmp_path: Path) -> None:
    train_together(2, tmp_path / "run", write_preset(tmp_path), [*COMMON, *HOW[how]])
    assert_equal(alone, tmp_path / "run", 1e-9)


def test_groups_that_average_are_saved_by_two_processes_as_by_one(tmp_path: Path) -> None:
    preset, overrides = write_preset(tmp_path), [*COMMON, *AVERAGED, *placed("row_wise", "data_parallel")]
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", preset, overrides)
    assert_equal(tmp_path / "by 1", tmp_path / "by 2", 1e-9)


def test_four_processes_of_two_devices(alone: Path, tmp_path: Path) -> None:
    """Two replica groups of two hosts."""
    placements = placed("grid", "row_wise", "table_row_wise")
    overrides = [*COMMON, "mesh.devices=8", "mesh.hosts=4", "mesh.replicas=2", *placements]
    train_together(4, tmp_path / "run", write_preset(tmp_path), overrides)
    assert_equal(alone, tmp_path / "run", 1e-9)
