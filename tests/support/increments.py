"""Checkpoints of one table, whole and increments, whose rows follow from their step, for tests and their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recjax.embedding.buffers import NAME_BITS
from recjax.train.checkpoint.chain import Chain
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.utils.lazy_arrays import load

V, D = 40, 3


def touched(step: int) -> np.ndarray:
    """The positions that a step changes, in any order: none in each fifth one."""
    rng = np.random.default_rng(step)
    return rng.choice(V, rng.integers(1, 12) if step % 5 else 0, replace=False).astype(np.int64)


def truth(step: int) -> dict[int, float]:
    """The value of each row that was ever written, by its position."""
    return {p: 100.0 * s + p for s in range(1, step + 1) for p in touched(s).tolist()}


def arrays_of(step: int, since: int = 0) -> dict[str, Any]:
    """Arrays of a checkpoint: of the table the rows that have changed since a step."""
    values, changed = truth(step), [touched(s) for s in range(since + 1, step + 1)]
    positions = np.unique(np.concatenate([np.zeros(0, np.int64), *changed]))[::-1]
    column = np.array([values[p] for p in positions.tolist()])
    written = {
        "positions": positions,
        "rows": np.repeat(column[:, None], D, axis=1).astype(np.float32),
        "sum": column.astype(np.float32),
        "table": np.array([V, 0, NAME_BITS]),
        "initial": np.array([0.5, 0.1]),
    }
    return {"dense": {"w": np.full(4, step)}, "written": {"user": written}}


def save(checkpoints: Checkpoints, step: int, chain: Chain = (), pinned: int | None = None) -> Chain:
    """Saves a step, as an increment if there is a chain, and returns the chain with it."""
    since = chain[-1].step if chain else 0
    checkpoints.save(step, arrays_of(step, since), {"of": step}, pinned, chain)
    return checkpoints.wait()


def check(restored: Restored) -> int:
    """For `newest` and `restore`: fails unless all that was read follows from the step, which is returned."""
    found, step = load(restored.arrays), restored.step
    written = found["written"]["user"]
    assert restored.meta == {"of": step}
    assert (found["dense"]["w"] == step).all()
    assert len(set(written["positions"].tolist())) == len(written["positions"])
    expected = truth(step)
    assert dict(zip(written["positions"].tolist(), written["sum"].tolist(), strict=True)) == expected
    assert (written["rows"] == written["sum"][:, None]).all()
    assert written["rows"].dtype == np.float32
    assert written["rows"].shape == (len(expected), D)
    return step


def steps_that_read_well(directory: Path) -> list[int]:
    """The steps of all checkpoints in a folder; each must be whole, and hold what it should."""
    with Checkpoints(directory, 2) as checkpoints:
        return [checkpoints.restore(step, check) for step in checkpoints.steps()]
