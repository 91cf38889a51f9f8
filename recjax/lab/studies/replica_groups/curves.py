"""Measures of the study's trainings over their seeds, and what is read off them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """One value over several seeds.

    Attributes:
      values: one for each seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The values of all."""
        return float(np.mean(self.values))

    def text(self, digits: int = 4) -> str:
        """The mean, and the least and the largest if there are several."""
        mean, least, most = (f"{x:,.{digits}f}" for x in (self.mean, min(self.values), max(self.values)))
        return f"{mean} ({least} to {most})" if len(self.values) > 1 else mean


class Curves:
    """The trainings of a study, looked up by the names of their arms.

    Args:
      trainings: as `study.study` has them.
    """

    def __init__(self, trainings: Sequence[Mapping[str, Any]]) -> None:
        self._by_name: dict[str, list[Mapping[str, Any]]] = {}
        for training in trainings:
            self._by_name.setdefault(training["name"], []).append(training)

    @property
    def arms(self) -> dict[str, Mapping[str, Any]]:
        """Name -> the settings of each arm, in the order of the trainings."""
        return {name: of[0] for name, of in self._by_name.items()}

    def iterations(self, name: str) -> np.ndarray:
        """At which was measured: [M]."""
        return np.asarray(self._by_name[name][0]["measures"]["iteration"])

    def get(self, name: str, measure: str) -> np.ndarray:
        """A measure over the iterations, for each seed: [seeds, M]; of [seeds, 0] if the arm has none."""
        return np.asarray([of["measures"].get(measure, []) for of in self._by_name[name]])

    def last(self, name: str, measure: str) -> Spread:
        """At the end."""
        return Spread(tuple(self.get(name, measure)[:, -1].tolist()))

    def first(self, name: str, measure: str) -> Spread:
        """Before the first iteration."""
        return Spread(tuple(self.get(name, measure)[:, 0].tolist()))

    def growth(self, name: str, measure: str) -> Spread:
        """Change in the last third of the training over the largest that there was between two measures' thirds.

        0 is a plateau; 1, as steep at the end as ever.
        """
        curve = self.get(name, measure)
        M = curve.shape[1] - 1
        thirds = np.diff(curve[:, [round(k * M / 3) for k in range(4)]], axis=1)
        largest = np.maximum(np.abs(thirds).max(axis=1), np.finfo(float).tiny)
        return Spread(tuple((thirds[:, 2] / largest).tolist()))

    def drift(self, name: str, measure: str) -> Spread:
        """Change in the last third of the training over the value at its end."""
        curve = self.get(name, measure)
        before = curve[:, round(2 * (curve.shape[1] - 1) / 3)]
        return Spread(tuple(((curve[:, -1] - before) / np.maximum(curve[:, -1], np.finfo(float).tiny)).tolist()))

    def share_of_iterations(self, name: str, measure: str, single: str, of_single: str) -> Spread | None:
        """Iterations after which an arm first is as good as another one's best, over those that this one took.

        Args:
          name: the arm.
          measure: of it.
          single: the other arm.
          of_single: measure of that.

        Returns:
          One for each seed, or None if the arm does not get there with all of them.
        """
        at, shares = self.iterations(name), []
        for mine, other in zip(self.get(name, measure), self.get(single, of_single), strict=False):
            there = np.flatnonzero(mine >= other.max())
            if not len(there) or not other.argmax():
                return None
            shares.append(float(at[there[0]] / self.iterations(single)[other.argmax()]))
        return Spread(tuple(shares))


def milliseconds(series: Sequence[float]) -> dict[str, float]:
    """Median, and the values below which 5 and 95% of the iterations are."""
    low, median, high = np.percentile(np.asarray(series), [5, 50, 95]).tolist()
    return {"p5": low, "median": median, "p95": high}
