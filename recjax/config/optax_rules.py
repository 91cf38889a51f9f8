"""Optimizers of optax and optax.contrib and schedules of optax by name, with keyword arguments from a config.

train.optimizer=optax train.optimizer.name=lion train.optimizer.arguments=b1=0.95,weight_decay=0.01
train.optimizer=optax train.optimizer.name=muon
train.schedule=optax train.schedule.name=cosine_decay_schedule train.schedule.arguments=init_value=1,decay_steps=10000
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from recjax.errors import ConfigError
from recjax.settings.values import check_ranges
from recjax.utils.text import did_you_mean, near


@dataclasses.dataclass(frozen=True)
class DenseOptax:
    """Any optimizer of optax that takes a learning rate: https://optax.readthedocs.io/en/latest/api/optimizers.html.

    So may those of optax.contrib, such as muon; prodigy, dog and others that find their rate want a learning_rate of 1.
    What it makes of a gradient is multiplied by the factor of `train.schedule`. Learning rates, decays and the like are
    keyword arguments of optax's function, as NAME=VALUE each.
    """

    kind: ClassVar[str] = "optax"
    name: str = "adamw"  # name of the function of optax: lion, lamb, nadam, adafactor, muon, prodigy, ...
    learning_rate: float = 1e-3  # lr, before the schedule's factor
    arguments: tuple[str, ...] = ()  # further keyword arguments, as NAME=VALUE: b1=0.95, nesterov=true

    def __post_init__(self) -> None:
        check_ranges(self, learning_rate=(0, None))
        if self.name.startswith("schedule_free"):
            raise ConfigError(
                f"train.optimizer.name={self.name} evaluates other parameters than it trains, which recjax does not "
                "do. Take adamw, with a train.schedule."
            )
        _checked("train.optimizer", self.name, _optimizers(), ("learning_rate",), self.arguments)

    def build(self) -> optax.GradientTransformation:
        """The optax transformation, for a schedule's factor of 1.

        Raises:
          ConfigError: no such optimizer, arguments that it does not take, or one that needs more than gradients.
        """
        place, rate = "train.optimizer", {"learning_rate": self.learning_rate}
        made: optax.GradientTransformation = _call(place, self.name, _optimizers(), rate, self.arguments)
        like = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
        try:
            jax.eval_shape(lambda params: made.update(params, made.init(params), params), like)
        except Exception as error:
            raise ConfigError(
                f"{place}.name={self.name} cannot be used here: it fails with {type(error).__name__}: "
                f"{_in_short(error)}. recjax gives an optimizer gradients and parameters, and nothing else (such as "
                "values of the loss). Take another, for example adamw."
            ) from error
        return made


@dataclasses.dataclass(frozen=True)
class OptaxSchedule:
    """Any schedule of optax: https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html.

    Its value after so many steps is the factor of all learning rates, dense and sparse. Step 0 is the first.
    """

    kind: ClassVar[str] = "optax"
    name: str = "cosine_decay_schedule"  # name of the function of optax
    arguments: tuple[str, ...] = ("init_value=1", "decay_steps=10000")  # keyword arguments, as NAME=VALUE

    def __post_init__(self) -> None:
        _checked("train.schedule", self.name, _schedules(), (), self.arguments)

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done.

        Raises:
          ConfigError: optax refuses the arguments.
        """
        schedule = _call("train.schedule", self.name, _schedules(), {}, self.arguments)
        return jnp.asarray(schedule(step), float)


def advise_on_kind(text: str) -> str:
    """Returns how to take a rule of optax that a setting such as train.optimizer=adamw names as if it were a kind.

    Args:
      text: the setting, KEY=VALUE.

    Returns:
      A sentence; "" if the setting is another one, or optax has no such rule.
    """
    key, _, value = text.partition("=")
    known = {"train.optimizer": _optimizers, "train.schedule": _schedules}.get(key)
    names = known() if known else {}
    name = next((name for name in (value.lower(), f"{value.lower()}_schedule") if name in names), None)
    near_names = [name for name in names if name.startswith(value.lower())] if value and known else []
    if name is None and key == "train.schedule" and near_names:
        name = near_names[0]
    return f"{text}: that is a rule of optax. Write {key}=optax {key}.name={name}." if name else ""


def _checked(
    place: str, name: str, known: Mapping[str, Any], first: Collection[str], arguments: Sequence[str]
) -> dict[str, Any]:
    """The keyword arguments for a function of optax, once it is known to take them. Computes nothing.

    Args:
      place: key of the settings, for messages.
      name: of the function.
      known: those there are.
      first: arguments that have settings of their own.
      arguments: the others, as texts.

    Raises:
      ConfigError: there is no such function, or it takes others; with the nearest names.
    """
    if name not in known:
        close = near(name, known)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are {', '.join(known)}."
        raise ConfigError(f"{place}.name={name}: optax {optax.__version__} has none of that name. {hint}")
    function = f"{'optax.contrib' if 'contrib' in getattr(known[name], '__module__', '') else 'optax'}.{name}"
    takes = {k: p for k, p in inspect.signature(known[name]).parameters.items() if k not in first}
    given: dict[str, Any] = {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or key in given:
            raise ConfigError(f"{place}.arguments: {text!r} is not NAME=VALUE, each name once.")
        if key not in takes:
            hint = did_you_mean(key, takes)
            own = f" {key} is a setting of its own: {place}.{key}." if key in first else ""
            raise ConfigError(
                f"{place}.arguments: {function} takes no {key!r}.{own}{hint} It takes {', '.join(takes)}."
            )
        given[key] = _value(value)
    if absent := [k for k, p in takes.items() if p.default is p.empty and k not in given]:
        raise ConfigError(
            f"{place}.arguments: {function} also needs {', '.join(absent)}. Give {absent[0]}=VALUE, and so on."
        )
    return given


def _call(place: str, name: str, known: Mapping[str, Any], first: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    """Result of a function of optax for its arguments; see `_checked`."""
    given = _checked(place, name, known, tuple(first), arguments)
    try:
        return known[name](**first, **given)
    except Exception as error:
        raise ConfigError(f"{place}.name={name}: optax refuses {given}: {_in_short(error)}.") from error


def _value(text: str) -> Any:
    """A number, a truth value, none, text; or a dict of numbers, as 100:0.5;200:0.1."""
    if ":" in text:
        pairs = [part.partition(":") for part in text.split(";")]
        return {_value(key): _value(value) for key, _, value in pairs}
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


def _optimizers() -> dict[str, Any]:
    of_contrib, of_optax = _functions(optax.contrib), _functions(optax)
    rules = ((name, made) for name, made in [*of_contrib, *of_optax] if not name.startswith(("scale_by", "schedule_f")))
    return {name: made for name, made in rules if "learning_rate" in inspect.signature(made).parameters}


def _schedules() -> dict[str, Any]:
    of_functions = ("scale_by_schedule", "join_schedules", "sgdr_schedule")  # which take what no text can write
    return {
        name: made
        for name, made in _functions(optax)
        if (name.endswith("_schedule") or name == "exponential_decay") and name not in of_functions
    }


def _functions(module: Any) -> list[tuple[str, Any]]:
    found = []
    for name in sorted(dir(module)):
        made = getattr(module, name)
        if not name.startswith("_") and (inspect.isfunction(made) or isinstance(made, functools.partial)):
            found.append((name, made))
    return found
