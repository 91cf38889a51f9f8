"""Rows that move between caches and the host for a batch: what a stage decides, and the tier carries out."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np

from recjax.tiers.directory import Directory, Moves

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
      directories: of the stage, by group and owner.
      leaving: group name -> of each owner what has left, or is to leave, and is not written.
      waiting: reads to begin once the caches that the course before it filled are empty; None: they are.
    """

    def __init__(self, directories: dict[str, list[Directory]]) -> None:
        """Not begun."""
        self.directories = directories
        self.leaving: dict[str, list[list[Leaving]]] = {name: [[] for _ in of] for name, of in directories.items()}
        self.waiting: list[Any] | None = []


@dataclasses.dataclass(frozen=True)
class Admission:
    """Rows that move before the step of a batch: see `Tier.admit`.

    Attributes:
      course: of the stage that made it.
      moves: group name -> of each owner.
      named: group name -> of each owner the homes that the batch names, int32, ascending.
      left: group name -> of each owner that is here a future of the records of the rows that leave.
      records: the records of the rows that come, for each group and owner; of owners that are elsewhere none.
    """

    course: Course
    moves: dict[str, list[Moves]]
    named: OfOwners
    left: dict[str, dict[int, Future[np.ndarray]]]
    records: Future[OfOwners]
