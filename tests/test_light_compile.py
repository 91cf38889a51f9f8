"""Programs that `support.light_compile` compiles give users' numbers, but for the last bit of float32 draws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.light_compile import AS_TEXT, compiling
from support.problems import Placed, Problem, new_weights, problem, trainer_of

from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.buffers import initial_rows
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig

WAYS = ("", "yes")  # to compile: as users do, and lightly


@pytest.mark.full
def test_float64_losses_from_the_same_values_are_equal() -> None:
    def losses(made: Problem, way: str) -> list[float]:
        with compiling(way):
            placed = Placed.of(made, trainer_of(made, 1, dtype=np.float64))
            state, found = placed.trainer.restore(weights, 0), []
            for inputs in placed.inputs:
                state, metrics = placed.trainer.train_step(state, inputs)
                found.append(float(metrics["loss"]))
        return found

    with jax.enable_x64(True):
        data = Synthetic(rows=(100, 30), train_rows=600).open()
        model = DLRMConfig(bottom=(16, 8), top=(16, 1))
        made = problem(data, model, RowWiseAdagrad(0.05), 8, steps=3, batch_size=200, tx=optax.adagrad(0.05))
        with compiling(WAYS[0]):
            weights = new_weights(made, np.float64)
        users, light = (losses(made, way) for way in WAYS)
    assert len(users) == 3
    np.testing.assert_allclose(light, users, rtol=1e-14, atol=0)


def test_initial_rows_are_equal_and_normal_draws_nearly() -> None:
    rows, normals = [], []
    for way in WAYS:
        with compiling(way):
            rows.append(np.asarray(initial_rows(0, "table", jnp.arange(500, dtype=jnp.int32), 16, 0.03)))
            normals.append(np.asarray(jax.random.normal(jax.random.key(0), (4096,), jnp.float32)))
    np.testing.assert_array_equal(rows[1], rows[0])
    np.testing.assert_array_almost_equal_nulp(normals[1], normals[0], nulp=16)
    assert np.mean(normals[0] != normals[1]) < 0.1


def test_programs_as_text_are_those_of_users() -> None:
    """To the letter, and the memory that they take; LLVM does less, which shows in the code."""

    def compiled(way: str) -> jax.stages.Compiled:
        with compiling(way):
            x = jnp.ones((64, 32), jnp.float32)
            return jax.jit(lambda x: jnp.tanh(x @ x.T).sum(axis=0)[::2]).lower(x).compile()

    users, ours = (compiled(way) for way in ("", AS_TEXT))
    assert ours.as_text() == users.as_text()
    assert str(ours.memory_analysis()) == str(users.memory_analysis())
