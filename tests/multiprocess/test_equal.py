"""Several processes give the numbers of one: losses, tables, slots and dense part, after 50 steps in float64."""

from pathlib import Path

import pytest
from support.commands import lines_of, write_preset
from support.processes import assert_equal, train_together

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

PLACEMENTS = (
    "row_wise",
    "table_wise",
    "column_wise",
    "data_parallel",
    "data_parallel_sparse",
    "table_row_wise",
    "grid",
)

# A table in every placement, and slots of all widths, in float64; 50 steps of one epoch and a quarter, the end of which
# is a batch of 4 samples.
COMMON = [
    "compute_dtype=float64",
    "data.rows=300,50,200,70,120,90,60",
    "data.ids_per_bag=1,0,3,1,2,1,2",
    "data.weighted=false,true,false,false,true,false,false",
    "data.zipf=0",  # needs of the batches vary less then, and programs are compiled three times instead of eight
    "train.steps=50",
    "train.checkpoint_every=0",
    "train.eval_every=50",
    "embedding.tables.sparse_0.optimizer=adam",
    "embedding.tables.sparse_3.optimizer=ftrl",
    "embedding.features.sparse_2.pooling=mean",
]
SPREAD = [f"embedding.tables.sparse_{n}.placement={placement}" for n, placement in enumerate(PLACEMENTS)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    train_together(1, folder / "run", write_preset(folder), [*COMMON, "mesh.devices=8", "plan=row_wise"])
    return folder / "run"


HOW = {
    "over two hosts": ["mesh.hosts=2", "train.dense=sharded", "embedding.exchange.pieces=3"],
    "replica groups, routed by devices": [
        "mesh.replicas=2",
        "train.routing=device",
        "train.accumulate=2",
        "train.steps_per_call=3",
    ],
}
AVERAGED = [
    "mesh.devices=4",
    "mesh.replicas=2",
    "train.replica_sync=average",
    "train.average_every=7",
    "train.steps=20",
]


@pytest.mark.parametrize(
    "how", ["over two hosts", pytest.param("replica groups, routed by devices", marks=pytest.mark.wide)]
)
def test_two_processes_of_two_devices(how: str, alone: Path, tmp_path: Path) -> None:
    train_together(2, tmp_path / "run", write_preset(tmp_path), [*COMMON, *SPREAD, "mesh.devices=4", *HOW[how]])
    assert_equal(alone, tmp_path / "run", 1e-9)


@pytest.mark.wide
def test_groups_that_average_are_saved_by_two_processes_as_by_one(tmp_path: Path) -> None:
    preset, overrides = write_preset(tmp_path), [*COMMON, *AVERAGED, *SPREAD[:4]]
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", preset, overrides)
    assert_equal(tmp_path / "by 1", tmp_path / "by 2", 1e-9)


@pytest.mark.wide
def test_four_processes_of_two_devices(alone: Path, tmp_path: Path) -> None:
    """Two replica groups of two hosts each."""
    overrides = [*COMMON, *SPREAD, "mesh.devices=8", "mesh.hosts=4", "mesh.replicas=2"]
    train_together(4, tmp_path / "run", write_preset(tmp_path), overrides)
    assert_equal(alone, tmp_path / "run", 1e-9)


TASKS = [
    "compute_dtype=float64",
    "data.labels=binary,number,class",
    "data.masked=true",
    "model=mmoe",
    "model.experts=2",
    "model.expert=8",
    "model.tower=4",
    "model.batch_norm=true",
    "model.dropout=0.2",
    "train.steps=6",
    "train.checkpoint_every=0",
    "train.eval_every=3",
    "mesh.devices=2",
]


@pytest.mark.wide
def test_several_tasks_with_state_by_two_processes_as_by_one(tmp_path: Path) -> None:
    """Masks, statistics of the whole batch, dropped values, and the measures of each task."""
    preset = write_preset(tmp_path)
    for processes in (1, 2):
        train_together(processes, tmp_path / f"by {processes}", preset, TASKS)
    assert_equal(tmp_path / "by 1", tmp_path / "by 2", 1e-9)
    for split in ("validation", "test"):
        one, two = (lines_of(tmp_path / f"by {processes}", split) for processes in (1, 2))
        assert [line.keys() for line in one] == [line.keys() for line in two] and {"label_1.mse"} <= one[0].keys()
        for mine, other in zip(one, two, strict=True):
            assert {k: v for k, v in mine.items() if k != "split"} == pytest.approx(
                {k: v for k, v in other.items() if k != "split"}, rel=1e-9
            )
