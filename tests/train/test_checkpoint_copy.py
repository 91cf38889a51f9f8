"""The dense part of a checkpoint is a copy: training goes on in place while it is written, and changes none of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from recjax.config.presets import load
from recjax.parallel.mesh import whole
from recjax.train.build import build_trainer
from recjax.train.state import TrainState

pytestmark = pytest.mark.light_compile

SMALL = tuple(
    """
    data.rows=400,300 data.train_rows=2000 train.batch_size=40 plan=row_wise mesh.devices=4 model.bottom=256,16
    model.top=512,1
    """.split()
)


def places(state: TrainState) -> list[int]:
    """Where the parts of the dense part and its optimizer's state are in memory, on each device."""
    leaves = jax.tree.leaves((state.dense, state.opt))
    return [shard.data.unsafe_buffer_pointer() for x in leaves for shard in x.addressable_shards]


@pytest.mark.parametrize("dense", ["replicated", "sharded"])
def test_what_is_saved_is_no_view_of_the_state(dense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(load("synthetic", (*SMALL, f"train.dense={dense}")))
    stream = trainer.train_inputs()
    state, _ = trainer.train_step(trainer.init_state(), next(stream))
    before = places(state)
    assert len(set(before)) == len(before) >= 4 * 12
    viewed: list[int] = []

    def watched(x: jax.Array) -> np.ndarray:
        found = whole(x)
        viewed.append(found.ctypes.data)
        return found

    with monkeypatch.context() as patch:
        patch.setattr("recjax.train.state.whole", watched)
        saved = trainer.export(state)
    arrays = [*saved["dense"].values(), *saved["opt"].values()]
    assert len(viewed) == len(arrays) >= 12
    assert not set(viewed) & set(before)  # nor for a moment: a view of the state keeps the next step from its place
    assert not {x.ctypes.data for x in arrays} & set(before)
    then = [x.copy() for x in arrays]
    for _ in range(2):
        state, _ = trainer.train_step(state, next(stream))
    jax.block_until_ready(state)
    assert sorted(places(state)) == sorted(before)
    assert all(np.array_equal(x, old) for x, old in zip(arrays, then, strict=True))
    now = trainer.export(state)
    assert any(not np.array_equal(now["dense"][name], x) for name, x in saved["dense"].items())
