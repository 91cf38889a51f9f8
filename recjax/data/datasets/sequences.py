"""Histories from a log of events: a row for each user, or for each event, with what the user did before.

A log has a row an event: a user, an item, a time. `tables` makes of it a table whose column `history` is a list of the
user's events before the row's own one, from the oldest to the newest; all else is that event's. As a table of one's
own it is then prepared, trained on and served (own_table.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from recjax.data.arrow import convert, pieces, roles, row_filter, scan, splits
from recjax.data.arrow.label import Label
from recjax.data.arrow.scan import TableFile
from recjax.data.arrow.splitter import Choices, Splitter
from recjax.data.arrow.spool import folder_beside, spool
from recjax.data.arrow.wording import Wording
from recjax.data.datasets.own_table import Table
from recjax.data.source import SPLITS
from recjax.errors import ConfigError, DataError
from recjax.settings import items
from recjax.settings.values import check_ranges
from recjax.utils.text import did_you_mean

HISTORY, AGE, SPLIT = "history", "age", "split"
_CHUNK_ROWS = 2**14  # of the table that are made at once


@dataclasses.dataclass(frozen=True)
class Sequences(Table):
    """Config of histories from a log of events; what is not named here is as for a table of one's own."""

    kind: ClassVar[str] = "sequences"
    later: ClassVar[tuple[str, ...]] = ()

    max_length: int = 200  # events of a history at most, the newest
    # Columns of an event that the history tells beside its item, with options as in list(...): rating,kind:hash=1000
    history: tuple[str, ...] = ()
    # Buckets of the seconds between an event and the row's own one, which the history tells; 0: it does not
    ages: int = 20
    # event: a row for each event that trains. user: a row for as many as max_length, the events before the last of them
    # being its history. Events that validate or test have a row each. auto: event if there is a label, else user
    rows: Literal["auto", "event", "user"] = "auto"
    # Time, as the log has it, from which on events have rows; those before it are in histories alone. Empty: all have
    since: str = ""

    def __post_init__(self) -> None:
        if self.split.partition(":")[0] not in ("", "last", "time"):
            raise ConfigError(
                f"split={self.split} does not go with sequences, whose rows hold several events. Take split=last:1,1, "
                "the last events of each user, or split=time:0.8,0.1,0.1."
            )
        super().__post_init__()
        check_ranges(self, max_length=(1, 2**20), ages=(0, 10_000))
        if self.ages == 1:
            raise ConfigError("ages is 1: one bucket tells nothing of an age. Give 2 or more, or 0 to leave ages out.")
        if self.apart:
            raise ConfigError(
                f"{self.apart[0]} does not go with sequences: a history goes from events that train to those that "
                "test. Put all events into one log, and split it by time or by the last ones of each user."
            )
        if self.group or self.split_column:
            raise ConfigError(
                "sequences are of users, so user=COLUMN takes the place of group, and split=last:1,1 or "
                "split=time:0.8,0.1,0.1 that of a column. Leave out group and split_column."
            )

    @contextlib.contextmanager
    def tables(self, files: Mapping[str, list[TableFile]], out: Path) -> Iterator[dict[str, list[TableFile]]]:
        """The table of histories, on the disk of `out`.

        Raises:
          ConfigError: user, item or time is not named, or no column.
          DataError: the log cannot be read, or an event has no user, no item or no time.
          TrainingError: the table cannot be written.
        """
        log = _Log.read(self, files["train"])
        with folder_beside(out) as folder:
            made = spool(_Stream(self, log), folder / "histories.arrow", f"the histories of {files['train'][0]}")
            yield {"train": [dataclasses.replace(made, untyped=files["train"][0].form == "csv")]}

    def as_read(self) -> Table:
        """The options by which the table of histories is read."""
        fields = [f"{items.quote(self.item)}:like={items.quote(self.item)}", *self.history]
        fields += [f"{AGE}:bucket={self.ages}"] if self.ages > 1 else []
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(Table)}
        _, asked = roles.parse(self.columns)
        order = () if self.time in asked else (roles.column_text(self.time, "skip"),)
        columns = (*self.columns, *order, f"{HISTORY}:list({','.join(fields)})")
        changed = {"columns": columns, "split": "column", "split_column": SPLIT, "time": "", "where": (), "from_": ""}
        return Table(**options | changed)

    @property
    def split_in_words(self) -> str:
        """The split of the events."""
        return splits.in_words(self._way, self.split_seed, self.time, self.user, "", ())

    @property
    def _way(self) -> splits.Split:
        return splits.parse(self.split or "last:1,1")

    @property
    def _row_each(self) -> bool:
        return self.rows == "event" or (self.rows == "auto" and bool(self.label))


@dataclasses.dataclass(frozen=True)
class _Log:
    """The n events, ordered by user, then by time, then as they came.

    Attributes:
      events: their columns, an Arrow table.
      user_n: int64, a number for each user.
      times_n: float64.
      start_n: int64, place of the first event of each one's user.
      split_n: uint8, index into SPLITS.
      since: time from which on events have rows.
    """

    events: Any
    user_n: np.ndarray
    times_n: np.ndarray
    start_n: np.ndarray
    split_n: np.ndarray
    since: float

    @classmethod
    def read(cls, config: Sequences, files: Sequence[TableFile]) -> _Log:
        import pyarrow as pa

        names = _checked_names(config, scan.schema(files[0]).names)
        splitter = Splitter(
            Choices(Label(config.user), (), config._way, config.split_seed, config.time, config.user, "")
        )
        whole: list[pieces.Piece] = []
        codes: dict[Any, int] = {}
        users, times = [], []
        row = 0
        for piece, _ in pieces.read(files, names, row_filter.parse(config.where)):
            if not piece.rows:
                continue
            arrays = {name: convert.plain(piece.batch[name]) for name in names}
            for name in (config.user, config.item):
                piece.refuse_missing(name, "the event is in no history", Wording.COMMAND)
            splitter.add(arrays, 0, row, piece.where)
            values, at = convert.distinct(arrays[config.user])
            numbers = [codes.setdefault(value, len(codes)) for value in values.to_pylist()]
            users.append(np.array(numbers, np.int64)[at])
            times.append(splitter.times_of(arrays[config.time], piece.where))
            whole.append(piece)
            row += piece.rows
        if not row:
            raise DataError(f"{files[0]} has no events. Give a log with rows.")
        user_n, times_n, split_n = np.concatenate(users), np.concatenate(times), splitter.splits()
        order_n = np.lexsort((np.arange(row), times_n, user_n))
        user_n = user_n[order_n]
        first_n = np.r_[True, user_n[1:] != user_n[:-1]]
        start_n = np.maximum.accumulate(np.where(first_n, np.arange(row), 0))
        events = pa.table(pieces.joined(whole)).take(pa.array(order_n))
        times_n = times_n[order_n]
        since = -np.inf
        if config.since:
            since = float(splitter.times_of(convert.plain(pa.array([config.since])), lambda _: "since")[0])
            if not (times_n >= since).any():
                raise DataError(f"since={config.since}: no event of {files[0]} is as late. Give an earlier time.")
        return cls(events.combine_chunks(), user_n, times_n, start_n, split_n[order_n], since)

    def targets(self, config: Sequences) -> np.ndarray:
        """Places of the events that have a row, in the order of time: int64."""
        place_n = np.arange(len(self.user_n))
        chosen_n = np.ones(len(place_n), bool)
        if not config._row_each:
            train_n = self.split_n == 0
            # The training events of a user from the last one back; those of other splits come after them.
            after_n = np.cumsum(train_n[::-1])[::-1]  # training events from here on, of all users
            end_n = np.r_[np.flatnonzero(self.start_n == place_n)[1:], len(place_n)]
            end_n = end_n[np.cumsum(self.start_n == place_n) - 1]  # where the events of the user end
            back_n = after_n - np.r_[after_n, 0][end_n] - 1  # 0 at the last one that trains
            told_n = (place_n > self.start_n) | (back_n == 0)  # one without a history, only if it is all there is
            chosen_n = ~train_n | ((back_n % config.max_length == 0) & told_n)
        chosen = place_n[chosen_n & (self.times_n >= self.since)]
        return chosen[np.argsort(self.times_n[chosen], kind="stable")]

    def rows(self, config: Sequences, targets: np.ndarray) -> Any:
        """The rows of these events: a record batch."""
        import pyarrow as pa

        first = np.maximum(self.start_n[targets], targets - config.max_length)
        lengths = targets - first
        ends = np.cumsum(lengths)
        at_L = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths - first, lengths)
        names = [config.item, *(items.unquote(items.split(text, ":")[0]) for text in config.history)]
        taken = self.events.select(list(dict.fromkeys(names))).take(pa.array(at_L)).combine_chunks()
        fields = {name: convert.decoded(taken[name]) for name in names}
        if config.ages > 1:
            fields[AGE] = pa.array(np.repeat(self.times_n[targets], lengths) - self.times_n[at_L])
        structs = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
        history = pa.ListArray.from_arrays(pa.array(np.append(0, ends).astype(np.int32)), structs)
        events = self.events.take(pa.array(targets)).combine_chunks()
        columns = {name: convert.decoded(events[name]) for name in events.column_names}
        split = pa.array(np.array(SPLITS)[self.split_n[targets]])
        return pa.record_batch(columns | {HISTORY: history, SPLIT: split})


class _Stream:
    """Hands out the table, as whatever takes Arrow streams asks for it."""

    def __init__(self, config: Sequences, log: _Log) -> None:
        self._config, self._log = config, log

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        targets = self._log.targets(self._config)
        starts = range(0, max(1, len(targets)), _CHUNK_ROWS)
        made = (self._log.rows(self._config, targets[start : start + _CHUNK_ROWS]) for start in starts)
        schema = self._log.rows(self._config, targets[:0]).schema
        return pa.RecordBatchReader.from_batches(schema, made).__arrow_c_stream__(requested_schema)


def _checked_names(config: Sequences, names: Sequence[str]) -> list[str]:
    """The columns of the log that are read (ConfigError: one is not named, not there, or has a name of the table's)."""
    told = [("user", config.user), ("item", config.item), ("time", config.time)]
    told += [("history", items.unquote(items.split(text, ":")[0])) for text in config.history]
    for key, name in told:
        if not name:
            raise ConfigError(
                f"sequences need {key}=COLUMN: user=COLUMN item=COLUMN time=COLUMN say whose event it is, of which "
                f"item, and when. The columns are {', '.join(map(repr, names[:30]))}."
            )
        if name not in names:
            raise ConfigError(
                f"{key}: the log has no column {name!r}.{did_you_mean(name, names, quoted=True)} Its columns are "
                f"{', '.join(map(repr, names[:30]))}."
            )
    if taken := [name for name in (HISTORY, SPLIT) if name in names]:
        raise ConfigError(
            f"the log has a column {taken[0]!r}, which is what a column of the histories is called. Rename it."
        )
    if config.history and AGE in dict(told[3:]).values() and config.ages > 1:
        raise ConfigError(f"history: {AGE!r} is how long ago an event was. Rename that column, or set ages=0.")
    return list(names)
