"""When a checkpoint is due: by steps, by training time, and the first one after a minute of it."""

import pytest

from recjax import settings
from recjax.config.presets import load
from recjax.config.train import TrainConfig
from recjax.errors import ConfigError
from recjax.train.callbacks import Due


def asked_at(every: int | str, seconds: int, evaluated_at: tuple[int, ...] = ()) -> list[int]:
    """Seconds of training, of which each is a step, at which a checkpoint is asked for by the clock."""
    now, found = 0, []
    due = Due(TrainConfig(checkpoint_every=every), lambda: now)
    for now in range(1, seconds + 1):  # noqa: B007 (the lambda reads it)
        if due.by_time():
            found.append(now)
            assert not due.by_time(), "once is enough"
            due.saved()
        elif now in evaluated_at or due.by_steps(now):
            due.saved()
    return found


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, [60]),
        (1000, [60]),
        (50, []),  # there was one in the first minute
        ("100s", [60, 160, 260]),
        ("2min", [60, 180, 300]),
        ("0.5min", [30, 60, 90, 120, 150, 180, 210, 240, 270, 300]),
        ("1h", [60]),
    ],
)
def test_by_the_clock(every, expected):
    assert asked_at(every, 300) == expected


def test_any_checkpoint_starts_the_clock_anew():
    assert asked_at(0, 300, evaluated_at=(59, 250)) == []
    assert asked_at("100s", 300, evaluated_at=(10, 90, 200)) == [190, 300]


@pytest.mark.parametrize("every", [-1, "", "5", "5 min", "5mins", "0s", "-5s", "1e3s", "min", "٣s"])
def test_what_is_no_step_and_no_time_is_refused(every):
    with pytest.raises(
        ConfigError, match=r"checkpoint_every is .*; it must be a number of steps, 0, or a time such as"
    ):
        TrainConfig(checkpoint_every=every)


@pytest.mark.parametrize(("text", "value"), [("200", 200), ("0", 0), ("5min", "5min"), ("1.5h", "1.5h")])
def test_a_config_keeps_it_and_old_configs_stay_what_they_were(text, value):
    config = load("synthetic", (f"train.checkpoint_every={text}",))
    assert config.train.checkpoint_every == value
    assert settings.from_json(type(config), settings.to_json(config), source="here") == config
    plain = load("synthetic")
    assert (settings.config_hash(config) == settings.config_hash(plain)) == (text == "0")
