"""The buffers of a plan that become caches, and their sizes."""

from __future__ import annotations

import dataclasses

from recjax.embedding.layout import BoundPlan, Group
from recjax.errors import ConfigError
from recjax.utils.units import size_text


def with_caches(bound: BoundPlan, budget_bytes: int, item_bytes: int) -> BoundPlan:
    """The plan with caches in place of the buffers whose rows are spread over the devices.

    Each gets a share of the budget that is proportional to the bytes that a batch names of its rows, but no more
    than all of its rows: one that gets as much is no cache, unless it holds columns of tables of which others are.

    Args:
      bound: a plan; it is returned if all rows fit.
      budget_bytes: of a device, for these rows and their optimizer's state.
      item_bytes: as for `Group.row_bytes`.

    Raises:
      ConfigError: caches cannot do what the plan asks for.
    """
    spread = {group.name: group for group in bound.groups if group.spread}
    sizes = _sizes(bound, list(spread.values()), budget_bytes, item_bytes)
    if all(sizes[name] >= group.rows for name, group in spread.items()):
        return bound
    _check_plan(bound)
    caches = {}
    # A table is all in caches, or not at all: a group whose rows all fit may hold other columns of one that is.
    tables = {table for name, group in spread.items() if sizes[name] < group.rows for table in group.table_names}
    while more := {t for g in spread.values() if tables.intersection(g.table_names) for t in g.table_names} - tables:
        tables |= more
    for name, group in spread.items():
        if not tables.intersection(group.table_names):
            continue
        _check_group(group)
        if not sizes[name]:
            raise ConfigError(
                f"tier.device_bytes={size_text(budget_bytes)} has no room for a single row of {name} "
                f"({group.row_bytes(item_bytes):,} bytes). Raise it."
            )
        caches[name] = dataclasses.replace(group, rows=sizes[name], homes=group.rows, mapped=True, lines=None)
    return bound.with_groups(caches)


def read_through(bound: BoundPlan) -> BoundPlan:
    """The plan for predictions, in which buffers of rows on the host may hold any number of them."""
    return bound.with_groups({g.name: dataclasses.replace(g, rows=g.home_rows) for g in bound.cached})


def _sizes(bound: BoundPlan, groups: list[Group], budget_bytes: int, item_bytes: int) -> dict[str, int]:
    """Rows of each group that fit into the budget."""
    sizes: dict[str, int] = {}
    left, open_ = budget_bytes, list(groups)
    ids = {g.name: sum(s.feature.ids for s in bound.sources_of(g)) for g in groups}  # of a sample
    while open_:
        wants = {g.name: g.row_bytes(item_bytes) * ids[g.name] or 1 for g in open_}
        share = {g.name: int(left * wants[g.name] / sum(wants.values())) // g.row_bytes(item_bytes) for g in open_}
        whole = [g for g in open_ if share[g.name] >= g.rows]
        if not whole:
            return sizes | share
        for group in whole:
            sizes[group.name] = group.rows
            left -= group.rows * group.row_bytes(item_bytes)
        open_ = [group for group in open_ if group not in whole]
    return sizes


def _check_plan(bound: BoundPlan) -> None:
    """Refuses plans that caches do not serve (ConfigError)."""
    if bound.independent:
        raise ConfigError(
            "tier.device_bytes is set, and not all rows fit into it; but rows on the host do not go with replica "
            "groups that hold rows of their own (train.replica_sync other than exact) yet. Leave that out, or set "
            "tier.device_bytes=0, which holds all rows on the devices."
        )


def _check_group(group: Group) -> None:
    """Refuses groups whose buffer cannot be a cache (ConfigError)."""
    tables = ", ".join(group.table_names)
    if group.optimizer.every_row:
        raise ConfigError(
            f"tables {tables} do not all fit into tier.device_bytes, but their optimizer has every_row=true, which "
            "updates all rows in each step. Set every_row=false, which updates the rows that the batch names; or raise "
            "tier.device_bytes."
        )
    if any(segment.band.chosen is not None and not segment.band.vacant for segment in group.segments):
        raise ConfigError(
            f"tables {tables} do not all fit into tier.device_bytes, but some are split into segments by rows that are "
            "not hot, which rows on the host are not yet. Make these segments hot, or leave them out of the plan."
        )
    if not group.dedup:
        raise ConfigError("tier.device_bytes needs embedding.dedup=true: a cache holds each row once.")
    if group.ragged:
        raise ConfigError("tier.device_bytes does not go with embedding.ragged=true yet. Leave that false.")
