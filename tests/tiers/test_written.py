"""Whole tables of written rows: what was never written is drawn as the run that wrote them drew it."""

import hashlib
import zlib

import jax
import numpy as np
import pytest

from recjax.embedding.row_order import RowOrder
from recjax.tiers.written import whole_tables

pytestmark = pytest.mark.light_compile

V, D, SEED, SCALE = 37, 3, 5, 0.25


def drawn(words: list[int]) -> np.ndarray:
    """Rows of the table, [V, D] float32, of a key that the words are folded into."""
    key = jax.random.key(SEED, impl="threefry2x32")
    for word in words:
        key = jax.random.fold_in(key, word)
    rows = [jax.random.uniform(jax.random.fold_in(key, row), (D,), minval=-1, maxval=1) for row in range(V)]
    return np.stack(rows) * np.float32(SCALE)


@pytest.mark.parametrize("head", [[V, SEED], [V, SEED, 64]])
def test_rows_never_written_are_those_of_the_run(head):
    """Before recjax 0.1.0 a CRC of the table's name chose the values; 64 bits do since."""
    position = 11
    written = {
        "positions": np.array([position], np.int64),
        "rows": np.full((1, D), 9, np.float32),
        "table": np.array(head, np.int64),
        "initial": np.array([SCALE]),
    }
    (rows,) = whole_tables({"user": written})["user"].values()
    digest = hashlib.blake2b(b"user", digest_size=8).digest()
    words = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    expected = drawn([zlib.crc32(b"user")] if len(head) == 2 else words)
    expected = expected[RowOrder(V).row(np.arange(V, dtype=np.int32))]
    expected[position] = 9
    np.testing.assert_array_equal(rows.load(), expected)
