"""The measure by which validation chooses a step, and stops early: one, or a weighted sum of several."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from recjax.errors import ConfigError
from recjax.utils.text import did_you_mean

HIGHER_IS_BETTER = {
    "auc": True,
    "accuracy": True,
    "logloss": False,
    "loss": False,
    "ne": False,
    "mse": False,
    "mae": False,
}
RANKED = ("recall", "ndcg", "hit", "mrr", "map", "coverage")  # of the best K items, as NAME@K
HIGHER_IS_BETTER |= {f"{name}@20": True for name in RANKED}
_TERM = re.compile(r"(?:([0-9.eE+-]+)\*)?(.+)")
_EXAMPLE = "choose_by=auc, or of several labels choose_by=0.7*click.auc+0.3*buy.auc"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A sum of measures.

    Attributes:
      terms: measure -> its factor, above 0.
      higher: whether a higher sum is better.
    """

    terms: Mapping[str, float]
    higher: bool

    def value(self, measures: Mapping[str, float]) -> float:
        """The sum, of what was measured."""
        return sum(factor * float(measures[name]) for name, factor in self.terms.items())

    def check(self, names: Collection[str]) -> None:
        """Refuses a measure that there will not be (ConfigError)."""
        for name in self.terms:
            if name not in names:
                raise ConfigError(
                    f"train.choose_by: {name!r} is not measured.{did_you_mean(name, names)} There are "
                    f"{', '.join(sorted(names))}."
                )


def parse(text: str) -> Choice:
    """The choice that a text asks for: measures with + between them, each perhaps with a factor and * before it.

    Raises:
      ConfigError: it is no such text, or its measures point different ways.
    """
    terms: dict[str, float] = {}
    for part in re.split(r"(?<![0-9.][eE])\+", text.replace(" ", "")):
        found = _TERM.fullmatch(part)
        try:
            factor = float(found[1]) if found and found[1] else 1.0
        except ValueError:
            factor = 0.0
        known = found is not None and _last(found[2]) in HIGHER_IS_BETTER and found[2] not in terms
        if found is None or not known or not 0 < factor < float("inf"):
            raise ConfigError(
                f"choose_by is {text!r}; it must be a measure ({', '.join(HIGHER_IS_BETTER)}; of a label "
                f"LABEL.MEASURE) or a sum of them with positive factors. Write for example {_EXAMPLE}."
            )
        terms[found[2]] = factor
    ways = {HIGHER_IS_BETTER[_last(name)] for name in terms}
    if len(ways) > 1:
        raise ConfigError(
            f"choose_by is {text!r}, which adds measures that should be high to some that should be low. Take some of "
            "one way alone."
        )
    return Choice(terms, ways.pop())


def _last(name: str) -> str:
    return name.rpartition(".")[2]
