"""Runs of a model of two sides: which features each side sees, and what its loss must know of a batch's items."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np

from recjax.config.run import RunConfig, TableConfig
from recjax.data import counter_rng
from recjax.data.arrow.roles import AUTO, column_text
from recjax.data.batch import ANY_ID, Bags, Batch, Schema
from recjax.data.datasets.own_table import Table
from recjax.data.source import BlockSource, has_blocks
from recjax.embedding.all_rows import AllRows
from recjax.embedding.layout import BoundPlan
from recjax.embedding.sharding import ReplicatedSharding, RowSharding
from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError
from recjax.models.batch_losses import takes_all_items
from recjax.models.two_tower import DRAWN, Side, Sides
from recjax.train.table_specs import nearest_names
from recjax.utils import log

_DRAWING = 0xD4A3  # purpose of random numbers
_DRAWN_TOGETHER = 256  # samples whose items are drawn together; part of what a seed means


def open_data(config: RunConfig) -> BlockSource:
    """Opens the data of a run.

    A model of two sides takes from a table of one's own the columns that it names. Others that `data.columns=auto`
    would make features of are left out, with a sentence.

    Raises:
      ConfigError: a model of two sides and no column of the user, or one that is not there; or as `open` of the data.
      DataError, TrainingError: likewise.
    """
    data, model = config.data, cast(Any, config.model)
    if not (getattr(model, "two_sided", False) and type(data) is Table and data.from_ and not data.path):
        return data.open()
    columns = data.column_names()
    if not data.user and not data.label:
        raise ConfigError(
            f"model={model.kind} learns from rows that are a user and an item. Name their columns: data.user=COLUMN "
            f"data.item=COLUMN. {data.from_} has {', '.join(columns)}."
        )
    sides = (*model.user, *model.item)
    if data.columns == (AUTO,) and (absent := next((name for name in sides if name not in columns), "")):
        key = "user" if absent in model.user else "item"
        raise ConfigError(f"model.{key}: {data.from_} has no column {absent!r}. {nearest_names(absent, columns)}")
    if data.user in columns and (idle := data.unnamed_columns(sides)):
        log.info(
            f"{', '.join(idle[:5])}{', ...' if len(idle) > 5 else ''} {'is' if len(idle) == 1 else 'are'} left out: "
            f"model={model.kind} takes {data.user} and {data.item}. A column of the user or of the item becomes a "
            f"feature with model.user={data.user},COLUMN or model.item={data.item},COLUMN"
        )
        data = dataclasses.replace(data, columns=(*data.columns, *(column_text(name, "skip") for name in idle)))
    return data.open()


def sides_of(config: RunConfig, schema: Schema) -> Sides:
    """The features that the user's side and the item's see, "user" and "item", of a model of two sides.

    Raises:
      ConfigError: a side has no feature that tells users, or items, apart; a name is no feature, or one of both sides;
        or a feature is of neither.
    """
    model: Any = config.model
    features, dense = {feature.name: feature for feature in schema.features}, list(schema.dense)
    sides: dict[str, Side] = {}
    for name in ("user", "item"):
        first = getattr(config.data, name, "")
        names = getattr(model, name) or ((first,) if first else ())
        if not names:
            raise ConfigError(
                f"model={model.kind} finds items for users, and nothing says which feature is the {name}. Give "
                f"data.{name}=COLUMN for a table of your own, or model.{name}=FEATURE: {', '.join(features)}."
            )
        columns = [*features, *dense]
        if unknown := next((each for each in names if each not in columns), ""):
            raise ConfigError(
                f"model.{name}: the data have no feature {unknown!r}. {nearest_names(unknown, columns)} A column that "
                f"data.columns=auto leaves out becomes one with data.columns=auto,{column_text(unknown, 'id')}."
            )
        if names[0] not in features or features[names[0]].bag != 1:
            raise ConfigError(
                f"model.{name}: the first, {names[0]}, must tell one {name} from another, so it has to be a "
                "categorical feature with one value in each row."
            )
        sides[name] = Side(
            tuple(each for each in names if each in features), tuple(dense.index(n) for n in names if n in dense)
        )
    seen = [*sides["user"].features, *sides["item"].features]
    seen += [dense[place] for side in sides.values() for place in side.dense]
    if twice := [each for each in seen if seen.count(each) > 1]:
        raise ConfigError(f"model.user and model.item both name {twice[0]!r}. It is of the user or of the item.")
    if idle := [each for each in (*features, *dense) if each not in seen]:
        user, item = (sides[name].features[0] for name in ("user", "item"))
        raise ConfigError(
            f"{', '.join(idle[:5])} {'is' if len(idle) == 1 else 'are'} in the data, and of neither side of "
            f"model={model.kind}. Name each in model.user={user},... or model.item={item},...; or prepare the data "
            f"without: data.columns={user}:id,{item}:id (a column of data.time orders rows and is no feature)."
        )
    return sides


def add_drawn(config: RunConfig, schema: Schema, features: tuple[FeatureSpec, ...]) -> tuple[FeatureSpec, ...]:
    """The lookups of a training, with that of items that its loss draws, in the table of its items."""
    model: Any = config.model
    if not model.loss.negatives:
        return features
    name = sides_of(config, schema)["item"].features[0]
    item = next(feature for feature in features if feature.name == name)
    return (*features, FeatureSpec(name + DRAWN, item.table, model.loss.negatives, "none"))


@dataclasses.dataclass(frozen=True)
class ItemKeys:
    """The facts about items that a loss over the batch must know.

    Attributes:
      feature: which tells items apart.
      log_q_V: float64, for each of its rows the logarithm of how often it is a candidate, up to a common constant.
      negatives: items that are drawn with each sample.
      items: those that training knows, which may be drawn, integers [n].
      seed: of the drawing.
    """

    feature: str
    log_q_V: np.ndarray
    negatives: int
    items: np.ndarray
    seed: int

    def of(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays of a batch: "ids_B", int32 rows of the items, and "log_q_B"; "drawn_BxM" and "drawn_log_q_BxM"."""
        ids_B = batch.bags[self.feature].ids[:, 0].astype(np.int32)
        arrays = {"ids_B": ids_B, "log_q_B": self.log_q_V[ids_B]}
        if self.negatives:
            ids_BxM = batch.bags[self.feature + DRAWN].ids.astype(np.int32)
            arrays |= {"drawn_BxM": ids_BxM, "drawn_log_q_BxM": self.log_q_V[ids_BxM]}
        return arrays

    def shapes(self, B: int, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of these arrays on the devices, for B samples."""
        M = self.negatives
        drawn = {"drawn_BxM": ((B, M), np.int32), "drawn_log_q_BxM": ((B, M), dtype)} if M else {}
        return {"ids_B": ((B,), np.int32), "log_q_B": ((B,), dtype), **drawn}

    def with_drawn(self, batch: Batch, trains: bool) -> Batch:
        """The batch with a bag of drawn items for each sample, by the seed and its place in the training alone.

        Predictions need none: theirs are all the same. One that has such a bag keeps it.
        """
        if not self.negatives or self.feature + DRAWN in batch.bags:
            return batch
        ids_BxM = np.zeros((batch.size, self.negatives), np.int64)
        if trains and batch.size:
            first, last = batch.position // _DRAWN_TOGETHER, (batch.position + batch.size - 1) // _DRAWN_TOGETHER
            count = _DRAWN_TOGETHER * self.negatives
            words = [counter_rng.uniform(count, self.seed, _DRAWING, place) for place in range(first, last + 1)]
            start = batch.position - first * _DRAWN_TOGETHER
            numbers = np.concatenate(words).reshape(-1, self.negatives)[start : start + batch.size]
            ids_BxM = self.items[(numbers * len(self.items)).astype(np.int64)]
        return batch.with_bags({**batch.bags, self.feature + DRAWN: Bags(ids_BxM)})


def item_keys(config: RunConfig, source: BlockSource) -> ItemKeys:
    """The keys of the items of a run of a model of two sides."""
    model: Any = config.model
    feature, loss = sides_of(config, source.schema)["item"].features[0], model.loss
    rows = source.schema.feature(feature).rows
    counts_V = count_items(source, feature) if has_blocks(source) else np.ones(rows, np.int64)
    items = np.flatnonzero(counts_V)
    # One that training does not know counts as seen once: it may stand in a batch that is evaluated
    often_V = loss.in_batch * np.maximum(counts_V, 1) / max(1, counts_V.sum()) + loss.negatives / max(1, len(items))
    often_V = often_V + takes_all_items(loss)  # each is a candidate once
    return ItemKeys(feature, np.log(often_V), loss.negatives, items, config.seed)


def count_items(source: BlockSource, feature: str) -> np.ndarray:
    """The number of training pairs of each item, int64 [V]: of rows with label 1 and a weight."""
    counts_V = np.zeros(source.schema.feature(feature).rows, np.int64)
    for index in range(len(source.row_counts("train"))):
        block = source.read("train", index)
        np.add.at(counts_V, block.bags[feature].ids[is_pair(block), 0], 1)
    return counts_V


def all_item_rows(config: RunConfig, keys: ItemKeys, bound: BoundPlan) -> AllRows | None:
    """The rows of all items that training knows, for a loss over all of them; None for another loss."""
    if not takes_all_items(cast(Any, config.model).loss):
        return None
    absent = np.setdiff1d(np.arange(len(keys.log_q_V)), keys.items)
    return AllRows(bound, _table(bound, keys.feature), tuple(absent.tolist()))


def _table(bound: BoundPlan, feature: str) -> str:
    return next(spec.table for spec in bound.features if spec.name == feature)


def is_pair(batch: Batch) -> np.ndarray:
    """Returns which rows are pairs of a user and an item that belong together: label 1, and a weight; bool [B]."""
    return (batch.labels > 0) & (batch.weights > 0)


def refuse_what_does_not_go(config: RunConfig, schema: Schema) -> None:
    """Refuses settings that a loss over the batch has no meaning with (ConfigError)."""
    kind = config.model.kind
    if config.train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={config.train.accumulate} works on a batch in parts, but model={kind} tells each pair "
            "apart from the items of the whole batch. Set train.accumulate=1; blocks bound its memory anyway."
        )
    if config.mesh.replicas > 1 and config.train.replica_sync != "exact":
        raise ConfigError(
            f"train.replica_sync={config.train.replica_sync} gives each replica group tables of its own, but "
            f"model={kind} scores users of one group against items of all. Set train.replica_sync=exact."
        )
    loss, sides = cast(Any, config.model).loss, sides_of(config, schema)
    item = sides["item"].features[0]
    if config.embedding.tables.get(item, TableConfig()).ids or schema.feature(item).rows == ANY_ID:
        raise ConfigError(
            f"embedding.tables.{item}.ids=dynamic gives rows to items in the course of the training, and model={kind} "
            "must know all of them to count and to rank them. Prepare the data with a vocabulary for the item."
        )
    if (loss.negatives or takes_all_items(loss)) and (len(sides["item"].features) > 1 or sides["item"].dense):
        further = [*sides["item"].features[1:], *(schema.dense[place] for place in sides["item"].dense)]
        what = f"loss.negatives={loss.negatives} draws items" if loss.negatives else f"loss={loss.kind} takes all items"
        raise ConfigError(
            f"model.{what} by their number, and model.item has {further[0]}, which is not known of an item beside the "
            "pairs of the batch. Take candidates from the batch alone: model.loss=softmax, or model.loss.negatives=0 "
            "of another loss; or leave further features of the item out."
        )
    if schema.labels or config.tasks:
        raise ConfigError(
            f"model={kind} learns from rows whose one label is 1, and here are tasks: "
            f"{', '.join(label.name for label in schema.labels) or ', '.join(config.tasks)}. Name one binary label."
        )


def refuse_places(config: RunConfig, schema: Schema, bound: BoundPlan) -> None:
    """Refuses places of the items' rows that a loss over all items cannot read them from (ConfigError)."""
    loss = cast(Any, config.model).loss
    if not takes_all_items(loss):
        return
    table = _table(bound, sides_of(config, schema)["item"].features[0])
    places = bound.segments(table)
    group, segment = places[0]
    if len(places) > 1:
        what = f"the plan cuts {table} into {len(places)} parts"
    elif type(group.sharding) not in (RowSharding, ReplicatedSharding):
        what = f"{table} is placed {segment.placement}"
    elif group.cached:
        what = f"the host has a part of the rows of {table} (tier.device_bytes)"
    elif any(group in exchange.groups for exchange in bound.pooled):
        what = f"rows of {table} are pooled where they are (plan.pooled)"
    elif group.spread and group.synchronous:
        what = f"mesh.replicas={group.replicas} has the rows of {table} once in each group"
    else:
        return
    raise ConfigError(
        f"model.loss={loss.kind} reads all rows of the items where they are, whole and each on one device, but {what}. "
        "Set plan=row_wise or plan=data_parallel, all rows on devices (tier.device_bytes=0) and mesh.replicas=1; or "
        "draw items: model.loss=softmax model.loss.in_batch=false model.loss.negatives=8."
    )
