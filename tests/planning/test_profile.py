"""Profiles of data: counted by hand on a few samples, and what the schema says where nothing can be counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.embedding.optim import Sgd
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning import loads
from recjax.planning.loads import FeatureUse, Profile, profile_of

TABLES = (TableSpec("a", 10, 4, Sgd(0.1)), TableSpec("b", 100, 4, Sgd(0.1)))
FEATURES = (
    FeatureSpec("a", "a", None),
    FeatureSpec("b", "b", 2),
    FeatureSpec("a too", "b", None, source="a"),  # looks the ids of a up in the table of b
)


@dataclasses.dataclass
class Source:
    """Blocks of two samples each; reading beyond them fails."""

    blocks: list[Batch]
    name: str = "a test"
    fingerprint: str = ""
    schema: Schema = Schema((), (Feature("a", 10, None), Feature("b", 100, 2)))

    def row_counts(self, split: str) -> np.ndarray:
        assert split == "train"
        return np.array([block.size for block in self.blocks], np.int64)

    def read(self, split: str, index: int) -> Batch:
        assert split == "train"
        return self.blocks[index]


def block(a: list[list[int]], b: list[list[int]]) -> Batch:
    ids = Bags(np.array([id for bag in a for id in bag], np.int32), np.array([len(bag) for bag in a]))
    ones = np.ones(len(a), np.float32)
    return Batch(np.zeros((len(a), 0), np.float32), {"a": ids, "b": Bags(np.array(b, np.int32))}, ones, ones)


def source() -> Source:
    return Source([block([[1, 2, 3], [1]], [[1, 1], [7, 8]]), block([[], [9, 9]], [[7, 9], [0, 0]])])


def uses(found: Profile) -> dict[str, tuple[float, float, int]]:
    return {name: (use.ids, use.distinct, use.bags) for name, use in found.tables.items()}


def test_ids_and_distinct_rows_by_hand() -> None:
    """Four samples a device: all are read. Table b is asked for the ids of b and of a together."""
    found = profile_of(source(), TABLES, FEATURES, batch_size=8, devices=2)
    assert uses(found) == {"a": (6 / 4, 4, 1), "b": (6 / 4 + 2, len({1, 7, 8, 9, 0, 2, 3}), 2)}
    assert found.origin == "the first 4 training samples"


def test_features_of_a_table_by_ids_of_a_bag_and_sequences_first() -> None:
    table = profile_of(source(), TABLES, FEATURES, batch_size=8, devices=2).tables["b"]
    fewest, most = FeatureUse("a too", 6 / 4, len({1, 2, 3, 9})), FeatureUse("b", 2.0, len({7, 8, 0}))
    assert table.features == (fewest, most)
    alone = table.of(["b"])
    assert (alone.ids, alone.distinct, alone.bags, alone.features) == (2.0, 3, 1, (most,))
    assert table.of(["b", "a too"]) is table and table.ids_of("b") == 2.0
    sequence = (*FEATURES[:1], dataclasses.replace(FEATURES[1], pooling="none"), FEATURES[2])
    table = profile_of(source(), TABLES, sequence, batch_size=8, devices=2).tables["b"]
    assert [(f.name, f.new, f.pooled) for f in table.features] == [("b", 5, False), ("a too", 2, True)]
    assert (table.bags, table.of(["a too"]).bags) == (0, 1)


def test_distinct_rows_are_those_of_a_devices_share() -> None:
    """One sample a device: ids are counted in the block that is read, distinct rows in its first sample."""
    found = profile_of(source(), TABLES, FEATURES, batch_size=2, devices=2)
    assert uses(found) == {"a": (4 / 2, 3, 1), "b": (4 / 2 + 2, 3, 2)}


def test_a_share_larger_than_the_data_asks_for_more_in_proportion() -> None:
    found = profile_of(source(), TABLES, FEATURES, batch_size=8, devices=1)
    assert uses(found) == {"a": (6 / 4, 4 * 2, 1), "b": (6 / 4 + 2, 7 * 2, 2)}
    assert profile_of(source(), TABLES, FEATURES, 800, 1).tables["a"].distinct == 10  # its rows


@pytest.mark.parametrize("reason", ["no training samples", "a block of the data has 6 ids"])
def test_the_schema_has_to_do(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Source([]) if reason.startswith("no") else source()
    monkeypatch.setattr(loads, "MOST_IDS", 5)
    found = profile_of(given, TABLES, FEATURES, batch_size=6, devices=2)
    assert reason in found.origin and found.origin.startswith("the schema")
    assert found.tables["a"].ids == 1 and found.tables["b"].ids == 3
    assert found.tables["a"].distinct == pytest.approx(10 * (1 - 0.9**3))
    assert found.tables["b"].distinct == pytest.approx(100 * (1 - 0.99**9))
