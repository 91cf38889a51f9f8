"""Increments of a training with rows on the host: they hold what changed, and restore what whole checkpoints would."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.checkpoints import names, no_report
from support.contract import OPTIONS, Net
from support.problems import Problem, trainer_of

from recjax.config.train import DenseAdagrad
from recjax.data.batch import Bags, Batch
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.row_order import RowOrder
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import TrainingError
from recjax.tiers import disk
from recjax.tiers.host_rows import GroupRows
from recjax.train.callbacks import Increments
from recjax.train.checkpoint import array_store
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.inputs import InputStream
from recjax.train.state import TrainState, one_version
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load

pytestmark = pytest.mark.light_compile

B, V, D = 8, 500, 4
# Phases, after each of which there is a checkpoint: steps, and the rows that their batches name. Some of the first come
# again; some come first in the second or the fourth; the third names none.
PHASES = (
    (12, range(220)),
    (2, range(190, 260)),
    (2, range(0)),
    (2, range(200, 330)),
    (2, range(5)),
    (2, range(300, 420)),
)
FIRST = np.cumsum([0, *(count for count, _ in PHASES)]).tolist()  # step of each phase


def make_batch(step: int) -> Batch:
    rng, among = np.random.default_rng(step), PHASES[int(np.searchsorted(FIRST, step, "right")) - 1][1]
    lengths = rng.integers(1, 4, B) if len(among) else np.zeros(B, np.int64)
    ids = rng.choice(np.array(among), lengths.sum()) if len(among) else np.zeros(0, np.int64)
    labels = (rng.random(B) < 0.4).astype(np.float32)
    bags = {"x": Bags(ids.astype(np.int64), lengths.astype(np.int32))}
    return Batch(rng.normal(size=(B, 2)).astype(np.float32), bags, labels, np.ones(B, np.float32))


def make() -> Problem:
    """Two groups, one of two tables; the last one in bfloat16."""
    optimizers: dict[str, Any] = {"a": RowWiseAdagrad(0.2), "b": RowWiseAdagrad(0.2), "c": Sgd(0.5, momentum=0.9)}
    tables = [TableSpec(name, V + k, D, rule, dtype="float32") for k, (name, rule) in enumerate(optimizers.items())]
    tables[2] = TableSpec("c", V, D, optimizers["c"], dtype="bfloat16")
    features = tuple(FeatureSpec(table.name, table.name, None, "sum", False, "x") for table in tables)
    batches, tx = [make_batch(step) for step in range(FIRST[-1])], DenseAdagrad(0.1).build()
    return Problem(batches, B, tuple(tables), features, Net(), 2, tx, options=OPTIONS)


def stream_of(problem: Problem, trainer: Trainer, state: TrainState, phase: int) -> InputStream:
    """The batches from a phase on, in arrays of one size."""
    routed = [trainer.route(batch, B) for batch in problem.batches]
    size = B * len(routed)
    stream = InputStream(lambda p: iter(routed[p // B :]), trainer.router, B, size, None, trainer.stages(state.host))
    needs = [batch.routed.required_capacities for batch in routed]
    largest = {name: max(of[name] for of in needs) for name in needs[0]}
    stream.load_state_dict({"position": FIRST[phase] * B, "capacities": largest, "peaks": {}})
    return stream


def trained(trainer: Trainer, state: TrainState, stream: InputStream, phase: int) -> TrainState:
    """The state after the steps of a phase."""
    for _ in range(PHASES[phase][0]):
        inputs = next(stream)
        state, metrics = trainer.train_step(trainer.admit(state, stream.latest), inputs)
        assert bool(metrics["ok"])
    return state


def bits(arrays: Any) -> Any:
    return jax.tree.map(np.ndarray.tobytes, load(arrays))


def ends_of(problem: Problem, devices: int, plan: str | Plan = "row_wise") -> list[Any]:
    """The bits after each phase with all rows on the devices, where there is neither a tier nor an increment."""
    trainer = trainer_of(problem, devices, plan)
    state, found = trainer.init_state(), []
    stream = stream_of(problem, trainer, state, 0)
    for phase in range(len(PHASES)):
        state = trained(trainer, state, stream, phase)
        found.append(bits(trainer.export(state)))
    return found


def save(trainer: Trainer, increments: Increments, checkpoints: Checkpoints, state: TrainState, phases: int) -> int:
    """Saves after so many phases as a run does; returns how many checkpoints its chain has before it."""
    step = FIRST[phases]
    increments.wait()
    arrays, after = increments.arrays(state, step)
    checkpoints.save(step, arrays, {}, after=after)
    checkpoints.wait_for_arrays()
    return len(after)


def restored(checkpoints: Checkpoints, phases: int) -> Any:
    """The bits of the checkpoint after so many phases, all tables whole."""
    return checkpoints.restore(FIRST[phases], lambda found: bits(one_version(found.arrays)))


def rows_in(directory: Path, phases: int, table: str) -> np.ndarray:
    """The positions of the rows of a table that are in the files of a checkpoint itself, ascending."""
    folder = directory / f"{FIRST[phases]:08}"
    content = json.loads((folder / "manifest.json").read_text())
    arrays = array_store.read(folder / "state", content["arrays"])
    found: np.ndarray = np.sort(arrays["written"][table]["positions"].load())
    return found


def named_in(problem: Problem, phases: range) -> np.ndarray:
    """The rows that batches of some phases name, ascending."""
    batches = problem.batches[FIRST[phases.start] : FIRST[phases.stop]]
    return np.unique(np.concatenate([batch.bags["x"].ids for batch in batches]))


@pytest.mark.parametrize(
    ("devices", "plan"),
    [
        (1, "row_wise"),
        pytest.param(2, "row_wise", marks=[pytest.mark.full, pytest.mark.wide]),
        pytest.param(8, "row_wise", marks=pytest.mark.full),
        pytest.param(2, "column_wise", marks=pytest.mark.full),
    ],
)
def test_they_hold_the_rows_that_changed_and_restore_the_bits_of_a_run_without(
    devices: int, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "memory_records", lambda *_: 16)
    problem = make()
    ends, program = ends_of(problem, devices, plan), None
    for dram_bytes in (0, 2_000):
        how: Any = {"cache_bytes": 1_000 + 4_000 // devices, "dram_bytes": dram_bytes, "increments": 2}
        scratch = str(tmp_path / "scratch") if dram_bytes else ""
        trainer = trainer_of(problem, devices, plan, disk=scratch, **how)
        assert len(trainer.bound.cached) == 2
        if program is not None:
            vars(trainer)["step_program"] = program
        program = trainer.step_program
        folder = tmp_path / f"memory {dram_bytes}"
        with Checkpoints(folder, 9) as checkpoints:
            increments, state = Increments(trainer, checkpoints), trainer.init_state()
            stream, before = stream_of(problem, trainer, state, 0), []
            for phase in range(len(PHASES)):
                state = trained(trainer, state, stream, phase)
                if phase % 2:
                    trainer.export(state)  # as an evaluation does, which loses no mark
                before.append(save(trainer, increments, checkpoints, state, phase + 1))
            increments.wait()
            assert before == [0, 1, 2, 0, 1, 2]
            for phase, end in enumerate(ends):
                assert restored(checkpoints, phase + 1) == end
        for table in problem.tables:
            order = RowOrder(table.rows)
            for phase, count in enumerate(before):
                named = named_in(problem, range(phase if count else 0, phase + 1)).astype(np.int32)
                expected = np.sort(order.position(named))
                assert rows_in(folder, phase + 1, table.name).tolist() == expected.tolist()
        assert not len(rows_in(folder, 3, "a"))
        if dram_bytes:
            assert state.host.tier.figures()["disk_rows"] > 0
        state.host.close()


@pytest.mark.full
def test_a_run_goes_on_from_a_chain_with_increments_after_it_and_on_any_mesh_and_tier(tmp_path: Path) -> None:
    problem = make()
    ends = ends_of(problem, 2)
    trainer = trainer_of(problem, 2, cache_bytes=3_000, increments=9)
    with Checkpoints(tmp_path, 9) as checkpoints:
        increments, state = Increments(trainer, checkpoints), trainer.init_state()
        stream = stream_of(problem, trainer, state, 0)
        for phase in range(3):
            state = trained(trainer, state, stream, phase)
            save(trainer, increments, checkpoints, state, phase + 1)

    def on(trainer: Trainer, checkpoints: Checkpoints) -> TrainState:
        def use(found: Restored) -> TrainState:
            return trainer.restore(found.arrays, found.step, found.chain)

        state = checkpoints.newest(no_report, use)
        assert state is not None
        return state

    with Checkpoints(tmp_path, 9) as checkpoints:
        for other in (
            trainer_of(problem, 8, cache_bytes=1_500, increments=3),
            trainer_of(problem, 1, "table_wise", cache_bytes=5_000),
            trainer_of(problem, 2, hot_plan(problem), cache_bytes=3_000),
            trainer_of(problem, 1),
        ):
            assert bits(other.export(on(other, checkpoints))) == ends[2]
        # On the same mesh it ends with the same bits; its next checkpoint is an increment of what it changes.
        state = on(trainer, checkpoints)
        state = trained(trainer, state, stream_of(problem, trainer, state, 3), 3)
        increments = Increments(trainer, checkpoints)
        assert save(trainer, increments, checkpoints, state, 4) == 3
        increments.wait()
        assert restored(checkpoints, 4) == bits(trainer.export(state)) == ends[3]
        named = named_in(problem, range(3, 4)).astype(np.int32)
        assert rows_in(tmp_path, 4, "a").tolist() == np.sort(RowOrder(V).position(named)).tolist()
        # Again at the step where it went on: nothing could be read over itself.
        state = on(trainer, checkpoints)
        assert save(trainer, increments, checkpoints, state, 4) == 0
        increments.wait()
        assert restored(checkpoints, 4) == ends[3]
        # From a run whose rows were all on the devices: nothing on the host is as in a checkpoint.
        whole = trainer_of(problem, 2)
        checkpoints.save(FIRST[5], whole.checkpoint(on(whole, checkpoints)), {})
        checkpoints.wait()
        assert save(trainer, increments, checkpoints, on(trainer, checkpoints), 6) == 0
        increments.wait()
        assert restored(checkpoints, 6) == ends[3]


def hot_plan(problem: Problem) -> Plan:
    """Rows of two tables that all devices hold."""
    hot = {t.name: (Segment("hot", RowIds((3, 50, 77, 480))), Segment("row_wise", "rest")) for t in problem.tables[:2]}
    return Plan({**hot, problem.tables[2].name: (Segment("row_wise"),)})


@pytest.mark.full
def test_hot_rows_are_in_each(tmp_path: Path) -> None:
    problem = make()
    plan = hot_plan(problem)
    ends, trainer = ends_of(problem, 2, plan), trainer_of(problem, 2, plan, cache_bytes=3_000, increments=9)
    with Checkpoints(tmp_path, 9) as checkpoints:
        increments, state = Increments(trainer, checkpoints), trainer.init_state()
        stream = stream_of(problem, trainer, state, 0)
        for phase in range(4):
            state = trained(trainer, state, stream, phase)
            assert save(trainer, increments, checkpoints, state, phase + 1) == phase
        increments.wait()
        assert [restored(checkpoints, phase + 1) for phase in range(4)] == ends[:4]
        hot = RowOrder(V).position(np.array([3, 50, 77, 480], np.int32))
        assert rows_in(tmp_path, 3, "a").tolist() == np.sort(hot).tolist()
        assert not len(rows_in(tmp_path, 3, "c"))
        # Others are hot, or none, when it goes on.
        for other in (trainer_of(problem, 2, cache_bytes=3_000, increments=9), trainer_of(problem, 2)):

            def use(found: Restored, other: Trainer = other) -> TrainState:
                return other.restore(found.arrays, found.step, found.chain)

            state = checkpoints.restore(FIRST[4], use)
            assert bits(other.export(state)) == ends[3]
            if other.bound.cached:
                assert save(other, Increments(other, checkpoints), checkpoints, state, 5) == 4
                checkpoints.wait()
                assert restored(checkpoints, 5) == ends[3]
                assert not len(rows_in(tmp_path, 5, "a"))


def test_a_checkpoint_that_failed_loses_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make()
    ends, trainer = ends_of(problem, 1), trainer_of(problem, 1, cache_bytes=5_000, increments=9)
    with Checkpoints(tmp_path, 9) as checkpoints:
        increments, state = Increments(trainer, checkpoints), trainer.init_state()
        stream = stream_of(problem, trainer, state, 0)
        state = trained(trainer, state, stream, 0)
        save(trainer, increments, checkpoints, state, 1)
        state = trained(trainer, state, stream, 1)
        with monkeypatch.context() as patched:
            patched.setattr(array_store, "write", full)
            save(trainer, increments, checkpoints, state, 2)
            with pytest.raises(TrainingError, match="No space left"):
                increments.wait()
        for phase in (2, 3):
            state = trained(trainer, state, stream, phase)
        assert save(trainer, increments, checkpoints, state, 4) == 1
        trainer.checkpoint(state)  # which somebody else may do with it what they want, and not say
        state = trained(trainer, state, stream, 4)
        trainer.checkpoint(state)
        assert save(trainer, increments, checkpoints, state, 5) == 1  # after the first again: nobody knows how far
        increments.wait()
        assert names(tmp_path) == ["00000012", "00000018", "00000020"]
        assert [restored(checkpoints, phases) for phases in (4, 5)] == [ends[3], ends[4]]
        named = named_in(problem, range(1, 4)).astype(np.int32)
        assert rows_in(tmp_path, 4, "b").tolist() == np.sort(RowOrder(V + 1).position(named)).tolist()
        # One whose chain is not there any more is whole.
        state = trained(trainer, state, stream, 5)
        os.rename(tmp_path / "00000012", tmp_path / "elsewhere")
        assert save(trainer, increments, checkpoints, state, 6) == 0
        increments.wait()
        assert restored(checkpoints, 6) == ends[5]


def test_only_rows_that_changed_leave_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third phase names none, the fifth five, and the caches hold more."""
    problem = make()
    trainer = trainer_of(problem, 1, cache_bytes=5_000, increments=9)
    written: list[int] = []
    plain = GroupRows.put

    def put(self: GroupRows, part: int, homes_K: np.ndarray, records: np.ndarray) -> None:
        written.append(len(homes_K))
        plain(self, part, homes_K, records)

    with Checkpoints(tmp_path, 9) as checkpoints:
        increments, state = Increments(trainer, checkpoints), trainer.init_state()
        stream, counts = stream_of(problem, trainer, state, 0), []
        for phase in range(5):
            state = trained(trainer, state, stream, phase)
            assert state.host.tier is not None
            state.host.tier.wait_for_writes()
            with monkeypatch.context() as patched:
                patched.setattr(GroupRows, "put", put)
                save(trainer, increments, checkpoints, state, phase + 1)
            counts.append(sum(written))
            written.clear()
        increments.wait()
    assert counts[2] == 0
    assert counts[4] == 3 * len(named_in(problem, range(4, 5))) < 3 * 5 + 1
    assert min(counts[0], counts[1], counts[3]) > 15


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_increments_that_would_hold_more_than_the_whole_one_are_whole(tmp_path: Path) -> None:
    """Each batch names the same rows: one increment fits, two do not."""
    problem = make()
    problem.batches[:] = [problem.batches[step % 2] for step in range(FIRST[-1])]
    trainer = trainer_of(problem, 1, cache_bytes=5_000, increments=9)
    with Checkpoints(tmp_path, 99) as checkpoints:
        increments, state = Increments(trainer, checkpoints), trainer.init_state()
        stream = stream_of(problem, trainer, state, 0)
        found = []
        for phase in range(5):
            state = trained(trainer, state, stream, phase)
            found.append(save(trainer, increments, checkpoints, state, phase + 1))
        increments.wait()
    assert found == [0, 1, 0, 1, 0]
