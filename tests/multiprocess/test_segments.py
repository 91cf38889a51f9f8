"""Tables in several segments, some of which pool, by several processes: one's numbers, and checkpoints it reads."""

from pathlib import Path

import pytest
from support.commands import write_preset
from support.processes import assert_equal, train_together

from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment

pytestmark = [pytest.mark.full, pytest.mark.wide, pytest.mark.multiprocess]

# Row-wise Adagrad, D = 8, one table of each kind of bag.
COMMON = ["compute_dtype=float64", "data.zipf=0", "train.steps=24", "train.checkpoint_every=0", "train.eval_every=24"]
HOT, LEFT, RIGHT, POOLED = RowIds((0, 3, 4, 17)), (0, 4), (4, 8), Exchange(kind="pooled")
PLAN = Plan(
    {
        "sparse_0": (
            Segment("table_wise", columns=LEFT, owners=1, exchange=POOLED),
            Segment("table_row_wise", columns=RIGHT, exchange=POOLED),
        ),
        "sparse_1": (Segment("data_parallel", HOT), Segment("table_wise", "rest", owners=1, exchange=POOLED)),
        "sparse_2": (
            Segment("row_wise", HOT, owners=(1, 0)),
            Segment("table_wise", "rest", columns=LEFT),
            Segment("row_wise", "rest", columns=RIGHT),
        ),
    }
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tables whole, by one process with two devices."""
    folder = tmp_path_factory.mktemp("alone")
    train_together(1, folder / "run", write_preset(folder), [*COMMON, "mesh.devices=2", "plan=row_wise"])
    return folder / "run"


@pytest.mark.parametrize(
    ("processes", "how"), [(2, ["mesh.hosts=2"]), (4, ["mesh.replicas=2"])], ids=["two hosts", "two replica groups"]
)
def test_each_process_saves_what_it_holds_of_every_segment(
    processes: int, how: list[str], alone: Path, tmp_path: Path
) -> None:
    preset, plan = write_preset(tmp_path), tmp_path / "plan.json"
    plan.write_text(PLAN.to_json())
    train_together(processes, tmp_path / "run", preset, [*COMMON, f"plan={plan}", "mesh.devices=4", *how])
    assert_equal(alone, tmp_path / "run", 1e-9)
