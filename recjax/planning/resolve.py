"""The plan of a run: what its config's `plan` says, on the devices that it has."""

from __future__ import annotations

import functools

from recjax.config.run import RunConfig
from recjax.data.source import BlockSource
from recjax.embedding.plan import Plan, is_file, make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.balance import balance
from recjax.planning.kinds import choose_kinds, may_pool
from recjax.planning.loads import Workload
from recjax.planning.profile import profile_of


def resolve_plan(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
) -> Plan:
    """Resolves the config's `plan` for a mesh.

    Args:
      config: of the run.
      source: its data, of which the first training samples are read where something is to be chosen by them.
      tables: of the model.
      features: of the model.
      shape: replica groups, hosts of each, devices of each of these.

    Raises:
      ConfigError: as for `make_plan`.
      DataError: the data cannot be read.
    """
    exchange, devices = config.embedding.exchange, shape[1] * shape[2]
    work = functools.cache(lambda: workload(config, source, tables, features, shape))
    plan = (
        balance(tables, features, work(), exchange)
        if config.plan == "balanced"
        else make_plan(config.plan, tables, exchange)
    )
    if exchange.kind != "auto" or is_file(config.plan) or devices == 1 or not may_pool(plan, tables, features):
        return plan
    return choose_kinds(plan, tables, features, work())


def workload(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
) -> Workload:
    """A training step's work on the tables; the arguments are those of `resolve_plan`."""
    replicas, hosts, each = shape
    batch_size, devices = config.train.batch_size, hosts * each
    profile = profile_of(source, tables, features, batch_size, devices * replicas)
    item_bytes = 8 if config.compute_dtype == "float64" else 4
    return Workload(profile, batch_size, devices, hosts, replicas, item_bytes, config.embedding.dedup)
