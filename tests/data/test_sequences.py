"""Histories from a log of events, against a few lines of plain Python; and what a log must have."""

import collections
import dataclasses

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tables
from support.commands import inside

from recjax.data.datasets.own_table import prepare_files
from recjax.data.datasets.sequences import Sequences
from recjax.data.prepare.encoder import open_encoder
from recjax.data.source import SPLITS
from recjax.errors import ConfigError, DataError

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6), st.integers(0, 1)), min_size=8)
LOG = Sequences(user="u", item="i", time="t", columns=("i:id",), max_length=2)


def splits_of(events, last):
    """Which split each event is of: the last `last` of a user test, those before validate; short users train whole."""
    of_user = collections.defaultdict(list)
    for n in sorted(range(len(events)), key=lambda n: (events[n][2], n)):
        of_user[events[n][0]].append(n)
    split = {}
    for mine in of_user.values():
        for back, n in enumerate(reversed(mine)):
            split[n] = "train" if len(mine) <= 2 * last or back >= 2 * last else "test" if back < last else "validation"
    return of_user, split


def rows_of(events, config):
    """Split -> how often each (user, item, history of items from the oldest) is a row; unseen values are None."""
    of_user, split = splits_of(events, 1)
    rows = {"train": [], "validation": [], "test": []}
    for mine in of_user.values():
        train = [n for n in mine if split[n] == "train"]
        for place, n in enumerate(mine):
            back = len(train) - 1 - place
            window = back % config.max_length == 0 and (place > 0 or len(train) == 1)
            if config.rows == "event" or split[n] != "train" or window:
                history = [events[m][1] for m in mine[max(0, place - config.max_length) : place]]
                rows[split[n]].append((events[n][0], events[n][1], history))
    users = {user for user, *_ in rows["train"]}
    known = {item for _, target, history in rows["train"] for item in (target, *history)}
    seen = {
        split: [
            (u if u in users else None, i if i in known else None, [h if h in known else None for h in history])
            for u, i, history in found
        ]
        for split, found in rows.items()
    }
    return {name: collections.Counter(map(repr, found)) for name, found in seen.items()}


def write(events, folder):
    return tables.write(
        pa.table({name: [event[k] for event in events] for k, name in enumerate("uity")}), folder / "log.parquet"
    )


def decoded(source):
    """Reads prepared data: split -> rows in the form of `rows_of`."""
    encoder = open_encoder(source.path)
    values = {}
    for feature, map_ in zip(encoder.features, encoder.maps, strict=True):
        values[feature.name] = [None, *map_.vocabulary.values.tolist()]  # row 0: not seen in training
        assert len(values[feature.name]) == map_.table_rows
    rows = {}
    for split in SPLITS:
        rows[split] = collections.Counter()
        for index in range(len(source.row_counts(split))):
            block = source.read(split, index)
            bags = {name: bag.ids.ravel().tolist() for name, bag in block.bags.items()}
            at = 0
            for row, n in enumerate(block.bags["history.i"].lengths.tolist()):
                history = [values["history.i"][id] for id in bags["history.i"][at : at + n]]
                at += n
                rows[split][repr((values["u"][bags["u"][row]], values["i"][bags["i"][row]], history))] += 1
    return rows


@settings(max_examples=12, deadline=None)
@given(EVENTS, st.sampled_from(["event", "user"]), st.integers(1, 3))
def test_rows_are_those_of_plain_python(tmp_path_factory, events, rows, most):
    folder = tmp_path_factory.mktemp("log")
    config = dataclasses.replace(LOG, rows=rows, max_length=most, split="last:1,1")
    source = prepare_files(config, write(events, folder), folder / "out")
    assert decoded(source) == rows_of(events, config)
    assert source.schema.groups[0].features[0] == "history.i"


def test_by_hand(tmp_path):
    """Two users; equal times stand in the order of the file; ages go into buckets; an item comes twice."""
    events = [(7, 1, 30, 0), (7, 2, 10, 1), (9, 1, 20, 1), (7, 2, 30, 0), (7, 3, 40, 1)]
    config = dataclasses.replace(LOG, label="y", split="time:0.8,0,0.2", history=("y",), ages=2, columns=("i:id",))
    source = prepare_files(config, write(events, tmp_path), tmp_path / "out")
    (train,), (test,) = ([source.read(split, 0)] for split in ("train", "test"))
    # By time: (7, 2) at 10, (9, 1) at 20, both (7, ...) at 30, then (7, 3) at 40
    assert train.bags["history.i"].lengths.tolist() == [0, 0, 1, 2]
    assert train.labels.tolist() == [1, 1, 0, 0] and test.labels.tolist() == [1]
    assert train.bags["history.y"].ids.tolist() == [1, 1, 2]  # row 1 is of the more frequent value, 1
    assert len(set(train.bags["history.age"].ids.tolist())) == 2  # 20 s, 20 s, and 0 s
    assert test.bags["history.i"].lengths.tolist() == [2]
    assert "the latest last" in source.about["splits"]


def test_csv_reads_as_parquet_does(tmp_path):
    """Numbers are numbers there too, though CSV is text."""
    events = [(n % 3, n % 4, n, n % 2) for n in range(20)]
    whole = prepare_files(LOG, write(events, tmp_path), tmp_path / "whole")
    (tmp_path / "log.csv").write_text("u,i,t,y\n" + "".join(f"{u},{i},{t},{y}\n" for u, i, t, y in events))
    assert prepare_files(LOG, tmp_path / "log.csv", tmp_path / "csv").fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"item": "", "user": ""}, ConfigError, r"sequences need user=COLUMN: user=COLUMN item=COLUMN time=COLUMN"),
        ({"time": ""}, ConfigError, r"sequences need time=COLUMN"),
        ({"time": "when"}, ConfigError, r"time: the log has no column 'when'. Its columns are 'u', 'i', 't', 'y'"),
        ({"history": ("z",)}, ConfigError, r"history: the log has no column 'z'"),
        ({"history": ("y:zone=UTC",)}, ConfigError, r"has no option 'zone=UTC'"),
    ],
)
def test_mistakes_in_options(tmp_path, change, error, words):
    path = write([(1, 1, 1, 0), (1, 2, 2, 1)], tmp_path)
    with pytest.raises(error, match=words):
        prepare_files(dataclasses.replace(LOG, **change), path, tmp_path / "out")


def test_mistakes_in_settings():
    with pytest.raises(ConfigError, match="test does not go with sequences"):
        dataclasses.replace(LOG, test="other.parquet")
    with pytest.raises(ConfigError, match="user=COLUMN takes the place of group"):
        dataclasses.replace(LOG, group="u")
    with pytest.raises(ConfigError, match="split=random:0.8,0.1,0.1 does not go with sequences, whose rows hold"):
        dataclasses.replace(LOG, split="random:0.8,0.1,0.1")
    with pytest.raises(ConfigError, match="ages is 1: one bucket tells nothing"):
        dataclasses.replace(LOG, ages=1)
    with pytest.raises(ConfigError, match="max_length"):
        dataclasses.replace(LOG, max_length=0)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([(1, 1, 1, 0), (None, 2, 2, 1)], r"log.parquet row 2: column 'u' has no value, so the event is in no history"),
        ([(1, 1, 1, 0), (1, None, 2, 1)], r"log.parquet row 2: column 'i' has no value.* 'where=i!='"),
        ([(1, 1, None, 0), (1, 2, 2, 1)], r"log.parquet row 1: column 't' is null, not a number or a time"),
    ],
)
def test_mistakes_in_events(tmp_path, events, words):
    with pytest.raises(DataError, match=words):
        prepare_files(LOG, write(events, tmp_path), tmp_path / "out")


@pytest.mark.full
def test_from_the_command_line(tmp_path):
    write([(n % 3, n % 4, n, n % 2) for n in range(60)], tmp_path)
    out, log = tmp_path / "out", tmp_path / "log.parquet"
    options = ("user=u", "item=i", "time=t", "label=y", "max_length=5")
    assert inside("data", "prepare", "sequences", "--from", log, "--out", out, *options, "--json").status == 0
    shown = inside("data", "info", out)
    assert shown.status == 0 and "rows of each u that are the last by t" in shown.out
