"""Rows in the Criteo format for tests: drawn by hypothesis, written as text, and read by plain Python."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

Row = tuple[int, list[int | None], list[int | None]]  # label, 13 integers, 26 categories; None is missing

_INTEGERS = st.none() | st.integers(-5, 300) | st.integers(-(10**17), 10**18 - 1)
_CATEGORIES = st.none() | st.integers(0, 6) | st.integers(0, 2**32 - 1)


def rows(max_size: int, min_size: int = 1) -> st.SearchStrategy[list[Row]]:
    """Rows with few distinct values, so that frequencies differ."""
    row = st.tuples(
        st.integers(0, 1),
        st.lists(_INTEGERS, min_size=13, max_size=13),
        st.lists(_CATEGORIES, min_size=26, max_size=26),
    )
    return st.lists(row, min_size=min_size, max_size=max_size)


def line(row: Row, hexadecimal: str = "08x") -> str:
    """A row as a line without its end."""
    label, integers, categories = row
    numbers = ["" if value is None else str(value) for value in integers]
    digits = ["" if value is None else format(value, hexadecimal) for value in categories]
    return "\t".join([str(label), *numbers, *digits])


def text(rows: list[Row], hexadecimal: str = "08x") -> bytes:
    """Rows as a file."""
    return "".join(f"{line(row, hexadecimal)}\n" for row in rows).encode()


def random_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows with skewed categories."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count).tolist()
    integers = np.where(rng.random((count, 13)) < 0.2, -100, rng.integers(-2, 50, (count, 13))).tolist()
    categories = np.where(rng.random((count, 26)) < 0.2, -1, rng.zipf(1.5, (count, 26)) % 1000).tolist()
    return [
        (label, [None if v == -100 else v for v in numbers], [None if v == -1 else v for v in values])
        for label, numbers, values in zip(labels, integers, categories, strict=True)
    ]


def frequency_rows(values: list[Any], train: list[Any], min_count: int, modulo: int = 0) -> list[int]:
    """The table rows of values of an optional feature, counted and sorted by plain Python."""
    if modulo:
        values, train = ([None if v is None else v % modulo for v in column] for column in (values, train))
    counts: dict[Any, int] = {}
    for value in train:
        if value is not None:
            counts[value] = counts.get(value, 0) + 1
    kept = sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v))
    row = {value: i for i, value in enumerate(kept, 2)}
    return [1 if value is None else row.get(value, 0) for value in values]


def log1p(value: int | None) -> float:
    """The dense value of an integer, as facebookresearch/dlrm has it."""
    return 0.0 if value is None else math.log1p(max(value, 0))
