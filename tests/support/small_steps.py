"""Steps of a small DLRM on three tables, a bag of each kind, with all batches of the same sizes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import optax

from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.models.dlrm import DLRMConfig
from recjax.train.step import PLAIN, StepOptions
from support.problems import Placed, Problem, problem, trainer_of

B, D = 97, 8
ADAGRAD = RowWiseAdagrad(0.05)


def make(rows: tuple[int, ...], optimizer: Any = ADAGRAD) -> Problem:
    """Three batches of 97 samples, the optimizer is that of the tables."""
    source = Synthetic(rows=rows, ids_per_bag=(1, 3, 0), weighted=(False, True, False), train_rows=500).open()
    model = DLRMConfig(bottom=(16, D), top=(16, 1))
    return problem(source, model, optimizer, D, steps=3, batch_size=B, tx=optax.sgd(0.1))


def built(problem: Problem, devices: int, plan: str | Plan, options: StepOptions = PLAIN, hosts: int = 1) -> Placed:
    """The problem with options, on a mesh."""
    problem = dataclasses.replace(problem, options=options)
    return Placed.of(problem, trainer_of(problem, devices, plan, hosts=hosts))


@functools.cache
def placed_once(devices: int, plan: str, options: StepOptions = PLAIN) -> Placed:
    """With tables of 900, 37 and 2000 rows, for all tests that do not change it."""
    return built(make((900, 37, 2000)), devices, plan, options)
