"""Several processes give the numbers of one: losses, tables, slots and dense part, after 50 steps in float64."""

from pathlib import Path

import pytest
from commands import write_preset
from process_support import assert_equal, run_together

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


ONE_STEP = placed("row_wise", "table_wise", "column_wise")
TWO_STEPS = placed("grid", "data_parallel", "table_row_wise")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    run_together(1, [(folder / "run", write_preset(folder), [*COMMON, "mesh.devices=8", "plan=row_wise"])])
    return folder / "run"


def test_two_processes(alone: Path, tmp_path: Path) -> None:
    preset, devices = write_preset(tmp_path), "mesh.devices=4"
    run_together(
        2,
        [
            (tmp_path / "one_step", preset, [*COMMON, devices, *ONE_STEP]),
            (tmp_path / "two_steps", preset, [*COMMON, devices, "mesh.hosts=2", *TWO_STEPS, "train.dense=sharded"]),
            (tmp_path / "routed", preset, [*COMMON, devices, *ONE_STEP, "train.routing=device", "train.accumulate=2"]),
        ],
    )
    for name in ("one_step", "two_steps", "routed"):
        assert_equal(alone, tmp_path / name, 1e-9)


def test_four_processes_of_two_devices(alone: Path, tmp_path: Path) -> None:
    placements = placed("grid", "row_wise", "table_row_wise")
    overrides = [*COMMON, "mesh.devices=8", "mesh.hosts=4", *placements]
    run_together(4, [(tmp_path / "run", write_preset(tmp_path), overrides)])
    assert_equal(alone, tmp_path / "run", 1e-9)
