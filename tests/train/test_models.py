"""Every model through the sharded step, with all kinds of bags and without dense features, against the dense oracle."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.problems import Problem, compare, problem, run_oracle, run_sharded

from recjax import settings
from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.deepfm import DeepFMConfig
from recjax.models.dlrm import DLRMConfig
from recjax.models.wide_deep import WideDeepConfig

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

DATA = Synthetic(rows=(60, 30, 2000), ids_per_bag=(1, 3, 0), weighted=(False, True, True), dense=3, train_rows=300)
MODELS: dict[str, Any] = {
    "dlrm": DLRMConfig((8, 4), (8, 1)),
    "dcnv2": DCNv2Config((8, 5), 2, 3, (8, 1), "parallel"),
    "deepfm": DeepFMConfig((8, 1), Sgd(0.3)),
    "wide_deep": WideDeepConfig((8, 1)),
}
# Without dense features the forward passes of the others are in tests/models/test_formulas.py.
CASES = [
    *((name, 3) for name in MODELS),
    *(pytest.param(name, 0, marks=[] if name == "dlrm" else pytest.mark.wide) for name in MODELS),
]


@functools.cache
def make(model: str, dense: int) -> Problem:
    source = dataclasses.replace(DATA, dense=dense).open()
    pooling = "sum" if dense else "mean"
    optimizer = RowWiseAdagrad(0.05)
    return problem(source, MODELS[model], optimizer, 4, steps=6, batch_size=50, pooling=pooling, tx=optax.sgd(0.1))


@pytest.mark.parametrize(("model", "dense"), CASES)
def test_float64_equals_the_oracle(model: str, dense: int) -> None:
    with jax.enable_x64(True):
        made = make(model, dense)
        truth = run_oracle(made, np.float64)
        compare(run_sharded(made, 3, "auto", np.float64), truth, loss_rtol=1e-9, atol=1e-9)
    assert len(truth.tables) == 3 * (1 + MODELS[model].first_order)
    for name, arrays in truth.tables.items():  # the first-order weights too, which start at 0, have learned something
        assert np.ptp(arrays["rows"]) > 1e-3, name


def test_models_and_the_optimizer_of_first_order_weights_are_chosen_by_name() -> None:
    chosen = presets.load("synthetic", ["model=deepfm", "model.linear=sgd", "model.linear.learning_rate=0.25"])
    assert chosen.model == DeepFMConfig(linear=Sgd(0.25))
    assert settings.from_json(RunConfig, settings.to_json(chosen)) == chosen
    assert presets.load("synthetic", ["model=wide_deep", "model.deep=8-1"]).model == WideDeepConfig((8, 1))
    assert presets.load("synthetic", ["model=dcnv2", "model.structure=parallel"]).model == DCNv2Config(
        structure="parallel"
    )
