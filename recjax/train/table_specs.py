"""Tables and lookups of a run: from its config and the schema of its data."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from recjax.config.run import FeatureConfig, RunConfig, TableConfig
from recjax.data.arrow.shared_vocabularies import add_like
from recjax.data.batch import ANY_ID, Feature, Schema
from recjax.data.datasets.own_table import Table
from recjax.data.row_values import describe_difference, row_values
from recjax.data.source import BlockSource
from recjax.embedding.optim import Frozen
from recjax.embedding.plan import Plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.models.layers import LINEAR
from recjax.settings.values import either
from recjax.utils.text import near


def specs(
    config: RunConfig, schema: Schema, mean_ids: Mapping[str, float] = MappingProxyType({})
) -> tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...]]:
    """One lookup for each categorical feature of the data, in their order, and one table unless it shares another's.

    A model with first-order weights has after these a table and lookup `f.linear` of D=1 for each feature f,
    which start at 0 and look up the same ids; its config says what updates them (None: what updates the others).
    Features that share a table share these too. They are always pooled: by sum where the feature itself is not.

    Args:
      config: of the run.
      schema: of its data.
      mean_ids: of the bags of jagged features, as `recjax.data.source` has them of the data.

    Raises:
      ConfigError: settings of a table or feature that does not exist, a table that cannot be shared, or a feature that
        is not pooled although the model takes no sequences.
    """
    embedding = config.embedding
    table_of = _shares(config, schema)
    narrow: Any = {"dtype": embedding.dtype, "rounding": embedding.rounding}
    tables = [
        TableSpec(f.name, _rows(config, f), embedding.dim, embedding.optimizer, embedding.init_scale, **narrow)
        for f in schema.features
        if table_of[f.name] == f.name
    ]
    features = []
    apart = _attended(config, schema)
    met = {name: like for name, like in apart.items() if like in schema.labelled_features}
    for f in schema.features:
        chosen = embedding.features.get(f.name, FeatureConfig()).pooling
        pooling = chosen or ("none" if f.name in apart else embedding.pooling)
        sizes: Any = {"mean_ids": mean_ids.get(f.name), "beside": met.get(f.name, "") if pooling == "none" else ""}
        features.append(FeatureSpec(f.name, table_of[f.name], f.bag, pooling, f.weighted, **sizes))
    unpooled = [f.name for f in features if f.pooling == "none"]
    if unpooled and not getattr(config.model, "sequences", False):
        raise ConfigError(
            f"pooling is none for {', '.join(unpooled)}, but model={config.model.kind} takes one vector for each "
            f"feature. Set embedding.features.{unpooled[0]}.pooling=mean (or sum), or use a model of your own that "
            "takes sequences: see docs/guides/own_model.md."
        )
    if getattr(config.model, "first_order", False):
        optimizer = getattr(config.model, "linear", None) or embedding.optimizer
        tables += [TableSpec(t.name + LINEAR, t.rows, 1, optimizer, init_scale=0, **narrow) for t in tables]
        for spec in tuple(features):
            first = dataclasses.replace(spec, name=spec.name + LINEAR, table=spec.table + LINEAR, source=spec.name)
            features.append(dataclasses.replace(first, pooling="sum") if spec.pooling == "none" else first)
    names = [t.name for t in tables]
    for name, own in embedding.tables.items():
        if name not in names:
            where = f": that feature uses the table of {table_of[name]}" if table_of.get(name, name) != name else ""
            raise ConfigError(
                f"embedding.tables.{name}: there is no table {name!r}{where}. {nearest_names(name, names)}"
            )
        if name.removesuffix(LINEAR) in names[: names.index(name)] and own.dim not in (None, 1):
            raise ConfigError(f"embedding.tables.{name}.dim is {own.dim}; first-order weights are one number a row.")
        if own.ids and name.endswith(LINEAR) and name.removesuffix(LINEAR) in names:
            raise ConfigError(
                f"embedding.tables.{name}.ids: these weights have the rows of the vectors. Set "
                f"embedding.tables.{name.removesuffix(LINEAR)}.ids instead."
            )
    tables = [_with_own(table, embedding.tables) for table in tables]
    ids = {table.name + LINEAR: table.ids for table in tables if table.ids}
    tables = [dataclasses.replace(table, ids=ids.get(table.name, table.ids)) for table in tables]
    return tuple(_with_frozen(config, tables)), tuple(features)


def _with_frozen(config: RunConfig, tables: list[TableSpec]) -> list[TableSpec]:
    """The tables, of which those of `train.freeze` have no rule of updates (ConfigError: there is no such table)."""
    frozen, names = config.train.frozen_tables, [table.name for table in tables]
    frozen = tuple(names) if frozen is None else frozen
    for name in frozen:
        if name not in names:
            raise ConfigError(f"train.freeze=tables:{name}: there is no table {name!r}. {nearest_names(name, names)}")
    for table in tables:
        if table.name in frozen and table.ids:
            raise ConfigError(
                f"train.freeze has the table {table.name!r}, whose ids are dynamic: rows go to other keys in the "
                "course of a training, so they cannot stay as they are. Leave it out, or "
                f"embedding.tables.{table.name}.ids."
            )
    return [dataclasses.replace(table, optimizer=Frozen()) if table.name in frozen else table for table in tables]


def _rows(config: RunConfig, feature: Feature) -> int:
    """Rows of the table that a feature has of its own."""
    ids = config.embedding.tables.get(feature.name, TableConfig()).ids
    if ids is not None:
        return ids.capacity + 1
    if feature.rows == ANY_ID:
        raise ConfigError(
            f"the ids of feature {feature.name!r} are any 64-bit integers, so no table has a row for each. Set "
            f"embedding.tables.{feature.name}.ids=dynamic, and its capacity "
            f"(embedding.tables.{feature.name}.ids.capacity): then keys get rows in the course of the training. Or "
            "prepare the data with a vocabulary."
        )
    return feature.rows


def check_shared_values(config: RunConfig, source: BlockSource) -> None:
    """Refuses features that share a table although its rows would stand for other values in one than in the other.

    Raises:
      ConfigError: naming both, and values that have different rows, or as for `specs`.
      DataError: the vocabularies cannot be read.
    """
    shares = {name: table for name, table in _shares(config, source.schema).items() if name != table}
    values = row_values(source, {*shares, *shares.values()}) if shares else {}
    for name, table in shares.items():
        if what := describe_difference(name, table, values):
            advice = _one_vocabulary(config, source.schema, name, table)
            if values[name].computed and values[table].computed:
                advice = "Prepare the data with values of one type in both, missing in both or in neither."
            raise ConfigError(
                f"embedding.features.{name}.share={table}: to share a table, equal rows must mean the same in both, "
                f"but {what}. {advice}"
            )


def _one_vocabulary(config: RunConfig, schema: Schema, name: str, other: str) -> str:
    """Advice for features that cannot share a table: how data are prepared with one vocabulary for both."""
    advice = "Prepare the data with one vocabulary for both features"
    if not isinstance(config.data, Table):
        return f"{advice}."
    role = "jagged" if schema.feature(name).bag is None else "id"
    columns = ",".join(add_like(config.data.columns, name, role, other))
    return f"{advice}: {shlex.quote(f'data.columns={columns}')}."


def _shares(config: RunConfig, schema: Schema) -> dict[str, str]:
    """Feature name -> name of the feature whose table it uses, mostly its own; ConfigError if that cannot be."""
    settings = config.embedding.features
    names = [f.name for f in schema.features]
    for name in settings:
        if name not in names:
            raise ConfigError(
                f"embedding.features.{name}: the data have no feature {name!r}. {nearest_names(name, names)}"
            )
    like = _attended(config, schema)
    shares = {name: settings.get(name, FeatureConfig()).share or like.get(name) or name for name in names}
    for name, other in shares.items():
        key = f"embedding.features.{name}.share={other}"
        if other not in names:
            raise ConfigError(f"{key}: the data have no feature {other!r}. {nearest_names(other, names)}")
        if shares[other] != other:
            raise ConfigError(f"{key}: {other} itself uses the table of {shares[other]}. Name that one.")
        rows, other_rows = schema.feature(name).rows, schema.feature(other).rows
        if rows != other_rows:
            raise ConfigError(
                f"{key}: {name} has {rows:,} rows and {other} has {other_rows:,}; to share a table, equal ids must "
                f"mean the same in both. {_one_vocabulary(config, schema, name, other)}"
            )
    return shares


def _attended(config: RunConfig, schema: Schema) -> dict[str, str]:
    """Features of groups, and whose table each looks up, "" for its own, where the model looks at their elements.

    They are not pooled unless a setting says so, and one that holds the same as a feature of the row shares its table.
    """
    if not getattr(config.model, "grouped", False):
        return {}
    return {name: like for group in schema.groups for name, like in zip(group.features, group.like, strict=True)}


def _with_own(table: TableSpec, settings: Mapping[str, TableConfig]) -> TableSpec:
    """The table with what is set for it alone; the two classes' fields have equal names."""
    own = settings.get(table.name, TableConfig())
    values = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    return dataclasses.replace(table, **{name: value for name, value in values.items() if value is not None})


def nearest_names(name: str, names: Sequence[str]) -> str:
    """The end of an error message: the names that are most similar, or else the first ones."""
    close = near(name, names)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"Did you mean {either(close)}?" if close else f"There are {', '.join(names[:10])}{more}."


def dims(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> dict[str, int]:
    """D of every lookup, by its name and in their order: what a model is built for."""
    by_table = {t.name: t.dim for t in tables}
    return {f.name: by_table[f.table] for f in features}


def refuse_reduced(config: RunConfig, plan: Plan, tables: Sequence[TableSpec]) -> None:
    """Refuses what would round in a float64 run, which is there to be exact.

    Raises:
      ConfigError: a table, an exchange or averages of less than float32, which stands for float64 there.
    """
    for table in tables:
        if table.dtype != "float32":
            raise ConfigError(
                f"compute_dtype is float64, but table {table.name!r} is to hold {table.dtype}. Leave embedding.dtype "
                "(and embedding.tables.*.dtype) at float32, which stands for float64 in such a run."
            )
    for name, segments in plan.tables.items():
        if any({segment.exchange.forward, segment.exchange.backward} != {"float32"} for segment in segments):
            raise ConfigError(
                f"compute_dtype is float64, but the rows or gradients of table {name!r} are to travel in a reduced "
                "precision. Leave embedding.exchange and the plan's exchange at float32, which sends float64 as it is."
            )
    if config.train.average_precision != "float32":
        raise ConfigError(
            f"compute_dtype is float64, but averages of tables are to travel in {config.train.average_precision}. "
            "Leave train.average_precision at float32, which sends float64 as it is."
        )
