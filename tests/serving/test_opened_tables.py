"""Rows of tables by original id, and their neighbours, against plain NumPy on tables made here."""

import ml_dtypes
import numpy as np
import pytest

from recjax.data.original_ids import OriginalIds
from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.ids import ComputedMap, Frequency, VocabularyMap
from recjax.data.prepare.vocabulary import Vocabulary
from recjax.embedding.row_order import RowOrder
from recjax.errors import ConfigError, NoSuchName, TrainingError
from recjax.serving import opened_tables
from recjax.serving.opened_tables import Table, Tables
from recjax.train.checkpoint.manifest import CorruptCheckpointError
from recjax.utils.lazy_arrays import LazyArray

DIM = 5


class Stored:
    """A table as a checkpoint has it: in storage order, in blocks of 7 rows, of which it notes what is read."""

    def __init__(self, rows, dtype=np.float32):
        self.truth = np.random.default_rng(1).normal(size=(rows, DIM)).astype(dtype)
        self.stored = np.empty_like(self.truth)
        self.stored[RowOrder(rows).position(np.arange(rows))] = self.truth
        self.read = []
        self.array = LazyArray(self.truth.shape, self.truth.dtype, self._part, (7, DIM))

    def _part(self, index):
        self.read.append(index)
        return self.stored[index].copy()


def of_texts(words, optional=True):
    """The ids of a feature with a vocabulary in which the first word is the most frequent."""
    keys = np.array([word.encode() for word in words])
    order = np.argsort(keys)
    raw = RawFeature("city", optional=optional, values="text")
    vocabulary = Vocabulary.counted(keys[order], (len(words) - np.arange(len(words)))[order], 1, 1 + optional)
    return OriginalIds("city", vocabulary.rows, raw, VocabularyMap(vocabulary, Frequency()))


def of_integers(values, kind="integer"):
    raw = RawFeature("user", values=kind)
    vocabulary = Vocabulary.counted(np.array(values, np.int64), np.ones(len(values), np.int64))
    return OriginalIds("user", vocabulary.rows, raw, VocabularyMap(vocabulary, Frequency()))


def test_rows_of_texts_are_those_of_the_vocabulary_and_missing_ones_have_theirs():
    words = ["Zürich", "Bern", "Genève", "Aarau"]
    stored, ids = Stored(6), of_texts(words)
    table = Table("city", stored.array, ids, "here")
    assert table.ids.tolist() == words
    np.testing.assert_array_equal(table.rows(["Aarau", None, "Zürich", "Aarau"]), stored.truth[[5, 1, 2, 5]])
    np.testing.assert_array_equal(table.rows(table.ids), stored.truth[2:])
    np.testing.assert_array_equal(table.rows([float("nan")]), stored.truth[[1]])
    assert table.rows([]).shape == (0, DIM)
    np.testing.assert_allclose(table.norms(), [np.linalg.norm(row) for row in stored.truth[2:]], rtol=1e-6)


def test_integers_hexadecimal_and_plain_numbers():
    stored = Stored(4)
    table = Table("user", stored.array, of_integers([-5, 7, 10**12]), "here")
    np.testing.assert_array_equal(table.rows(np.array([10**12, -5])), stored.truth[[3, 1]])
    table = Table("user", stored.array, of_integers([10, 255, 4096], "hex"), "here")
    assert table.ids.tolist() == ["0000000a", "000000ff", "00001000"]
    np.testing.assert_array_equal(table.rows(["000000ff", "a"]), stored.truth[[2, 1]])
    table = Table("user", stored.array, OriginalIds("user", 4), "here")
    np.testing.assert_array_equal(table.rows([3, 0]), stored.truth[[3, 0]])


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (["Genf"], NoSuchName, "no row for the id 'Genf'. Near it are 'Genève'"),
        ("Bern", ConfigError, "give a list"),
        ([3], ConfigError, "of type int: ids there are text"),
    ],
)
def test_texts_that_are_not_there(given, kind, said):
    table = Table("city", Stored(6).array, of_texts(["Zürich", "Bern", "Genève", "Aarau"]), "here")
    with pytest.raises(kind, match=said):
        table.rows(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([8], "id 8. Near it are 7, -5, 1000000000000"),
        ([2**70], "has no row for the id 1180591620717411303424"),
        (["7"], "of type str: ids there are integers"),
        ([True], "of type bool"),
        ([None], "no row for missing values"),
    ],
)
def test_integers_that_are_not_there(given, said):
    table = Table("user", Stored(4).array, of_integers([-5, 7, 10**12]), "here")
    with pytest.raises(ConfigError, match=said):
        table.rows(given)
    with pytest.raises(NoSuchName, match="id -1"):
        Table("user", Stored(4).array, OriginalIds("user", 4), "here").rows([-1])


def test_hashed_ids_have_rows_but_no_names():
    map_ = ComputedMap(9, hashed=True, optional=False)
    stored = Stored(9)
    table = Table("user", stored.array, OriginalIds("user", 9, RawFeature("user"), map_), "here")
    wanted = np.array([3, 2**62])
    np.testing.assert_array_equal(table.rows(wanted.tolist()), stored.truth[map_.rows_of(wanted)])
    np.testing.assert_array_equal(table.rows([2**64 - 1]), stored.truth[map_.rows_of(np.array([2**64 - 1], np.uint64))])
    assert table.norms().shape == (9,)
    for ask in (lambda: table.ids, lambda: table.nearest(3)):
        with pytest.raises(ConfigError, match="hashed or reduced, so that several share a row"):
            ask()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("measure", ["cosine", "dot"])
def test_neighbours_are_those_of_all_pairs(measure, dtype, monkeypatch):
    monkeypatch.setattr(opened_tables, "_WIDENED", 3)
    stored = Stored(60, dtype)
    stored.truth[30] = stored.truth[40]  # as near as each other: the more frequent one comes first
    stored.truth[50] = 0
    stored.stored[RowOrder(60).position(np.arange(60))] = stored.truth
    words = [f"w{i}" for i in range(58)]
    table = Table("city", stored.array, of_texts(words), "here")
    assert table.rows(["w0"]).dtype == np.float32
    truth = stored.truth[2:].astype(np.float64)
    np.testing.assert_allclose(table.norms(), np.linalg.norm(truth, axis=1), rtol=1e-12)
    if measure == "cosine":
        truth /= np.maximum(np.linalg.norm(truth, axis=1, keepdims=True), 1e-300)
    for at in (0, 28, 48, 57):
        similar = truth @ truth[at]
        order = [i for i in sorted(range(58), key=lambda i: (-similar[i], i)) if i != at]
        for k in (1, 6, 100):
            found = table.nearest(words[at], k, measure)
            np.testing.assert_allclose([n.similarity for n in found], similar[order[:k]], rtol=1e-12, atol=1e-15)
            if at not in (48,):  # of the row of zeros all are equally far
                assert [n.id for n in found] == [words[i] for i in order[:k]]


def test_few_rows_read_their_blocks_once_and_nothing_else():
    stored = Stored(70)
    table = Table("user", stored.array, OriginalIds("user", 70), "here")
    positions = RowOrder(70).position(np.array([3, 4, 60, 3]))
    table.rows([3, 4, 60, 3])
    assert len(stored.read) == len({position // 7 for position in positions.tolist()})
    for rows, columns in stored.read:
        assert rows.start // 7 == (rows.stop - 1) // 7 and (columns.start, columns.stop) == (0, DIM)


def test_a_mapping_with_errors_for_people():
    def removed(index):
        raise CorruptCheckpointError("array 'x' cannot be read")

    array = LazyArray((9, DIM), np.dtype(np.float32), removed, (9, DIM))
    tables = Tables({"movie": array, "<b>": array}, OriginalIds, "checkpoint 3")
    assert list(tables) == ["movie", "<b>"] and "movie" in tables and "film" not in tables
    with pytest.raises(KeyError) as missing:
        tables["mvie"]
    assert str(missing.value) == "there is no table 'mvie'. Did you mean movie?"
    assert isinstance(missing.value, ConfigError)
    with pytest.raises(TrainingError, match="'movie' cannot be read from checkpoint 3: .* open the run again"):
        tables["movie"].rows([1])
    assert repr(tables["movie"]) == "Table('movie', 9 rows of 5, float32)"
    assert "&lt;b&gt;" in tables._repr_html_() and "<b>" not in tables._repr_html_()
    for k, measure in ((0, "dot"), (True, "dot"), (1, "euclid")):
        with pytest.raises(ConfigError, match="expected"):
            tables["movie"].nearest(1, k, measure)
