"""Sizes that routers lay batches out for: they grow where a batch needs more, and a resumed run has the same ones."""

from typing import Any

import jax
import numpy as np
import pytest

from recjax.embedding import capacity
from recjax.presets import load
from recjax.train.setup import Setup, make_setup

SMALL = ("data.rows=400,300", "data.ids_per_bag=0,1", "data.train_rows=2000", "train.batch_size=200")


def setup(*overrides: str) -> Setup:
    return make_setup(load("synthetic", (*SMALL, "mesh.devices=2", "plan=row_wise", *overrides)))


def equal(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


@pytest.mark.parametrize("routing", ["host", "device"])
def test_placing_a_batch_grows_capacities_that_are_short(routing):
    made = setup(f"train.routing={routing}")
    counted = next(made.counted("train", 200))
    needs = made.router.begin(counted, {"sparse_0": 10**4}).needs
    wide = dict.fromkeys(needs, 10**4)
    assert len(needs) > 1
    for name, need in needs.items():
        enough = made.place(counted, wide | {name: capacity.rung(int(1.03 * need))})
        assert equal(made.place(counted, wide | {name: need - 1}), enough)
        assert not equal(made.place(counted, wide), enough)
    assert equal(made.place(counted, {}), made.place(counted, capacity.grow({}, needs)))
