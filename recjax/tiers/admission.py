"""Rows that move between caches and the host for a batch: what a stage decides, and the tier carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from recjax.tiers.directory import Moves

OfOwners = dict[str, list[Any]]  # group name -> something of each owner


@dataclasses.dataclass(eq=False)
class Leaving:
    """Rows that leave a cache, until they are written.

    Attributes:
      homes_K: int32, ascending.
      order_K: which of the records is that of each.
      records: of the rows as they leave, uint8 [K, record].
    """

    homes_K: np.ndarray
    order_K: np.ndarray
    records: Future[np.ndarray]


class Course:
    """One pass of a stream through a stage that began with an empty cache.

    Attributes:
      leaving: group name -> of each part that is here what has left, or is to leave, and is not written.
      waiting: reads to begin once the caches that the course before it filled are empty; None: they are.
      hits, misses: rows that its batches so far named and that were, or were not, in the caches of all processes.
    """

    def __init__(self, parts: Mapping[str, Sequence[int]]) -> None:
        """Not begun; `parts` are those of each group that are here."""
        self.leaving: dict[str, dict[int, list[Leaving]]] = {
            name: {part: [] for part in of_group} for name, of_group in parts.items()
        }
        self.waiting: list[Any] | None = []
        self.hits = self.misses = 0


@dataclasses.dataclass(frozen=True)
class Admission:
    """Rows that move before the step of a batch: see `Tier.admit`.

    Attributes:
      course: of the stage that made it.
      moves: group name -> of each part of its buffer; of parts that are elsewhere none.
      named: group name -> of each owner the homes that the batch names, int32, ascending.
      left: group name -> of each part that is here a future of the records of the rows that leave.
      records: the records of the rows that come, for each group and part; of parts that are elsewhere none.
      longest: group name -> the most rows that come to any part of it, here or elsewhere, and the most that leave one.
    """

    course: Course
    moves: dict[str, list[Moves]]
    named: OfOwners
    left: dict[str, dict[int, Future[np.ndarray]]]
    records: Future[dict[str, list[np.ndarray]]]
    longest: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
