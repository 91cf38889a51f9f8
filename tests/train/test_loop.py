"""What a run's fixed parts promise: a state can be made of them at any time."""

import jax
import numpy as np

from recjax.embedding import route
from recjax.presets import load
from recjax.train import state as states
from recjax.train.setup import Setup, make_setup

SMALL = ("data.rows=400,10", "data.train_rows=2000", "data.validation_rows=300", "data.test_rows=300", "mesh.devices=2")


def setup() -> Setup:
    return make_setup(load("synthetic", (*SMALL, "train.batch_size=200")))


def test_training_takes_nothing_away_from_the_next_state():
    made = setup()
    state = made.new_state()
    before = states.to_host(state, made.bound)
    counted = next(made.counted("train", 200))
    made.train_step(state, made.place(counted, route.grow({}, counted.needs)))  # donates the state
    after = states.to_host(made.new_state(), made.bound)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
