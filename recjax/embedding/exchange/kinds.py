"""Exchanges by the placement of a plan: the list of them all."""

from __future__ import annotations

from recjax.embedding.exchange.base import GroupExchange
from recjax.embedding.exchange.copies import HotExchange, ReplicatedExchange
from recjax.embedding.exchange.pooled import PoolingExchange
from recjax.embedding.exchange.rows import ColumnExchange, RowExchange
from recjax.embedding.exchange.touched_rows import TouchedRowsExchange, TouchedRowsSharding
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.sharding import (
    ColumnSharding,
    GridSharding,
    HotPerHostSharding,
    HotSharding,
    ReplicatedSharding,
    RowSharding,
    Sharding,
)

EXCHANGES: dict[str, tuple[type[Sharding], type[GroupExchange]]] = {
    "row_wise": (RowSharding, RowExchange),
    "table_wise": (RowSharding, RowExchange),
    "table_row_wise": (RowSharding, RowExchange),
    "column_wise": (ColumnSharding, ColumnExchange),
    "grid": (GridSharding, ColumnExchange),
    "data_parallel": (ReplicatedSharding, ReplicatedExchange),
    "data_parallel_sparse": (TouchedRowsSharding, TouchedRowsExchange),
    "hot": (HotSharding, HotExchange),
    "hot_per_host": (HotPerHostSharding, HotExchange),
}
_OF_SHARDING = dict(EXCHANGES.values())


def exchange_of(group: Group) -> GroupExchange:
    """Returns the exchange of a group's rows."""
    return _OF_SHARDING[type(group.sharding)](group)


def exchanges_of(bound: BoundPlan) -> list[GroupExchange | PoolingExchange]:
    """Returns all exchanges of a plan: those of rows, or of their gradients, and those of vectors that owners pool."""
    return [*(exchange_of(group) for group in bound.fetching), *(PoolingExchange(layout) for layout in bound.pooled)]
