"""The plan of a run: what its config's `plan` says, on the devices that it has."""

from __future__ import annotations

import functools
import math

from recjax.config.run import RunConfig
from recjax.data.source import BlockSource, has_blocks
from recjax.embedding.plan import Plan
from recjax.embedding.plan_choice import is_file, make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.balance import balance
from recjax.planning.hot import Choice, hot_rows, refuse_twice, with_hot_rows
from recjax.planning.kinds import choose_kinds, may_pool
from recjax.planning.loads import Workload
from recjax.planning.profile import profile_of


def resolve(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
) -> tuple[Plan, Choice | None]:
    """Resolves the config's `plan` for a mesh, and `embedding.hot`.

    Args:
      config: of the run.
      source: its data, of which the first training samples are read where something is to be chosen by them.
      tables: of the model.
      features: of the model.
      shape: replica groups, hosts of each, devices of each of these.

    Returns:
      The plan, and how its hot rows were chosen; None if nothing was to be chosen.

    Raises:
      ConfigError: as for `make_plan`, or hot rows are asked for beside a plan file.
      DataError: the data cannot be read.
    """
    exchange, devices = config.embedding.exchange, shape[1] * shape[2]
    work = functools.cache(lambda: workload(config, source, tables, features, shape))
    plan = (
        balance(tables, features, work(), exchange)
        if config.plan == "balanced"
        else make_plan(config.plan, tables, exchange)
    )
    if exchange.kind == "auto" and not is_file(config.plan) and devices > 1 and may_pool(plan, tables, features):
        plan = choose_kinds(plan, tables, features, work())
    return add_hot_rows(plan, config, source, tables, features, shape)


def add_hot_rows(
    plan: Plan,
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
    room_bytes: float = math.inf,
) -> tuple[Plan, Choice | None]:
    """Adds to a plan the hot rows that the config asks for; arguments and results are those of `resolve`.

    `room_bytes` of a device are there for as many as save time.
    """
    if not config.embedding.hot.rows or not has_blocks(source):  # to predict, none are needed
        return plan, None
    if is_file(config.plan):
        refuse_twice(plan, config.plan)
    choice = hot_rows(plan, config, source, tables, features, shape, room_bytes)
    return with_hot_rows(plan, choice, tables), choice


def workload(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
) -> Workload:
    """A training step's work on the tables; the arguments are those of `resolve`."""
    replicas, hosts, each = shape
    batch_size, devices = config.train.batch_size, hosts * each
    profile = profile_of(source, tables, features, batch_size, devices * replicas)
    item_bytes = 8 if config.compute_dtype == "float64" else 4
    agree = config.train.replica_sync == "exact"
    how = item_bytes, config.embedding.dedup, agree, config.mesh.hosts
    return Workload(profile, batch_size, devices, hosts, replicas, *how)
