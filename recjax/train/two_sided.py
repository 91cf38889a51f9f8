"""Runs of a model of two sides: which features each side sees, and what its loss must know of a batch's items."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from recjax.config.run import RunConfig
from recjax.data.batch import Batch, Schema
from recjax.data.source import BlockSource, has_blocks
from recjax.errors import ConfigError
from recjax.models.two_tower import Side, Sides
from recjax.train.table_specs import nearest_names


def is_two_sided(config: RunConfig) -> bool:
    """Returns whether the model has a vector for the user and one for the item, and learns from pairs alone."""
    return bool(getattr(config.model, "two_sided", False))


def sides_of(config: RunConfig, schema: Schema) -> Sides:
    """What the user's side and the item's see, "user" and "item", of a model of two sides.

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
            raise ConfigError(f"model.{name}: the data have no feature {unknown!r}. {nearest_names(unknown, columns)}")
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


@dataclasses.dataclass(frozen=True)
class ItemKeys:
    """What a loss over the batch must know of each sample's item.

    Attributes:
      feature: which tells items apart.
      log_q_V: float64, for each of its rows the logarithm of its share of the training pairs; None: nobody asks.
    """

    feature: str
    log_q_V: np.ndarray | None

    def of(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays of a batch: "ids_B", int32 rows of the items; "log_q_B", their logarithms, or zeros."""
        ids_B = batch.bags[self.feature].ids[:, 0]
        log_q_B = np.zeros(len(ids_B)) if self.log_q_V is None else self.log_q_V[ids_B]
        return {"ids_B": ids_B.astype(np.int32), "log_q_B": log_q_B}


def item_keys(config: RunConfig, source: BlockSource) -> ItemKeys | None:
    """The keys of a run's items; None for a model that is not of two sides."""
    if not is_two_sided(config):
        return None
    feature = sides_of(config, source.schema)["item"].features[0]
    model: Any = config.model
    if not getattr(model.loss, "log_q", True) or not has_blocks(source):
        return ItemKeys(feature, None)
    counts_V = count_items(source, feature)
    shares_V = np.maximum(counts_V, 1) / max(1, counts_V.sum())
    return ItemKeys(feature, np.log(shares_V))


def count_items(source: BlockSource, feature: str) -> np.ndarray:
    """The number of training pairs of each item, int64 [V]: of rows with label 1 and a weight."""
    counts_V = np.zeros(source.schema.feature(feature).rows, np.int64)
    for index in range(len(source.row_counts("train"))):
        block = source.read("train", index)
        np.add.at(counts_V, block.bags[feature].ids[is_pair(block), 0], 1)
    return counts_V


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
    if schema.labels or config.tasks:
        raise ConfigError(
            f"model={kind} learns from rows whose one label is 1, and here are tasks: "
            f"{', '.join(label.name for label in schema.labels) or ', '.join(config.tasks)}. Name one binary label."
        )
