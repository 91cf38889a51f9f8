"""Invariants 1 and 2: numbers do not depend on mesh or plan, and sparse updates are exact.

Every run of the product is compared with the dense oracle, which shares no sharded code with it.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from support import Problem, Result, compare, problem, run_oracle, run_sharded

import recjax
from recjax.data.movietweetings import MovieTweetings
from recjax.data.synthetic import Synthetic
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.models.dlrm import DLRMConfig

STEPS = 50
OPTIMIZERS = {"sgd": Sgd(0.5), "rowwise_adagrad": RowWiseAdagrad(0.05)}
# 1,200 rows end an epoch in a short batch, four times within 50 steps of 97.
PRESET = recjax.load("synthetic_multihot").data
assert isinstance(PRESET, Synthetic)
MULTI_HOT = dataclasses.replace(PRESET, train_rows=1200)


@functools.cache
def make(data: str, optimizer: str) -> Problem:
    dense = optax.adagrad(0.02) if optimizer == "rowwise_adagrad" else optax.sgd(0.1)
    model = DLRMConfig(bottom=(16, 8), top=(16, 1))
    pooling = "mean" if data == "synthetic_multihot-mean" else "sum"
    source = MovieTweetings().open() if data == "movietweetings" else MULTI_HOT.open()
    return problem(source, model, OPTIMIZERS[optimizer], 8, steps=STEPS, batch_size=97, pooling=pooling, tx=dense)


@functools.cache
def oracle(data: str, optimizer: str, dtype: type) -> Result:
    return run_oracle(make(data, optimizer), dtype)


CASES = [
    pytest.param(data, optimizer, plan, devices, id=f"{data}-{optimizer}-{plan}-{devices}")
    for data in ("synthetic_multihot", "movietweetings", "synthetic_multihot-mean")
    for optimizer in OPTIMIZERS
    for plan in ("row_wise", "data_parallel")
    for devices in (1, 2, 3, 4, 8)
    if data != "synthetic_multihot-mean" or devices == 3
]


@pytest.mark.parametrize(("data", "optimizer", "plan", "devices"), CASES)
def test_float64_equals_the_oracle(data: str, optimizer: str, plan: str, devices: int) -> None:
    with jax.enable_x64(True):
        truth = oracle(data, optimizer, np.float64)
        result = run_sharded(make(data, optimizer), devices, plan, np.float64)
    compare(result, truth, loss_rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("data", "optimizer", "plan", "devices"), CASES)
def test_float32_losses_equal_the_oracle(data: str, optimizer: str, plan: str, devices: int) -> None:
    truth = oracle(data, optimizer, np.float32)
    compare(run_sharded(make(data, optimizer), devices, plan, np.float32), truth, loss_rtol=1e-5, atol=None)
