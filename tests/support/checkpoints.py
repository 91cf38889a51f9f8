"""Checkpoints whose content follows from their step, for the tests and for the processes that they start."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from recjax.train.checkpoint.array_store import Arrays
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.utils.lazy_arrays import load


def no_report(text: str) -> None:
    """For `newest`, where nothing is damaged."""
    raise AssertionError(text)


def in_memory(restored: Restored) -> Restored:
    """For `newest` and `restore`: all arrays read while they are surely there."""
    return dataclasses.replace(restored, arrays=load(restored.arrays))


def state(step: int, rows: int = 50) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and meta that follow from the step alone, so that a mixture of two steps shows."""
    rng = np.random.default_rng(step)
    return {
        "tables": {"user": rng.normal(size=(rows, 8)).astype(np.float32), "movie": np.full((7, 8), step, np.float32)},
        "slots": {"user": rng.random(rows)},
        "step": np.array(step, np.int32),
    }, {"position": step * 256}


def save(directory: Path, *steps: int, keep: int = 9) -> None:
    """Saves the states of `steps`, one after the other."""
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, *state(step))


def assert_same(got: Arrays, expected: Arrays) -> None:
    """The same names in the same order, types, shapes and bits."""
    assert list(got) == list(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(got[key], value)
        else:
            assert type(got[key]) is np.ndarray
            assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), key
            assert got[key].tobytes() == value.tobytes(), key


def names(directory: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(os.listdir(directory))
