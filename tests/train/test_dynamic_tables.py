"""Tables that give rows to keys train like tables whose ids are numbers of rows."""

from __future__ import annotations

import functools
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import arrays, assert_refused, assert_same_arrays, lines_of, outside, start

from recjax.config import presets
from recjax.data.prepare.ids import stable_hash
from recjax.embedding.row_order import RowOrder
from recjax.errors import ConfigError
from recjax.train.build import build_trainer
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.light_compile(optimised=True), pytest.mark.few_programs]

ROWS, STEPS = (300, 90), 24
SMALL = (
    f"data.rows={ROWS[0]},{ROWS[1]}",
    "data.ids_per_bag=1,0",
    "data.dense=2",
    "data.zipf=0.6",
    "data.train_rows=1200",
    "data.validation_rows=200",
    "data.test_rows=200",
    "train.batch_size=64",
    "train.steps=24",
    "train.workers=0",
    "embedding.dim=4",
    "small.below_rows=0",
)

DLRM, DEEPFM = ("model.bottom=4", "model.top=4-1"), ("model=deepfm", "model.deep=4-1")


def dynamic(capacity: tuple[int, ...] = ROWS, **how: Any) -> tuple[str, ...]:
    found = []
    for f, rows in enumerate(capacity):
        key = f"embedding.tables.sparse_{f}.ids"
        found += [f"{key}=dynamic", f"{key}.capacity={rows}", *(f"{key}.{name}={value}" for name, value in how.items())]
    return tuple(found)


def trainer_of(devices: int, *settings: str) -> Trainer:
    model = () if DEEPFM[0] in settings else DLRM
    return build_trainer(presets.load("synthetic", [*SMALL, *model, f"mesh.devices={devices}", *settings]))


def trained(trainer: Trainer, steps: int = STEPS, start: Any = None) -> tuple[Any, list[bytes], dict[str, Any]]:
    """The state, losses and stream state after some steps, from the beginning or (state, stream state)."""
    state, stream = (trainer.init_state(), None) if start is None else start
    inputs, losses = trainer.train_inputs(host=state.host), []
    if stream is not None:
        inputs.load_state_dict(stream)
    for _ in range(steps):
        batch = next(inputs)
        state = trainer.admit(state, inputs.latest)
        state, metrics = trainer.train_step(state, batch)
        losses.append(np.asarray(metrics["loss"]).tobytes())
    return state, losses, inputs.state_dict()


def by_key(trainer: Trainer, state: TrainState) -> dict[str, Any]:
    """Arrays of all tables in the order of ids 0 to V - 1."""
    found, arrays = {}, load(trainer.export(state))
    for f, rows in enumerate(ROWS):
        table, ids = arrays["tables"][f"sparse_{f}"], np.arange(rows)
        at = ids
        if state.host.ids is not None:
            keys = stable_hash(ids).view(np.int64) if trainer.config.data.raw_ids else ids
            at = state.host.ids._sources[f"sparse_{f}"].map.find(keys)
            ids = ids[at < rows]
            at = at[at < rows]
        position = RowOrder(len(table["rows"])).position(at)
        found[f"{f}"] = {
            name: dict(zip(ids.tolist(), map(bytes, array[position]), strict=True)) for name, array in table.items()
        }
    return found


def equal_to_static(devices: int, *settings: str) -> None:
    static, keyed = trainer_of(devices, *settings), trainer_of(devices, *dynamic(), *settings)
    state, losses, _ = trained(static)
    keyed_state, keyed_losses, _ = trained(keyed)
    assert keyed_losses == losses
    truth, found = by_key(static, state), by_key(keyed, keyed_state)
    for table, of in found.items():
        for name, rows in of.items():
            assert len(rows) > 50
            assert rows == {key: truth[table][name][key] for key in rows}
    assert keyed_state.host.ids is not None
    assert all(of["unknown_ids"] == of["evicted"] == 0 for of in keyed_state.host.ids.figures().values())


@pytest.mark.full
@pytest.mark.wide
def test_losses_and_rows_are_those_of_a_static_table() -> None:
    equal_to_static(2, "plan=row_wise")


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        pytest.param(1, ("plan=row_wise",), marks=pytest.mark.wide),
        (3, ("plan=column_wise",)),
        (8, ("plan=row_wise", "embedding.optimizer=adam", *DEEPFM)),
        pytest.param(2, ("plan=data_parallel",), marks=pytest.mark.wide),
    ],
)
@pytest.mark.full
def test_losses_and_rows_are_those_of_a_static_table_on_any_mesh(devices: int, settings: tuple[str, ...]) -> None:
    equal_to_static(devices, *settings)


TIGHT = ("data.raw_ids=true", "plan=row_wise", *dynamic((40, 20), admit_after=2, evict="frequency", waiting=30))


@functools.cache
def whole() -> tuple[list[bytes], Any]:
    trainer = trainer_of(2, *TIGHT)
    state, losses, _ = trained(trainer)
    return losses, load(trainer.export(state))


@pytest.mark.full
def test_a_run_goes_on_to_the_bit_and_decisions_do_not_depend_on_the_mesh() -> None:
    losses, end = whole()
    trainer = trainer_of(2, *TIGHT)
    state, before, stream = trained(trainer, 13)
    saved = load(trainer.checkpoint(state))
    trained(trainer, 3, (state, stream))  # beyond what was saved
    state, after, _ = trained(trainer, STEPS - 13, (trainer.restore(saved, 13, host=state.host), stream))
    assert before + after == losses
    found = load(trainer.export(state))
    for part in ("tables", "ids"):
        for name, of in end[part].items():
            assert {key: array.tobytes() for key, array in of.items()} == {
                key: np.asarray(found[part][name][key]).tobytes() for key in of
            }
    counts = state.host.ids.figures()["sparse_0"]
    assert counts["held"] == 40 and min(counts[n] for n in ("evicted", "turned_away", "waiting", "forgotten")) > 0


def test_predictions_leave_the_map_alone() -> None:
    trainer = trainer_of(2, *TIGHT)
    losses, end = whole()
    state = trainer.restore(end, STEPS)
    before = state.host.ids.state()
    logits = [
        np.concatenate([x for _, x in trainer.predict(state, trainer.eval_inputs("test", host=state.host))])
        for _ in range(2)
    ]
    assert logits[0].tobytes() == logits[1].tobytes()
    after = state.host.ids.state()
    assert all(np.array_equal(after[t][name], x) for t, of in before.items() for name, x in of.items())


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("tier.device_bytes", ("tier.device_bytes=2KiB", "plan=row_wise")),
        ("mesh.replicas", ("mesh.replicas=2",)),
        ("embedding.hot.rows", ("embedding.hot.rows=20",)),
        ("every_row", ("embedding.optimizer.every_row=true",)),
        ("train.routing=device", ("train.routing=device",)),
        ("sparse_0.linear", (*DEEPFM, "embedding.tables.sparse_0.linear.ids=dynamic")),
    ],
)
def test_what_does_not_go_with_such_tables_is_refused(words: str, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(2, *dynamic(), *settings).router  # noqa: B018


def test_raw_ids_need_such_tables() -> None:
    with pytest.raises(ConfigError, match=r"embedding\.tables\.sparse_0\.ids=dynamic"):
        trainer_of(1, "data.raw_ids=true")


@pytest.mark.full
@pytest.mark.multiprocess
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    command = ("train", "synthetic", *SMALL, *DLRM, *TIGHT, "mesh.devices=2", "train.checkpoint_every=20")
    command = (*command, "train.log_every=1", "train.steps=120")
    assert outside(*command, "--out", tmp_path / "whole").status == 0
    killed = tmp_path / "killed"
    with start(*command, "--out", killed) as process:
        while process.poll() is None and not list(killed.glob("checkpoints/[0-9]*")):
            time.sleep(0.001)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    steps = [int(path.name) for path in (killed / "checkpoints").iterdir() if path.name.isdigit()]
    assert 0 < max(steps) < 120
    assert outside(*command, "--out", killed).status == 0
    assert_same_arrays(arrays(killed, 120), arrays(tmp_path / "whole", 120))
    for line, truth in zip(lines_of(killed, "train"), lines_of(tmp_path / "whole", "train"), strict=True):
        assert {**line, "samples_per_s": 0} == {**truth, "samples_per_s": 0}
    done = outside("predict", killed, "--input", tmp_path, "--out", tmp_path / "scores.csv")
    assert done.status != 0 and "Traceback" not in done.err
    assert_refused(outside("export", killed, "--out", tmp_path / "exported"), 2, r"ids=dynamic", r"recjax predict")
