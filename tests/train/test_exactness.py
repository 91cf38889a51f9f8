"""Invariants 1 and 2 over 50 steps of real and of multi-hot data: numbers do not depend on mesh or plan.

Every run of the product is compared with the dense oracle, which shares no sharded code with it. All optimizers and
poolings under all placements are the business of test_contract.py.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from support.problems import ON_ONE_HOST, Problem, Result, compare, problem, run_oracle, run_sharded

import recjax
from recjax.data.datasets.movietweetings import MovieTweetings
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Segment
from recjax.models.dlrm import DLRMConfig

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

STEPS = 50
# 1,200 rows end an epoch in a short batch, four times within 50 steps of 97.
PRESET = recjax.load("synthetic_multihot").data
assert isinstance(PRESET, Synthetic)
MULTI_HOT = dataclasses.replace(PRESET, train_rows=1200)
MODEL = DLRMConfig(bottom=(16, 8), top=(16, 1))


@functools.cache
def make(data: str) -> Problem:
    size = {"steps": STEPS, "batch_size": 97}
    if data == "movietweetings":
        source = MovieTweetings().open()
        return problem(source, MODEL, RowWiseAdagrad(0.05), 8, **size, tx=optax.adagrad(0.02))
    return problem(MULTI_HOT.open(), MODEL, Sgd(0.5), 8, **size, pooling="mean", tx=optax.sgd(0.1))


@functools.cache
def oracle(data: str, dtype: type) -> Result:
    return run_oracle(make(data), dtype)


def plan_of(name: str, data: str) -> str | Plan:
    turn = itertools.cycle(reversed(ON_ONE_HOST))
    return Plan({t.name: (Segment(next(turn)),) for t in make(data).tables}) if name == "mixed" else name


# Data, plan and how many devices.
FLOAT64 = [
    ("movietweetings", "mixed", 3),
    ("synthetic_multihot", "mixed", 8),
]


@pytest.mark.parametrize(("data", "plan", "devices"), FLOAT64)
def test_float64_equals_the_oracle(data: str, plan: str, devices: int) -> None:
    with jax.enable_x64(True):
        truth = oracle(data, np.float64)
        result = run_sharded(make(data), devices, plan_of(plan, data), np.float64)
    compare(result, truth, loss_rtol=1e-9, atol=1e-9)
