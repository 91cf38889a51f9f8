"""Runs that differ in their seed alone share the program of their step, so that a sweep over seeds compiles it once."""

import pytest

import recjax
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_inputs, abstract_state
from recjax.train.first_batch import sample

pytestmark = [pytest.mark.full, pytest.mark.light_compile]
SMALL = {
    "data.rows": "50,30",
    "data.train_rows": 2000,
    "data.validation_rows": 100,
    "data.test_rows": 100,
    "mesh.devices": 2,
}


def program(**settings):
    trainer = build_trainer(recjax.load("synthetic", SMALL, settings))
    return trainer.step_program.lower(
        abstract_state(trainer), abstract_inputs(trainer, sample(trainer).capacities)
    ).as_text()


def test_the_seed_is_no_constant_of_the_step():
    assert len({program(seed=seed) for seed in range(3)}) == 1
