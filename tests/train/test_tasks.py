"""Tasks: their losses by closed forms and by hand, the way from settings to them, and their measures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.config import choice
from recjax.config.run import RunConfig
from recjax.config.tasks import (
    LOSSES,
    AbsoluteError,
    Focal,
    Huber,
    LogLoss,
    Poisson,
    Softmax,
    SquaredError,
    TaskConfig,
)
from recjax.data.batch import Feature, Label, Schema
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.models.dlrm import DLRMConfig
from recjax.models.mmoe import MMoEConfig
from recjax.settings import override
from recjax.settings.values import Named
from recjax.train.metrics.binned import Exact
from recjax.train.metrics.by_task import ByTask
from recjax.train.tasks import choice_of, outputs_for, tasks_of

SCHEMA = Schema((), (Feature("x", 10),), (Label("click"), Label("rating", "number"), Label("stars", "class", 5)))


@pytest.mark.parametrize(
    ("loss", "label", "output", "expected"),
    [
        (LogLoss(), 1, 0.0, math.log(2)),
        (LogLoss(), 0, 2.0, math.log(1 + math.e**2)),
        (LogLoss(), 1, -800.0, 800.0),
        # Lin et al. 2017, section 3: with gamma = 2, p_t = 0.9 has 100 times less than cross-entropy, 0.968 1000 times.
        (Focal(2.0, None), 1, math.log(9), -math.log(0.9) / 100),
        (Focal(2.0, None), 0, -math.log(0.968 / 0.032), -math.log(0.968) * 0.032**2),
        (Focal(0.0, 0.25), 1, 0.0, math.log(2) / 4),
        (Focal(0.0, 0.25), 0, 0.0, math.log(2) * 3 / 4),
        (SquaredError(), 3, 1.0, 4.0),
        (AbsoluteError(), 3, 1.0, 2.0),
        (Huber(1.0), 3, 2.5, 0.125),
        (Huber(1.0), 3, 0.0, 2.5),
        (Huber(0.5), 0, -2.0, 0.5 * (2 - 0.25)),
        (Poisson(), 2, 0.0, 1.0),
        (Poisson(), 2, math.log(2), 2 - 2 * math.log(2)),
    ],
)
def test_losses_by_hand(loss: Any, label: float, output: float, expected: float) -> None:
    for xp in (np, jnp):
        found = loss.losses(xp, np.array([label], np.float64), np.array([output], np.float64))
        np.testing.assert_allclose(found, [expected], rtol=1e-12 if xp is np else 1e-6)


def test_softmax_by_hand() -> None:
    logits = np.log([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]) + [[0.0], [700.0]]
    np.testing.assert_allclose(Softmax().losses(np, np.array([2.0, 0.0]), logits), -np.log([5 / 8, 1 / 8]), rtol=1e-12)


def _torch_losses(torch: Any) -> dict[str, tuple[Any, Any]]:
    f = torch.nn.functional

    def focal(x: Any, y: Any) -> Any:
        ce = f.binary_cross_entropy_with_logits(x, y, reduction="none")
        p_t = torch.sigmoid(x) * y + (1 - torch.sigmoid(x)) * (1 - y)
        return ce * (1 - p_t) ** 1.7 * (0.3 * y + 0.7 * (1 - y))

    return {
        "binary": (LogLoss(), lambda x, y: f.binary_cross_entropy_with_logits(x, y, reduction="none")),
        "focal": (Focal(1.7, 0.3), focal),
        "mse": (SquaredError(), lambda x, y: f.mse_loss(x, y, reduction="none")),
        "mae": (AbsoluteError(), lambda x, y: f.l1_loss(x, y, reduction="none")),
        "huber": (Huber(0.8), lambda x, y: f.huber_loss(x, y, reduction="none", delta=0.8)),
        "poisson": (Poisson(), lambda x, y: f.poisson_nll_loss(x, y, log_input=True, full=False, reduction="none")),
        "softmax": (Softmax(), lambda x, y: f.cross_entropy(x, y.long(), reduction="none")),
    }


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch")
    loss, theirs = _torch_losses(torch)[name]
    rng = np.random.default_rng(0)
    labels = {"binary": rng.integers(0, 2, 50), "number": rng.normal(size=50), "class": rng.integers(0, 4, 50)}[loss.of]
    if name == "poisson":
        labels = rng.integers(0, 6, 50)
    labels = labels.astype(np.float64)
    outputs = 3 * rng.normal(size=(50, 4) if loss.of == "class" else 50)
    if loss.of == "number":
        outputs[0] = labels[0]  # where the gradient of the absolute error jumps
    weights = rng.random(50)
    x = torch.tensor(outputs, requires_grad=True)
    (torch.tensor(weights) * theirs(x, torch.tensor(labels))).sum().backward()
    with jax.enable_x64(True):
        ours, gradient = jax.value_and_grad(lambda x: jnp.sum(weights * loss.losses(jnp, jnp.asarray(labels), x)))(
            outputs
        )
        np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(ours, (weights * theirs(x, torch.tensor(labels)).detach().numpy()).sum(), rtol=1e-9)


@given(st.sampled_from(sorted(LOSSES)), st.integers(0, 2**32 - 1))
def test_gradients_are_those_of_finite_differences(name: str, seed: int) -> None:
    loss = LOSSES[name]()
    rng = np.random.default_rng(seed)
    y = {"binary": rng.integers(0, 2, 1), "number": 2 + rng.random(1), "class": rng.integers(0, 3, 1)}[loss.of] * 1.0
    x = rng.normal(size=(1, 3) if loss.of == "class" else 1)
    h = 1e-6
    with jax.enable_x64(True):
        found = jax.grad(lambda x: loss.losses(jnp, jnp.asarray(y), x)[0])(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = h
        slope = (loss.losses(np, y, x + step)[0] - loss.losses(np, y, x - step)[0]) / (2 * h)
        assert found[at] == pytest.approx(slope, abs=1e-6)


def test_from_settings_to_tasks() -> None:
    assert tasks_of(RunConfig(), Schema((), (Feature("x", 10),))) == ()
    config = override(RunConfig(), ["tasks.rating.loss=huber", "tasks.rating.loss.delta=2", "tasks.click.weight=0.5"])
    click, rating, stars = tasks_of(config, SCHEMA)
    assert (click.loss, click.weight, click.column, click.first, click.outputs) == (LogLoss(), 0.5, 0, 0, 1)
    assert (rating.loss, rating.weight, rating.column, rating.first) == (Huber(2.0), 1.0, 1, 1)
    assert (stars.loss, stars.column, stars.first, stars.outputs) == (Softmax(), 2, 2, 5)
    alone = override(RunConfig(), ["tasks.label.loss=focal"])
    assert [task.loss for task in tasks_of(alone, Schema((), (Feature("x", 10),)))] == [Focal()]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["tasks.clik.weight=2"], r"tasks\.clik: the data have no label 'clik'\. Did you mean click\?"),
        (["tasks.rating.loss=softmax"], r"tasks\.rating\.loss=softmax.*kind number\. Take mse, mae, huber or poisson"),
        (["tasks.click.weight=0", "tasks.rating.weight=0", "tasks.stars.weight=0"], "all tasks have weight 0"),
    ],
)
def test_settings_that_do_not_fit(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tasks_of(override(RunConfig(), settings), SCHEMA)


@pytest.mark.parametrize(
    "make", [lambda: Focal(-1), lambda: Focal(1, alpha=2), lambda: Huber(0), lambda: TaskConfig(weight=-1)]
)
def test_values_out_of_range(make: Any) -> None:
    with pytest.raises(ConfigError, match="must"):
        make()


def test_a_model_of_one_logit_is_refused_for_several() -> None:
    tasks = tasks_of(RunConfig(), SCHEMA)
    with pytest.raises(
        ConfigError, match=r"model=dlrm gives one logit.*need 7 outputs: click \(binary\).*shared_bottom"
    ):
        outputs_for(DLRMConfig(), tasks)
    assert outputs_for(MMoEConfig(), tasks) == {"outputs": {"click": 1, "rating": 1, "stars": 5}}
    assert outputs_for(DLRMConfig(), tasks[1:2]) == {}
    assert outputs_for(MMoEConfig(), ()) == {"outputs": {"label": 1}}


def test_measures_by_hand() -> None:
    config = RunConfig(tasks=Named({"rating": TaskConfig(AbsoluteError(), 0.5)}))
    measured = ByTask(tasks_of(config, SCHEMA), kept=Exact)
    labels = np.array([[1, 2.0, 0], [0, 3.0, 4], [1, 9.0, 1], [0, 1.0, 1]], np.float32)
    weights = np.array([[1, 1, 1], [1, 3, 1], [1, 0, 2], [0, 0, 0]], np.float32)
    outputs = np.zeros((4, 7))
    outputs[:, 0] = [2, 1, 0, 99]
    outputs[:, 1] = [2.5, 2.0, 50, 0]
    outputs[[0, 1, 2, 3], [2, 6, 6, 2]] = math.log(6)  # 0.6 for the likeliest class, 0.1 for each other
    measured.add(labels[:2], outputs[:2], weights[:2])
    measured.add(labels[2:], outputs[2:], weights[2:], 2)
    found = measured.result()
    click = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1)) + math.log(2)) / 3
    stars = -(2 * math.log(0.6) + 2 * math.log(0.1)) / 4
    assert found["click.loss"] == pytest.approx(click) and found["click.logloss"] == pytest.approx(click)
    assert found["click.auc"] == found["auc"] == 0.5
    assert found["rating.mae"] == found["rating.loss"] == pytest.approx((0.5 + 3 * 1) / 4)
    assert found["rating.mse"] == pytest.approx((0.25 + 3) / 4)
    assert found["stars.loss"] == pytest.approx(stars) and found["stars.accuracy"] == 0.5
    assert found["loss"] == pytest.approx(click + 0.5 * 0.875 + stars)
    assert (found["samples"], found["click.samples"], found["rating.samples"]) == (3, 3, 2)
    with pytest.raises(TrainingError, match=r"task 'rating' for sample 7 is not finite"):
        measured.add(labels[:1], np.full((1, 7), [0, np.nan, 0, 0, 0, 0, 0]), weights[:1], 7)


def test_counts_are_not_negative() -> None:
    config = RunConfig(tasks=Named({"rating": TaskConfig(Poisson())}))
    measured = ByTask(tasks_of(config, dataclasses.replace(SCHEMA, labels=SCHEMA.labels[1:2])), kept=Exact)
    measured.add(np.array([[-1.0]]), np.zeros((1, 1)), np.zeros((1, 1)))  # masked
    with pytest.raises(DataError, match=r"label 'rating' of sample 6 is -2, and tasks\.rating\.loss=poisson"):
        measured.add(np.array([[1.0], [-2.0]]), np.zeros((2, 1)), np.ones((2, 1)), 5)


def test_a_task_without_weight_adds_nothing() -> None:
    measured = ByTask(tasks_of(RunConfig(), dataclasses.replace(SCHEMA, labels=SCHEMA.labels[:2])), kept=Exact)
    assert math.isnan(measured.result()["loss"])
    measured.add(np.ones((1, 2)), np.array([[0.0, 0.0]]), np.array([[1.0, 0.0]]))
    assert measured.result()["loss"] == pytest.approx(math.log(2)) and math.isnan(measured.result()["rating.loss"])


def test_what_chooses() -> None:
    tasks = tasks_of(RunConfig(), SCHEMA)
    both = choice_of("0.7*click.auc + 0.3*stars.accuracy", tasks)
    assert both.higher and both.value({"click.auc": 0.5, "stars.accuracy": 1.0, "x": 0}) == pytest.approx(0.65)
    assert choice_of("auc", tasks).terms == {"auc": 1.0} and choice_of("auc", tasks[1:]).terms == {"loss": 1.0}
    losses = choice.parse("1e+1*a.mae+b.loss")
    assert not losses.higher and losses.terms == {"a.mae": 10.0, "b.loss": 1.0}
    for text, words in (
        ("click.acu", "must be a measure"),
        ("-1*auc", "must be a measure"),
        ("auc+auc", "must be a measure"),
        ("click.auc+rating.mae", "some of one way alone"),
    ):
        with pytest.raises(ConfigError, match=words):
            choice.parse(text)
    with pytest.raises(ConfigError, match=r"'clik\.auc' is not measured\. Did you mean click\.auc\?"):
        choice_of("clik.auc", tasks)
    with pytest.raises(ConfigError, match=r"'loss' is not measured"):
        choice_of("loss", ())
