"""Presence of rows: in how many batches each is, which says what to keep where it is needed.

An item is a row of a table. It is present in a batch, or in a device's share of one, if any id there names it. Samples
of real logs name few items over and over: Zha et al. (P2RES) count 100 batches, of which 2.2% of the items take over
90% of the look-ups of Criteo's Kaggle log.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource
from recjax.errors import ConfigError
from recjax.utils.text import aligned

COVERAGES = (0.5, 0.9, 0.99)  # shares of all look-ups whose fewest items are reported
SPREADS = (0.95, 0.8, 0.5, 0.2, 0.05, 0.0)  # shares of the batches: items in more of them are sought in the next one


_NO_IDS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Items:
    """Items of one table that are in any of the batches.

    Attributes:
      rows: V of the table.
      ids_U: of the items, ascending, int64.
      present_U: in how many shares of batches each is, int64.
      found_U: how many ids name each, int64.
    """

    rows: int
    ids_U: np.ndarray
    present_U: np.ndarray
    found_U: np.ndarray

    def present(self, ids_K: np.ndarray) -> np.ndarray:
        """In how many shares of batches each of some rows is: int64 [K]."""
        if not len(self.ids_U):
            return np.zeros(len(ids_K), np.int64)
        at_K = np.minimum(np.searchsorted(self.ids_U, ids_K), len(self.ids_U) - 1)
        present_K: np.ndarray = np.where(self.ids_U[at_K] == ids_K, self.present_U[at_K], 0)
        return present_K


@dataclasses.dataclass(frozen=True)
class Presence:
    """Items of all tables in some batches.

    Attributes:
      tables: by name.
      batches: how many were counted.
      shares: in how many equal parts each, one a device.
      batch_size: B.
      new: of the second batch and each one after it, the share of its items that none before it has; float64.
      following: of the batch after these, in how many shares of them the item of each look-up is, and that of each of
        its distinct items; None if there is no such batch.
    """

    tables: dict[str, Items]
    batches: int
    shares: int
    batch_size: int
    new: np.ndarray
    following: tuple[np.ndarray, np.ndarray] | None = None

    def probability(self, table: str) -> np.ndarray:
        """P(item is in a device's share of a batch), as it was counted: float64 [U]."""
        return self.tables[table].present_U / max(1, self.batches * self.shares)

    def occurrences(self, table: str) -> np.ndarray:
        """Mean number of ids of a batch that name each item: float64 [U]."""
        return self.tables[table].found_U / max(1, self.batches)


def count_presence(
    read: Iterable[Batch],
    tables: Mapping[str, int],
    features: Sequence[tuple[str, str]],
    batch_size: int,
    shares: int = 1,
) -> Presence:
    """Counts in how many shares of batches each item is.

    The result is a function of the batches alone: neither threads nor processes enter.

    Args:
      read: batches in their order; samples of device n in each are those from n * ceil(B / shares) on.
      tables: name -> rows.
      features: (name in the batches, table) of each look-up.
      batch_size: B, of a full batch.
      shares: devices that share a batch.
    """
    looked = {name: sorted({feature for feature, table in features if table == name}) for name in tables}
    counters = {name: _Counter(rows) for name, rows in tables.items()}
    each, new = -(-batch_size // shares), []
    for batch in read:
        items = unseen = 0
        for name, counter in counters.items():
            found = counter.add([batch.bags[feature] for feature in looked[name]], each)
            items, unseen = items + found[0], unseen + found[1]
        new.append(unseen / max(1, items))
    found_tables = {name: counter.items() for name, counter in counters.items()}
    return Presence(found_tables, len(new), shares, batch_size, np.array(new[1:]))


def seek(presence: Presence, following: Batch, features: Sequence[tuple[str, str]]) -> Presence:
    """Looks the items of a batch up among those of the batches before it: `Presence.following`; as `count_presence`."""
    lookups: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for table, items in presence.tables.items():
        looked = sorted({feature for feature, name in features if name == table})
        ids_L = np.concatenate([_NO_IDS, *(following.bags[feature].ids.ravel() for feature in looked)])
        for present, ids_K in zip(lookups, (ids_L, np.unique(ids_L)), strict=True):
            present.append(items.present(ids_K))
    return dataclasses.replace(presence, following=(np.concatenate(lookups[0]), np.concatenate(lookups[1])))


def presence_of(
    source: BlockSource, batches_read: int, batch_size: int, seed: int = 0, shuffle: bool = True
) -> Presence:
    """Counts the items of each feature in the first training batches of a run, and seeks them in the one after these.

    Args:
      source: the data.
      batches_read: how many, at most.
      batch_size: B.
      seed: of the order of the samples.
      shuffle: False takes them in the order of the file.

    Raises:
      ConfigError: a number below 1.
      DataError: there are no training samples, or they cannot be read.
    """
    for name, value in (("batches", batches_read), ("batch-size", batch_size)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1.")
    rows = int(source.row_counts("train").sum())
    stream = batches(source, "train", batch_size, seed=seed, shuffle=shuffle, workers=0, epochs=1)
    first = itertools.islice(stream, min(batches_read, -(-rows // batch_size)))
    tables = {feature.name: feature.rows for feature in source.schema.features}
    features = [(name, name) for name in tables]
    counted, following = count_presence(first, tables, features, batch_size), next(stream, None)
    return counted if following is None else seek(counted, following, features)


class _Counter:
    """Items of one table: dense counts of as many as there are rows, or of those seen where rows are many."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ids, self._counts_2xU = np.zeros(0, np.int64), np.zeros((2, 0), np.int64)

    def add(self, bags: Sequence[Any], each: int) -> tuple[int, int]:
        """Counts a batch; returns its items, and how many of these are new."""
        if not bags:
            return 0, 0
        ids_L = np.concatenate([bag.ids.ravel() for bag in bags]).astype(np.int64, copy=False)
        share_L = np.concatenate([bag.samples() for bag in bags]) // each
        keys_K, found_K = np.unique(share_L * self._rows + ids_L, return_counts=True)
        ids, of_item_K = np.unique(keys_K % self._rows, return_inverse=True)
        counts_2xU = np.stack(
            [np.bincount(of_item_K, minlength=len(ids)), np.bincount(of_item_K, found_K, len(ids)).astype(np.int64)]
        )
        at_U = np.searchsorted(self._ids, ids)
        known_U = np.zeros(len(ids), bool)
        known_U[at_U < len(self._ids)] = self._ids[at_U[at_U < len(self._ids)]] == ids[at_U < len(self._ids)]
        self._counts_2xU[:, at_U[known_U]] += counts_2xU[:, known_U]
        if not known_U.all():
            self._ids = np.insert(self._ids, at_U[~known_U], ids[~known_U])
            self._counts_2xU = np.insert(self._counts_2xU, at_U[~known_U], counts_2xU[:, ~known_U], axis=1)
        return len(ids), int((~known_U).sum())

    def items(self) -> Items:
        present_U, found_U = self._counts_2xU
        return Items(self._rows, self._ids, present_U, found_U)


def describe(presence: Presence) -> dict[str, Any]:
    """Returns the counts as JSON values.

    Returns:
      "batches", "batch_size"; "tables": a list of name, rows, items (those seen), ids (look-ups), and for each of
      `COVERAGES` "items_for" and "items_for_share" (of the items seen), a list each; "all", the same over all tables;
      "histogram": number of batches -> how many items are in just so many, over all tables, and "accesses": the share
      of look-ups that items in at least so many batches take; "new": the mean share of a batch's items that no batch
      before it had, of the second half of the batches (the "previous 100" of P2RES are those before), None where there
      is one batch alone; "next", of the batch after these: for each of `SPREADS` "more_than" so many batches, "items",
      the share of those seen that are in more, and the share of the batch's "accesses" and "distinct" items that are
      these, and under "unseen" the shares of those in none; None where there is no such batch.
    """
    tables = [{"name": name, **_covered([items])} for name, items in presence.tables.items()]
    every = [items for items in presence.tables.values() if len(items.ids_U)]
    present = np.concatenate([np.zeros(0, np.int64), *(items.present_U for items in every)])
    found = np.concatenate([np.zeros(0, np.int64), *(items.found_U for items in every)])
    histogram = np.bincount(present, minlength=presence.batches + 1)
    accesses = np.bincount(present, found, presence.batches + 1)
    at_least = np.cumsum(accesses[::-1])[::-1] / max(1, found.sum())
    late = presence.new[len(presence.new) // 2 :]
    return {
        "batches": presence.batches,
        "batch_size": presence.batch_size,
        "tables": tables,
        "all": _covered(list(presence.tables.values())),
        "histogram": {str(n): int(count) for n, count in enumerate(histogram) if n and count},
        "accesses": {str(n): float(at_least[n]) for n, count in enumerate(histogram) if n and count},
        "new": float(late.mean()) if len(late) else None,
        "next": None if presence.following is None else _next(presence, present),
    }


def _next(presence: Presence, present: np.ndarray) -> dict[str, Any]:
    """Returns what the batch after the counted ones has of items that are in many of these, and of new ones."""
    assert presence.following is not None
    of_L, of_U = presence.following
    lines = []
    for least in dict.fromkeys(int(share * presence.batches) for share in SPREADS):
        shares = {"items": present, "accesses": of_L, "distinct": of_U}
        lines.append({"more_than": least, **{name: float((x > least).mean()) for name, x in shares.items()}})
    return {"in": lines, "unseen": {"accesses": float((of_L == 0).mean()), "distinct": float((of_U == 0).mean())}}


def next_rows(described: dict[str, Any]) -> list[list[str]]:
    """A table, heads first: items by the number of batches that they are in, and their part of the next batch."""
    rows = [["in more than", "items", "accesses of the next batch", "its distinct items"]]
    for line in described["next"]["in"]:
        shares = (f"{line[name]:.2%}" for name in ("items", "accesses", "distinct"))
        rows.append([f"{line['more_than']} of {described['batches']} batches", *shares])
    unseen = described["next"]["unseen"]
    return [*rows, ["none", "-", f"{unseen['accesses']:.2%}", f"{unseen['distinct']:.2%}"]]


def _covered(tables: Sequence[Items]) -> dict[str, Any]:
    found = np.sort(np.concatenate([np.zeros(0, np.int64), *(items.found_U for items in tables)]))[::-1]
    total = int(found.sum())
    needed = np.searchsorted(np.cumsum(found), np.array(COVERAGES) * total) + 1 if total else np.zeros(3, int)
    return {
        "rows": sum(items.rows for items in tables),
        "items": len(found),
        "ids": total,
        "items_for": [int(n) for n in needed],
        "items_for_share": [float(n) / max(1, len(found)) for n in needed],
    }


def item_rows(described: dict[str, Any]) -> list[list[str]]:
    """A table of the same, heads first: the items of each table, and how many of them take most look-ups."""
    shares = [f"{share:.0%}" for share in COVERAGES]
    head = ["table", "rows V", "items seen", "look-ups", *(f"items for {share}" for share in shares)]
    rows = []
    for table in [*described["tables"], {"name": "all", **described["all"]}]:
        needed = zip(table["items_for"], table["items_for_share"], strict=True)
        numbers = [f"{table[key]:,}" for key in ("rows", "items", "ids")]
        rows.append([table["name"], *numbers, *(f"{n:,} ({share:.1%})" for n, share in needed)])
    return [head, *rows]


def batch_rows(described: dict[str, Any]) -> list[list[str]]:
    """Likewise: the items that are in at least so many batches, and the look-ups that they take."""
    steps = [n for n in (1, 2, 5, 10, 20, 50, 80, 90, 95, 100) if n <= described["batches"]]
    histogram = {int(n): count for n, count in described["histogram"].items()}
    items = sum(histogram.values())
    table = [["in at least", "items", "of items", "of look-ups"]]
    for least in steps:
        count = sum(count for n, count in histogram.items() if n >= least)
        reached = [int(n) for n in described["accesses"] if int(n) >= least]
        access = described["accesses"][str(min(reached))] if reached else 0.0
        table.append([f"{least} batches", f"{count:,}", f"{count / max(1, items):.2%}", f"{access:.2%}"])
    return table


def to_text(described: dict[str, Any]) -> str:
    """The same as tables for a person."""
    lines = [f"presence in {described['batches']} batches of {described['batch_size']:,}", ""]
    lines += [*aligned(item_rows(described)), "", *aligned(batch_rows(described))]
    if described["next"]:
        lines += ["", *aligned(next_rows(described))]
    if described["new"] is not None:
        lines += ["", f"items of a batch that no batch before it had: {described['new']:.2%} (mean of the later half)"]
    return "\n".join(lines)
