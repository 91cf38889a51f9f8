"""Schedules, worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config.train import Constant, Polynomial, StepDecay
from recjax.errors import ConfigError


def factors(schedule, steps):
    """Factors of the steps with these numbers, counted from 1."""
    found = [schedule.factor(jnp.int32(step - 1)) for step in steps]
    assert all(f.shape == () and f.dtype == jnp.float32 for f in found)
    return [float(f) for f in found]


def test_constant():
    assert factors(Constant(), (1, 2, 10**9)) == [1, 1, 1]


def test_warmup():
    """The first step is not lost: its factor is 1 / W, not 0."""
    assert factors(Constant(4), (1, 2, 3, 4, 5, 2**31 - 1)) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Constant(1), (1, 2)) == [1, 1]


def test_polynomial():
    schedule = Polynomial(warmup_steps=2, decay_start=4, decay_steps=4)
    #                 warm-up   hold  decay: 1, (3/4)^2, (2/4)^2, (1/4)^2, end
    assert factors(schedule, range(1, 11)) == [0.5, 1, 1, 1, 0.5625, 0.25, 0.0625, 0, 0, 0]


def test_polynomial_end_and_power():
    schedule = Polynomial(decay_steps=4, power=1, end=0.5)
    assert factors(schedule, (1, 2, 3, 4, 5, 6, 2**31 - 1)) == [1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5]


def test_polynomial_may_decay_from_the_end_of_the_warmup():
    assert factors(Polynomial(warmup_steps=2, decay_start=2, decay_steps=2), (1, 2, 3, 4)) == [0.5, 1, 0.25, 0]


def dlrm_policy(t, warmup, start, steps):
    """The policy of facebookresearch/dlrm where it neither holds nor has ended, by step count from 1."""
    return t / warmup if t < warmup else ((steps - (t - start)) / steps) ** 2


def test_polynomial_is_dlrms_policy():
    """MLPerf's DLRM: 8,000 steps of warm-up, decay from 70,000 for 30,000."""
    steps = (1, 2, 3999, 7999, 70_000, 70_001, 85_000, 99_999)
    found = factors(Polynomial(warmup_steps=8000, decay_start=70_000, decay_steps=30_000), steps)
    np.testing.assert_allclose(found, [dlrm_policy(t, 8000, 70_000, 30_000) for t in steps], rtol=1e-6)


def test_step_decay():
    assert factors(StepDecay(every=3, decay=0.5), (1, 3, 4, 6, 7, 10)) == [1, 1, 0.5, 0.5, 0.25, 0.125]
    assert factors(StepDecay(2, every=3, decay=0.5), (1, 2, 4)) == [0.5, 1, 0.5]


def test_step_decay_of_a_whole_run_goes_to_zero():
    assert factors(StepDecay(every=1, decay=0.1), (2**31 - 1,)) == [0]


@pytest.mark.parametrize("schedule", [Constant(7), Polynomial(3, 5, 7), StepDecay(3, every=2, decay=0.3)])
def test_float64_factors_under_jit(schedule):
    with jax.enable_x64(True):
        compiled = jax.jit(schedule.factor)
        for step in range(14):
            factor = compiled(jnp.int32(step))
            assert factor.dtype == jnp.float64
            t = step + 1
            match schedule:
                case Constant():
                    expected = min(1, t / 7)
                case Polynomial():
                    expected = t / 3 if t < 3 else 1 if t < 5 else ((12 - t) / 7) ** 2 if t < 12 else 0
                case _:
                    expected = min(1, t / 3) * 0.3 ** (step // 2)
            assert float(factor) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1), "warmup_steps is -1; it must be 0 to 2147483647"),
        (lambda: StepDecay(2**31), "warmup_steps is 2147483648; it must be 0 to"),
        (lambda: Polynomial(-1), "warmup_steps is -1"),
        (lambda: Polynomial(decay_start=0), "decay_start is 0; it must be 1 to"),
        (lambda: Polynomial(9, 8), "decay_start is 8 and warmup_steps 9.*Raise decay_start"),
        (lambda: Polynomial(decay_steps=0), "decay_steps is 0"),
        (lambda: Polynomial(power=0), "power is 0; it must be positive"),
        (lambda: Polynomial(power=math.inf), "power is inf"),
        (lambda: Polynomial(end=1.1), "end is 1.1; it must be 0 to 1"),
        (lambda: Polynomial(end=-0.1), "end is -0.1"),
        (lambda: StepDecay(every=0), "every is 0"),
        (lambda: StepDecay(decay=0), "decay is 0; it must be above 0"),
        (lambda: StepDecay(decay=1.1), "decay is 1.1"),
    ],
)
def test_schedules_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
