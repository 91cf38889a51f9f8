"""Rows that may be hot, ranked by how often devices ask for them in a run's first batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recjax.data.pipeline import batches
from recjax.data.presence import Presence, count_presence
from recjax.embedding.plan import Plan
from recjax.embedding.segment import COPIED, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec, ids_per_sample

if TYPE_CHECKING:
    from recjax.config.run import RunConfig
    from recjax.data.source import BlockSource

MOST_IDS = 2**26  # in the batches that are counted


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Rows that may be hot, the best first; M of them in G stacks of equal width.

    Attributes:
      tables: names of their tables.
      table_M: index of each one's.
      ids_M: within the table.
      asked_M: how often a device's share of a batch asks for it, float64: P(it does) with dedup, else ids.
      found_M: ids of a batch that name it.
      row_bytes_M: D * itemsize of each.
      slot_bytes_M: of its optimizer's slots.
      other_ids: ids of a batch that name rows of other tables.
      joining_ids: of these ids of tables that become hot as a whole once any row is: see `joins`.
      features: that look up tables.
    """

    tables: tuple[str, ...]
    table_M: np.ndarray
    ids_M: np.ndarray
    asked_M: np.ndarray
    found_M: np.ndarray
    row_bytes_M: np.ndarray
    slot_bytes_M: np.ndarray
    other_ids: float
    joining_ids: float = 0.0
    features: int = 1


def ranked(
    plan: Plan,
    config: RunConfig,
    source: BlockSource,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    shape: tuple[int, int, int],
) -> tuple[Candidates, Presence]:
    """The rows that may be hot, and the presence that they are ranked by; arguments are those of `hot.hot_rows`."""
    presence = first_batches(config, source, tables, features, math.prod(shape))
    free = [t for t in tables if may_be_hot(plan.tables[t.name])]
    item_bytes = 8 if config.compute_dtype == "float64" else 4
    found = candidates(presence, tables, free, plan, config.embedding.dedup, item_bytes)
    return dataclasses.replace(found, features=len(features)), presence


def may_be_hot(segments: Sequence[Segment]) -> bool:
    """True if some rows of a table can be hot: it has no copies already, and is not split by rows into sets."""
    return all(s.rows == "all" and s.placement not in COPIED for s in segments)


def joins(table: TableSpec, segments: Sequence[Segment]) -> bool:
    """True if a table that all devices have copies of anyway becomes hot, to travel in the same arrays as hot rows."""
    return table.placement is None and all(s.placement == COPIED[0] for s in segments)


def first_batches(
    config: RunConfig,
    source: BlockSource,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    shares: int,
    position: int = 0,
) -> Presence:
    """Counts `embedding.hot.batches` batches of a run from a sample on, or as many as have `MOST_IDS` ids."""
    train = config.train
    ids = ids_per_sample(features) * train.batch_size
    rows = int(source.row_counts("train").sum())
    count = max(1, min(config.embedding.hot.batches, int(MOST_IDS / max(1, ids)), -(-rows // train.batch_size)))
    order: Any = {
        "seed": config.seed,
        "shuffle": train.shuffle,
        "shuffle_blocks": train.shuffle_blocks,
        "position": position,
    }
    stream = itertools.islice(batches(source, "train", train.batch_size, workers=0, **order), count) if rows else ()
    looking = [(f.reads, f.table) for f in features]
    return count_presence(stream, {t.name: t.rows for t in tables}, looking, train.batch_size, shares)


def candidates(
    presence: Presence, tables: Sequence[TableSpec], free: Sequence[TableSpec], plan: Plan, dedup: bool, item_bytes: int
) -> Candidates:
    """The rows that may be hot, those that travel most first; equal ones in the order of the tables and their ids."""
    of: list[list[np.ndarray]] = []
    for number, table in enumerate(free):
        items = presence.tables[table.name]
        found_U = presence.occurrences(table.name)
        asked_U = presence.probability(table.name) if dedup else found_U / presence.shares
        if any(s.exchange.kind == "pooled" for s in plan.tables[table.name]):
            asked_U = asked_U * 0  # vectors travel, whichever rows they are sums of
        value_bytes = 2 if table.dtype == "bfloat16" else item_bytes
        slots = sum(math.prod(slot.shape) for slot in table.optimizer.slots(table.dim).values())
        sizes = (number, table.dim * value_bytes, slots * item_bytes)
        of.append([*(np.full(len(items.ids_U), size) for size in sizes), items.ids_U, asked_U, found_U])
    joined = [np.concatenate(column) for column in zip(*of, strict=True)] if of else [np.zeros(0, np.int64)] * 6
    table_M, row_bytes_M, slot_bytes_M, ids_M, asked_M, found_M = joined
    order_M = np.lexsort((ids_M, table_M, -found_M, -asked_M))
    others = [t for t in tables if t not in free]
    joining = [t for t in others if joins(t, plan.tables[t.name])]
    ids, joining_ids = (sum(float(presence.occurrences(t.name).sum()) for t in of) for of in (others, joining))
    return Candidates(
        tuple(t.name for t in free),
        table_M[order_M],
        ids_M[order_M],
        asked_M[order_M],
        found_M[order_M],
        row_bytes_M[order_M],
        slot_bytes_M[order_M],
        ids,
        joining_ids,
    )
