"""Users, items and pairs of the data that a model of two sides learns from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.data.original_ids import OriginalIds, original_ids
from recjax.data.source import BlockSource, concatenate, require_rows, take
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import ConfigError
from recjax.train.two_sided import is_pair, sides_of


class Lists:
    """Pairs by user: for each of some users the items, in a compact form."""

    def __init__(self, users: np.ndarray, items: np.ndarray, rows: int) -> None:
        """Takes pairs in any order, each once or more; `rows` is the largest item + 1."""
        self._rows = rows
        self.keys = np.unique(users * rows + items)

    def of_users(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of these users, in their order: the place of the user among them, and the item."""
        starts, ends = (np.searchsorted(self.keys, (users + more) * self._rows) for more in (0, 1))
        counts = ends - starts
        places = np.repeat(np.arange(len(users)), counts)
        at = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
        return places, self.keys[at] % self._rows

    def holds(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Returns which of these pairs are among them: bool, of the shape of `items`."""
        keys = users * self._rows + items
        at = np.minimum(np.searchsorted(self.keys, keys), max(0, len(self.keys) - 1))
        return (self.keys[at] == keys) if len(self.keys) else np.zeros(keys.shape, bool)


@dataclasses.dataclass(frozen=True)
class Known:
    """Users and items that training has seen, and the pairs of all splits.

    Attributes:
      source: the data.
      user: feature that tells users apart.
      item: likewise for items.
    """

    source: BlockSource
    user: str
    item: str

    @functools.cached_property
    def users(self) -> Batch:
        """A row of each known user, by user: its last in training."""
        return self._last_rows(self.user)

    @functools.cached_property
    def items(self) -> Batch:
        """A row of each known item, by item."""
        return self._last_rows(self.item)

    def ids(self, name: str, rows: Batch) -> np.ndarray:
        """The users or items of rows: int64 [n]."""
        return rows.bags[name].ids[:, 0].astype(np.int64)

    def original_ids(self, name: str) -> OriginalIds:
        """The values that the rows of a feature stand for."""
        source = self.source if isinstance(self.source, PreparedSource) else None
        return original_ids(source, name, self.rows(name))

    def rows(self, name: str) -> int:
        """V of a feature."""
        return self.source.schema.feature(name).rows

    @functools.lru_cache(maxsize=3)  # noqa: B019  # one of these lives as long as its training
    def pairs(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of a split, in its order: users and items, int64 [n] each."""
        both = []
        for index in range(len(self.source.row_counts(split))):
            block = self.source.read(split, index)
            of_pairs = is_pair(block)
            both.append([self.ids(name, block)[of_pairs] for name in (self.user, self.item)])
        users, items = zip(*both, strict=True) if both else ([np.zeros(0, np.int64)],) * 2
        return np.concatenate(users), np.concatenate(items)

    def lists(self, splits: Sequence[str]) -> Lists:
        """The items of each user in these splits."""
        none = np.zeros(0, np.int64)
        pairs = [self.pairs(split) for split in splits]
        users, items = (np.concatenate([none, *(each[side] for each in pairs)]) for side in (0, 1))
        return Lists(users, items, self.rows(self.item))

    def _last_rows(self, name: str) -> Batch:
        """The last training row of each value of a feature that has a row of its own, by value."""
        first = self.original_ids(name).first  # below are unknown and missing values
        counts = self.source.row_counts("train")
        last_V = np.full(self.rows(name), -1, np.int64)
        start = 0
        for index in range(len(counts)):
            block = self.source.read("train", index)
            of_pairs = np.flatnonzero(is_pair(block))
            last_V[self.ids(name, block)[of_pairs]] = start + of_pairs
            start += block.size
        wanted = np.sort(last_V[first:][last_V[first:] >= 0])
        ends = np.cumsum(counts)
        parts = []
        for index, (begin, end) in enumerate(zip(ends - counts, ends, strict=True)):
            here = wanted[np.searchsorted(wanted, begin) : np.searchsorted(wanted, end)]
            if len(here):
                parts.append(take(self.source.read("train", index), here - begin))
        if not parts:
            require_rows(self.source, "train")
            raise ConfigError(f"no training row has label 1, a weight, and a known {name}: there is nothing to rank.")
        rows = concatenate(parts)
        return take(rows, np.argsort(self.ids(name, rows)))


def known_of(config: RunConfig, source: BlockSource) -> Known:
    """The users and items of a run; ConfigError if its model is not of two sides."""
    if not getattr(config.model, "two_sided", False):
        raise ConfigError(
            f"model={config.model.kind} scores a user and an item together, so items cannot be ranked for a user "
            "without scoring all. The best K are found by a model of two sides: train model=two_tower or mf."
        )
    sides = sides_of(config, source.schema)
    return Known(source, sides["user"].features[0], sides["item"].features[0])
