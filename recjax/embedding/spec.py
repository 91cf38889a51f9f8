"""Descriptions of tables and features, before anything is placed on a device."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, get_args

from recjax.embedding.optim import EVERY_ROW_VALUES, Frozen, SparseOptimizer
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges
from recjax.utils.text import first_repeated

Pooling = Literal["sum", "mean", "none"]
TableDtype = Literal["float32", "bfloat16"]
Rounding = Literal["stochastic", "nearest"]
MAX_ROWS = 2**31 - 1  # row coordinates are int32 on the device


@dataclasses.dataclass(frozen=True)
class DynamicIds:
    """Any 64-bit integers as ids, which get rows as a training goes on: see `recjax.embedding.dynamic.id_map`."""

    kind: ClassVar[str] = "dynamic"

    capacity: int = 1_000_000  # keys that have a row at a time; all others share one more
    admit_after: int = 1  # times that a key must have been seen before it gets a row, the present one included
    # Key that loses its row to a new one: the least recently or the least often seen
    evict: Literal["age", "frequency"] = "age"
    waiting: int = 0  # largest number of keys without a row whose times are counted; 0: as many as capacity

    def __post_init__(self) -> None:
        check_ranges(self, capacity=(1, MAX_ROWS - 1), admit_after=(1, 2**31 - 1), waiting=(0, MAX_ROWS))


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """One embedding table [V, D].

    Attributes:
      name: unique among the tables.
      rows: V, 1 to 2^31 - 1.
      dim: D, columns.
      optimizer: how touched rows are updated, or all rows if its `every_row` says so.
      init_scale: initial values are uniform in (-init_scale, init_scale); None means sqrt(1 / V),
        as facebookresearch/dlrm has it.
      placement: where it must live; None leaves that to the plan.
      dtype: of its values; float32 stands for the precision of the run, float64 in float64 runs. Slots always have
        that.
      rounding: of updated bfloat16 values; see `quantize.py`.
      ids: None if ids are the numbers of rows; else V is its capacity and one row more, that of all other ids.
    """

    name: str
    rows: int
    dim: int
    optimizer: SparseOptimizer | Frozen
    init_scale: float | None = None
    placement: str | None = None
    dtype: TableDtype = "float32"
    rounding: Rounding = "stochastic"
    ids: DynamicIds | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ConfigError(f"table {self.name!r} has {self.rows} rows; a table has 1 to {MAX_ROWS}.")
        if self.dim < 1:
            raise ConfigError(f"table {self.name!r} has {self.dim} columns; it needs at least 1.")
        if self.optimizer.every_row and self.rows * self.dim > EVERY_ROW_VALUES:
            raise ConfigError(
                f"table {self.name!r} has {self.rows:,} rows of {self.dim} columns, and every_row is true: "
                f"each step would pass over {self.rows * self.dim:,} values, but {EVERY_ROW_VALUES:,} are the limit. "
                "Set every_row=false, which updates the touched rows only."
            )
        if self.init_scale is not None and not 0 <= self.init_scale < math.inf:
            raise ConfigError(
                f"table {self.name!r} has init_scale {self.init_scale}; it must be finite and not negative."
            )

    @property
    def scale(self) -> float:
        """Half the width of the uniform distribution of the initial values."""
        rows = self.ids.capacity if self.ids else self.rows
        return rows**-0.5 if self.init_scale is None else self.init_scale


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """One categorical feature that looks rows up in a table. Several features may share a table.

    Attributes:
      name: unique among the features.
      table: name of the table.
      bag: ids per sample H if fixed, None if jagged.
      pooling: "sum" adds the weighted rows of a bag; "mean" divides that sum by the number of ids in
        the bag, as FBGEMM does (weights scale rows, they do not enter the divisor). An empty bag
        pools to zeros. "none" keeps the rows of a bag apart, for models that look at sequences.
      weighted: whether ids carry weights.
      source: the data feature whose ids it looks up; empty means the one of its own name. So one data
        feature may be looked up in several tables.
      mean_ids: ids of a jagged bag, the mean, if the data say (`recjax.data.source`). Costs, thresholds and places
        follow it, no number that a training gives does.
      beside: of a jagged feature that is not pooled: the data feature, jagged as well, each of whose elements meets all
        of this one's of the same sample, as an item that is offered meets a history; "": there is none.
    """

    name: str
    table: str
    bag: int | None = 1
    pooling: Pooling = "sum"
    weighted: bool = False
    source: str = ""
    mean_ids: float | None = None
    beside: str = ""

    def __post_init__(self) -> None:
        if self.bag is not None and self.bag < 1:
            raise ConfigError(
                f"feature {self.name!r} has bag {self.bag}; give 1 or more ids, or None if bags are jagged."
            )
        if self.pooling not in get_args(Pooling):
            raise ConfigError(
                f"feature {self.name!r} has pooling {self.pooling!r}; choose one of {', '.join(get_args(Pooling))}."
            )

    @property
    def reads(self) -> str:
        """Name of the data feature whose ids it looks up."""
        return self.source or self.name

    @property
    def ids(self) -> float:
        """Ids of a sample: H of a fixed bag, the mean of jagged ones, and 1 where that is not known."""
        return self.bag or self.mean_ids or 1


def ids_per_sample(features: Iterable[FeatureSpec]) -> float:
    """Ids of a sample that is read, each data feature once, however many lookups have its ids."""
    return sum(f.ids for f in {f.reads: f for f in features}.values())


def by_table(features: Iterable[FeatureSpec]) -> Mapping[str, list[FeatureSpec]]:
    """The features that look each table up, in their order; none of a table that nobody looks up."""
    looking: dict[str, list[FeatureSpec]] = collections.defaultdict(list)
    for feature in features:
        looking[feature.table].append(feature)
    return looking


def check_specs(tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...]) -> None:
    """Refuses duplicate names, features without a table, and tables without a feature.

    Raises:
      ConfigError: naming the offender.
    """
    for kind, names in (("table", [t.name for t in tables]), ("feature", [f.name for f in features])):
        if (twice := first_repeated(names)) is not None:
            raise ConfigError(f"{kind} name {twice!r} is used twice; every {kind} needs a name of its own.")
    known = {t.name for t in tables}
    for feature in features:
        if feature.table not in known:
            raise ConfigError(
                f"feature {feature.name!r} looks up table {feature.table!r}, which does not exist; the tables are "
                f"{', '.join(sorted(known))}."
            )
    looking = by_table(features)
    for table in tables:
        if table.name not in looking:
            raise ConfigError(f"no feature looks up table {table.name!r}; give it a feature, or leave it out.")
