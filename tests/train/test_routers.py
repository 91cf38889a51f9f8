"""Sizes that routers lay batches out for: they grow where a batch needs more, and a resumed run has the same ones."""

import copy
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from recjax.config.presets import load
from recjax.embedding.routing import capacity
from recjax.train.loop import Cursor, training
from recjax.train.setup import Setup, make_setup

SMALL = ("data.rows=400,300", "data.ids_per_bag=0,1", "data.train_rows=2000", "train.batch_size=40")


def setup(*overrides: str) -> Setup:
    return make_setup(load("synthetic", (*SMALL, "mesh.devices=2", "plan=row_wise", *overrides)))


def equal(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("routing", ["host", "device"])
def test_placing_a_batch_grows_capacities_that_are_short(routing):
    made = setup(f"train.routing={routing}")
    counted = next(made.counted("train", 40))
    needs = made.router.begin(counted, {"sparse_0": 10**4}).needs
    wide = dict.fromkeys(needs, 10**4)
    assert len(needs) > 1
    for name, need in needs.items():
        enough = made.place(counted, wide | {name: capacity.rung(int(1.03 * need))})
        assert equal(made.place(counted, wide | {name: need - 1}), enough)
        assert not equal(made.place(counted, wide), enough)
    assert equal(made.place(counted, {}), made.place(counted, capacity.grow({}, needs)))


@pytest.mark.full
@pytest.mark.parametrize("routing", ["host", "device"])
def test_a_resumed_run_has_the_sizes_of_one_that_went_on(routing, monkeypatch):
    """Sizes rise with the batches and fall every three steps; a run may be resumed before any of them."""
    monkeypatch.setattr(capacity, "PERIOD", 3)
    made = setup(f"train.routing={routing}")
    shapes: list[Any] = []
    made.__dict__["train_step"] = lambda state, inputs: (shapes.append(jax.tree.map(np.shape, inputs)), {})
    cursors = [cursor := Cursor()]
    for _ in itertools.islice(training(made, None, cursor), 24):
        cursors.append(copy.deepcopy(cursor))
    cursors[0], whole = Cursor(), list(shapes)
    lengths = [step.routing.features["sparse_0"].inverse for step in whole]
    changes = [later > earlier for earlier, later in itertools.pairwise(lengths) if later != earlier]
    assert {True, False} == set(changes)
    for step, start in enumerate(cursors[:22]):
        shapes.clear()
        for _ in itertools.islice(training(made, None, copy.deepcopy(start)), 24 - step):
            pass
        assert shapes == whole[step:]
