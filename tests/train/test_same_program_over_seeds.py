"""Runs that differ in seed and learning rates share the program of their step: a sweep over these compiles it once."""

import jax
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


def program(settings):
    trainer = build_trainer(recjax.load("synthetic", SMALL, settings))
    return trainer.step_program.lower(
        abstract_state(trainer), abstract_inputs(trainer, sample(trainer).capacities)
    ).as_text()


def test_the_seed_is_no_constant_of_the_step():
    assert len({program({"seed": seed}) for seed in range(3)}) == 1


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_learning_rates_are_no_constants_of_the_step(rule):
    settings = {"embedding.optimizer": "ftrl", "embedding.tables.sparse_1.optimizer": rule, "train.optimizer": rule}
    programs = set()
    for rate in (0.01, 0.3):
        rates = {f"{name}.learning_rate": rate / n for n, name in enumerate(settings, 1)}
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            programs.add(program({**settings, **rates}))
    assert len(programs) == 1
