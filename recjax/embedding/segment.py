"""Segments of a plan, the parts of a table that live somewhere, and the check that those of a table make it up.

The rule: the row selectors of a table's segments, each counted once, partition its rows; and the column ranges of the
segments of one selector partition its columns 0..D. So whole tables, hot rows, tables split by rows, by columns and by
both are plans. A partition into rectangles of another kind is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NoReturn, get_args

import numpy as np

from recjax.embedding.quantize import Precision
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges
from recjax.utils.text import first_repeated

Placement = Literal[
    "row_wise", "table_wise", "column_wise", "data_parallel", "data_parallel_sparse", "table_row_wise", "grid"
]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
HOT, HOT_PER_HOST = "hot", "hot_per_host"  # of segments alone: see `Segment.placement`
HOT_PLACEMENTS = (HOT, HOT_PER_HOST)
PRECISIONS: tuple[str, ...] = get_args(Precision)
ExchangeKind = Literal["auto", "rows", "pooled"]
KINDS = ("rows", "pooled")  # those of a plan file
MOST_PIECES = 8  # of an exchange: the shortest list has as many rows (`routing/capacity.py`)
# Placements with a copy of each row on each device, or on each host
COPIED = ("data_parallel", "data_parallel_sparse", *HOT_PLACEMENTS)
OWNED = {"table_wise": "device", "table_row_wise": "host"}  # placements on one device or host, which a plan may name
LISTED = ("row_wise", "column_wise")  # placements that are spread over devices which a plan may list


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Precision in which rows and their gradients travel between devices: see `recjax/embedding/quantize.py`.

    float32 is exact: values travel as they are held. On one device, and with replicated (data_parallel) tables, no
    rows travel, and everything is exact. Otherwise a reduced precision changes numbers: forward the rows, alike on any
    number of devices (int8 up to the last bit; columns in float16, int8 or float8 are encoded piece by piece, with
    their padding); backward the sums of gradients, which then depend on how the samples lie on the devices.
    """

    forward: Precision = "float32"  # precision of rows: float32, bfloat16, float16, int8, float8_e4m3 or float8_e5m2
    # Precision of their gradients, which are summed over a device's samples before they travel
    backward: Precision = "float32"
    kind: ExchangeKind = "rows"  # values that travel: distinct rows; pooled vectors, one a bag; auto: whichever is less
    # Number of pieces in which fetched rows are gathered and sent, 1 to 8; changes no number, and is in no plan file
    pieces: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, pieces=(1, MOST_PIECES))

    @property
    def of_segment(self) -> Exchange:
        """The exchange of a segment: of rows where `kind` is left open, and without `pieces`, which are the run's."""
        return Exchange(self.forward, self.backward, "rows" if self.kind == "auto" else self.kind)

    def to_json(self) -> dict[str, str]:
        """Returns what a plan file says of it."""
        return {"forward": self.forward, "backward": self.backward, "kind": self.kind}


EXACT = Exchange()


@dataclasses.dataclass(frozen=True)
class RowIds:
    """A set of a table's rows."""

    ids: tuple[int, ...]  # sorted, distinct
    file: str = ""  # the file in which the plan keeps them, relative to the plan file; "": in the plan itself
    sha256: str = ""  # of that file's bytes


@dataclasses.dataclass(frozen=True)
class Segment:
    """One part of a table, some rows x some columns, and where it lives."""

    # row_wise: rows spread over all devices; table_wise: all on one device; column_wise: columns spread over all
    # devices; data_parallel: a copy on each device; data_parallel_sparse: the same, whose gradients travel as lists of
    # the touched rows (`exchange/touched_rows.py`); table_row_wise: rows spread over the devices of one host; grid:
    # columns spread over hosts, and rows over the devices of each. The names are TorchRec's. hot: a copy on each device
    # and a part of the optimizer's slots, whole rows; those that the others of its table have as the rest can change
    # places with them. hot_per_host: the same with a copy on each host, divided over its devices.
    placement: str
    rows: Literal["all", "rest"] | RowIds = "all"  # rest: the rows that no other segment's set names
    columns: Literal["all"] | tuple[int, int] = "all"  # the first, and the one after the last
    # what holds it: of table_wise the number of the device, of table_row_wise that of the host; of row_wise and
    # column_wise the distinct devices over which its rows or columns are spread, in this order. "all" leaves the choice
    # among all to `bind`, or spreads over all
    owners: Literal["all"] | int | tuple[int, ...] = "all"
    tier: str = "device"  # memory that holds it
    exchange: Exchange = EXACT  # what travels, and its precision; exact for data_parallel, which exchanges no rows
    rows_of: tuple[str, ...] = ()  # features whose rows travel although the exchange is one of pooled vectors
    why: str = ""  # the reason, for people

    def column_range(self, dim: int) -> tuple[int, int]:
        """Its columns of a table of `dim`: the first, and the one after the last."""
        return (0, dim) if self.columns == "all" else self.columns


_SHOWN = 3  # ids that a message names

Selector = str | tuple[int, ...]


def check_segments(segments: Sequence[Segment], table: TableSpec, place: str) -> None:
    """Refuses segments that leave out something of a table, or hold something twice.

    Args:
      segments: all of the table's.
      table: what they must partition.
      place: names plan and table, for messages.

    Raises:
      ConfigError: one paragraph that says which rows or columns of which segments, counted from 1.
    """
    numbers: dict[Selector, list[int]] = {}  # of the segments of each selector
    for number, segment in enumerate(segments, 1):
        selector: Selector = segment.rows if isinstance(segment.rows, str) else segment.rows.ids
        numbers.setdefault(selector, []).append(number)
        if isinstance(segment.owners, tuple) and (twice := first_repeated(segment.owners)) is not None:
            _refuse(place, f"segment {number} lists device {twice} twice among its owners", "Leave one of them out")
    _check_rows(numbers, table.rows, place)
    for number, segment in enumerate(segments, 1):
        if segment.placement in ("hot", "hot_per_host") and segment.columns != "all":
            _refuse(place, f"segment {number} is hot and has some columns", 'Hot rows are whole: leave "columns" out')
    if {"hot", "hot_per_host"} <= {segment.placement for segment in segments}:
        _refuse(place, "its hot rows are copied to every device (hot) and to every host (hot_per_host)", "Choose one")
    for selector, members in numbers.items():
        columns = {number: segments[number - 1].column_range(table.dim) for number in members}
        _check_columns(columns, table.dim, place, _in_words(selector))


def _refuse(place: str, what: str, mend: str) -> NoReturn:
    raise ConfigError(f"{place}: {what}. {mend}.")


def _in_words(selector: Selector) -> str:
    """Describes what a selector selects."""
    if isinstance(selector, str):
        return "all rows" if selector == "all" else "the rest of the rows"
    return _ids(selector)


def _ids(ids: Sequence[int]) -> str:
    """Some ids, the first few by name."""
    named = ", ".join(str(id) for id in ids[:_SHOWN])
    more = f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else ""
    return f"{'ids' if len(ids) > 1 else 'id'} {named}{more}"


def _segments(numbers: Sequence[int]) -> str:
    return f"segment{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"


def _check_rows(numbers: dict[Selector, list[int]], rows: int, place: str) -> None:
    """Checks that the selectors partition the rows."""
    if not numbers:
        _refuse(place, "there is no segment, so all its rows are in none", 'Add one with "rows": "all"')
    if "all" in numbers and len(numbers) > 1:
        other = next(selector for selector in numbers if selector != "all")
        _refuse(
            place,
            f"{_segments(numbers['all'][:1])} selects all rows, and {_segments(numbers[other][:1])} selects "
            f"{_in_words(other)} once more",
            'Write "rest" in place of "all"',
        )
    for selector in (selector for selector in numbers if not isinstance(selector, str)):
        if not selector:
            _refuse(place, f"the set of rows of {_segments(numbers[selector][:1])} is empty", "Leave that segment out")
        if beyond := [id for id in selector if not 0 <= id < rows]:
            _refuse(
                place,
                f"{_segments(numbers[selector][:1])} selects {_ids(beyond)}, but the table has the ids 0 to {rows - 1}",
                "Leave out what is beyond",
            )
    sets = {selector: np.array(selector, np.int64) for selector in numbers if not isinstance(selector, str)}
    named, counts = np.unique(np.concatenate([np.empty(0, np.int64), *sets.values()]), return_counts=True)
    if len(twice := named[counts > 1].tolist()):
        both = [numbers[selector][0] for selector, ids_K in sets.items() if twice[0] in ids_K][:2]
        verb = "are" if len(twice) > 1 else "is"
        _refuse(
            place,
            f"{_ids(twice)} {verb} in more than one set of rows: id {twice[0]} in those of {_segments(both)}",
            "A row belongs to one set; segments that share the columns of the same rows repeat the whole set",
        )
    if len(named) == rows and "rest" in numbers:
        _refuse(
            place,
            f'{_segments(numbers["rest"][:1])} selects "rest", but the sets of the others name all {rows:,} rows',
            "Leave that segment out",
        )
    if len(named) < rows and not {"all", "rest"} & numbers.keys():
        missing = np.setdiff1d(np.arange(min(rows, len(named) + _SHOWN)), named)[:_SHOWN]
        there_are = rows - len(named)
        _refuse(
            place,
            f"{there_are:,} of its {rows:,} rows {'are' if there_are > 1 else 'is'} in no segment, such as "
            f"{_ids(missing.tolist())}",
            'Add a segment with "rows": "rest"',
        )


def _check_columns(columns: dict[int, tuple[int, int]], dim: int, place: str, which: str) -> None:
    """Checks that the ranges of the segments that hold one selector's rows partition the columns."""
    for number, (first, last) in columns.items():
        if not 0 <= first < last <= dim:
            what = "hold nothing" if first >= last else f"go beyond the {dim} columns of the table"
            _refuse(
                place,
                f"columns [{first}, {last}) of segment {number} {what}",
                f"Give a first column and the one after the last, within 0 and {dim}",
            )
    reached, before = 0, 0  # columns covered so far, and the segment that reaches them
    for number, (first, last) in sorted(columns.items(), key=lambda item: item[1]):
        if first > reached:
            _refuse(place, f"columns [{reached}, {first}) of {which} are in no segment", "Widen one, or add one")
        if first < reached:
            _refuse(
                place,
                f"columns [{first}, {min(reached, last)}) of {which} are in {_segments(sorted((before, number)))}",
                "Give each its own columns, or each its own rows",
            )
        reached, before = last, number
    if reached < dim:
        _refuse(place, f"columns [{reached}, {dim}) of {which} are in no segment", "Widen one, or add one")
