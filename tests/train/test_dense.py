import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import Problem, Result, compare, problem, run_oracle, run_sharded

from recjax.data.synthetic import Synthetic
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig
from recjax.train.options import DenseAdagrad
from recjax.train.step import StepOptions

KIB = 1 / 1024


@functools.cache
def make() -> Problem:
    source = Synthetic(rows=(900, 37), ids_per_bag=(1, 3), train_rows=500).open()
    model = DLRMConfig(bottom=(16, 8), top=(16, 1))
    made = problem(
        source, model, RowWiseAdagrad(0.05), 8, steps=5, batch_size=97, tx=DenseAdagrad(0.02, weight_decay=0.1).build()
    )
    return dataclasses.replace(made, options=StepOptions(clip_norm=0.05))


@functools.cache
def truth() -> Result:
    with jax.enable_x64(True):
        return run_oracle(make(), np.float64)


@pytest.mark.parametrize(
    ("held", "devices"),
    [
        (("sharded", 0.0), 1),
        (("sharded", KIB), 2),
        (("sharded", 0.0), 3),
        (("replicated", KIB), 3),
        (("sharded", KIB), 8),
    ],
)
def test_numbers(held, devices) -> None:
    with jax.enable_x64(True):
        result = run_sharded(dataclasses.replace(make(), held=held), devices, "row_wise", np.float64)
    compare(result, truth(), loss_rtol=1e-9, atol=1e-9)
