"""Exchanges by the name of the sharding: the list of them all."""

from __future__ import annotations

from recjax.embedding.exchange.base import GroupExchange
from recjax.embedding.exchange.copies import HotExchange, ReplicatedExchange
from recjax.embedding.exchange.pooled import PoolingExchange
from recjax.embedding.exchange.rows import ColumnExchange, RowExchange
from recjax.embedding.layout import BoundPlan, Group

EXCHANGES: dict[str, type[GroupExchange]] = {
    "rows": RowExchange,
    "columns": ColumnExchange,
    "grid": ColumnExchange,
    "replicated": ReplicatedExchange,
    "hot": HotExchange,
    "hot_per_host": HotExchange,
}


def exchange_of(group: Group) -> GroupExchange:
    """Returns the exchange of a group's rows."""
    return EXCHANGES[group.sharding.kind](group)


def exchanges_of(bound: BoundPlan) -> list[GroupExchange | PoolingExchange]:
    """Returns all exchanges of a plan: those of rows, or of their gradients, and those of vectors that owners pool."""
    return [*(exchange_of(group) for group in bound.fetching), *(PoolingExchange(layout) for layout in bound.pooled)]
