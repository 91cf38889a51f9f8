"""Crosses of features: one key for each pair, triple, ... of values that stand in a row together."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from recjax.data.prepare import short_text
from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import codes_dtype

_JOINT = b"*"


def crossed(features: Sequence[Coded]) -> Coded:
    r"""The cross of features with one value in each row: missing where one of them is.

    Its keys are text, the values with `*` between them; within text a `\` stands before each `*` and `\`, so that no
    two crosses have the same key.
    """
    return functools.reduce(_paired, [Coded(_texts(each.values), each.codes, None) for each in features])


def _paired(left: Coded, right: Coded) -> Coded:
    present = (left.codes < len(left.values)) & (right.codes < len(right.values))
    pairs = left.codes[present].astype(np.int64) * len(right.values) + right.codes[present]
    distinct, back = np.unique(pairs, return_inverse=True)
    if not len(distinct):
        return Coded(np.zeros(0, "S1"), np.zeros(len(left.codes), codes_dtype(0)), None)
    first, second = np.divmod(distinct, len(right.values))
    keys = np.strings.add(np.strings.add(left.values[first], _JOINT), right.values[second])
    values, rank = short_text.unique(keys)
    codes = np.full(len(left.codes), len(values), codes_dtype(len(values)))
    codes[present] = rank[back]
    return Coded(values, codes, None)


def _texts(values: np.ndarray) -> np.ndarray:
    """Values as text, S [D]."""
    if values.dtype.kind != "S":
        return values.astype(np.bytes_)
    if not (np.strings.find(values, _JOINT) >= 0).any() and not (np.strings.find(values, b"\\") >= 0).any():
        return values
    return np.strings.replace(np.strings.replace(values, b"\\", b"\\\\"), _JOINT, b"\\*")
