"""Data in an order in which each replica group meets the samples that are meant for it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Literal

import numpy as np

from recjax.data import counter_rng
from recjax.data.batch import Batch, Schema
from recjax.data.source import BLOCK_ROWS, BlockSource, concatenate, even_blocks, take
from recjax.errors import ConfigError

_PURPOSE = 3  # keeps these draws apart from those of `recjax.data.pipeline`

# How the samples of an epoch come to the groups: drawn anew in each epoch; always to the same group, drawn once; always
# to the same group, and all samples that name a value of a feature to one; or each of them to every group, which all
# have an order of their own.
Parts = Literal["random", "fixed", "by_feature", "whole"]


@dataclasses.dataclass(frozen=True)
class Arranged:
    """The samples of another source, with a training split in an order of its own, for `train.shuffle=false`.

    Every batch of `groups * size` samples consists of `size` for each group, in the order of the groups; which is how
    devices take them, if `size` is a multiple of a group's devices. Samples that fill no such batch are left out of an
    epoch. What is called an epoch of this source are as many as `epochs` of the other one.

    Attributes:
      source: of the samples; its training split is held in memory.
      groups: how many.
      size: samples of a batch for each.
      parts: how samples come to the groups.
      feature: for "by_feature", one with one value a sample.
      epochs: orders that follow one another.
      seed: of the orders.
    """

    source: BlockSource
    groups: int
    size: int
    parts: Parts
    feature: str
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """The other source's."""
        return self.source.name

    @property
    def schema(self) -> Schema:
        """The other source's."""
        return self.source.schema

    @property
    def fingerprint(self) -> str:
        """The other source's, with that of the order."""
        order = (self.groups, self.size, self.parts, self.feature, self.epochs, self.seed)
        return hashlib.sha256(f"{self.source.fingerprint} {order}".encode()).hexdigest()

    def row_counts(self, split: str) -> np.ndarray:
        """See `BlockSource`."""
        return even_blocks(len(self.order)) if split == "train" else self.source.row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `BlockSource`."""
        if split != "train":
            return self.source.read(split, index)
        start = index * BLOCK_ROWS
        return dataclasses.replace(take(self._samples, self.order[start : start + BLOCK_ROWS]), position=start)

    def met_by(self, group: int, most: int) -> Batch:
        """The first samples that a group meets, `most` of them or all of an epoch's."""
        order = self.order[: len(self.order) // self.epochs].reshape(-1, self.groups, self.size)
        return take(self._samples, order[:, group].ravel()[:most])

    @functools.cached_property
    def _samples(self) -> Batch:
        return concatenate([self.source.read("train", i) for i in range(len(self.source.row_counts("train")))])

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Indices of the other source's samples, batch by batch and epoch by epoch: int64 [rows].

        Raises:
          ConfigError: too few samples for one batch, or a feature that does not split them.
        """
        rows = int(self.source.row_counts("train").sum())
        members = self._members(rows)
        batches = min(map(len, members)) // self.size
        if batches == 0:
            raise ConfigError(
                f"{self.groups} groups with {self.size:,} samples of a batch each are more than the {rows:,} training "
                "samples give. Lower train.batch_size."
            )
        epochs = []
        for epoch in range(self.epochs):
            if self.parts == "random":
                shuffled = counter_rng.permutation(rows, self.seed, _PURPOSE, epoch, self.groups)
                members = np.array_split(shuffled, self.groups)
            own = [m[counter_rng.permutation(len(m), self.seed, _PURPOSE, epoch, g)] for g, m in enumerate(members)]
            cut = [x[: batches * self.size].reshape(batches, self.size) for x in own]
            epochs.append(np.stack(cut, axis=1).ravel())
        return np.concatenate(epochs)

    def _members(self, rows: int) -> list[np.ndarray]:
        """The samples of each group."""
        if self.parts == "whole":
            return [np.arange(rows)] * self.groups
        if self.parts != "by_feature":
            shuffled = counter_rng.permutation(rows, self.seed, _PURPOSE, 0, self.groups)
            return np.array_split(shuffled, self.groups)
        bags = self._samples.bags[self.feature]
        if bags.lengths is not None or bags.ids.shape[1] != 1:
            raise ConfigError(f"feature {self.feature!r} does not have one value a sample, so it cannot part them.")
        # Values in random order, cut where the samples are about equally many in each group.
        values, inverse, counts = np.unique(bags.ids[:, 0], return_inverse=True, return_counts=True)
        order = counter_rng.permutation(len(values), self.seed, _PURPOSE, 1)
        group_of = np.empty(len(values), np.int64)
        ends = np.cumsum(counts[order])
        group_of[order] = np.minimum((ends - 1) * self.groups // rows, self.groups - 1)
        return [np.flatnonzero(group_of[inverse] == g) for g in range(self.groups)]
