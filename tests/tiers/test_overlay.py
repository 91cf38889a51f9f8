"""Written rows of several checkpoints laid over each other: of each row the newest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recjax.tiers.written import overlaid
from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import LazyArray, load


def written(values: dict[int, float], **others: Any) -> dict[str, Any]:
    """A table of ten rows, of which some are written."""
    column = np.array(list(values.values()), np.float32)
    arrays = {"positions": np.array(list(values), np.int64), "rows": np.stack([column, -column], axis=1), "sum": column}
    return {**arrays, "table": np.array([10, 0, 64]), "initial": np.array([0.5, 0.0])} | others


def by_position(table: dict[str, Any]) -> dict[int, list[float]]:
    table = load(table)
    assert (table["rows"][:, 0] == table["sum"]).all()
    assert len(set(table["positions"].tolist())) == len(table["positions"])
    return dict(zip(table["positions"].tolist(), table["rows"].tolist(), strict=True))


def test_a_row_is_that_of_the_last_one_that_has_it() -> None:
    """Row 2 changes in the last, 9 comes in the second and changes in the last, 5 changes in the second alone."""
    whole = written({7: 1, 2: 2, 5: 3})
    chain = [whole, written({5: 4, 9: 5}), written({}), written({9: 6, 2: 7, 0: 8})]
    found = overlaid([{"t": each, "no longer": each} for each in chain[:-1]] + [{"t": chain[-1]}])
    assert list(found) == ["t"]
    assert by_position(found["t"]) == {7: [1, -1], 5: [4, -4], 9: [6, -6], 2: [7, -7], 0: [8, -8]}
    assert found["t"]["table"].load().tolist() == [10, 0, 64]
    assert by_position(overlaid([{"t": whole}, {"t": written({})}])["t"]) == by_position(whole)
    assert by_position(overlaid([{"t": written({})}, {"t": whole}])["t"]) == by_position(whole)
    assert by_position(overlaid([{"t": whole}, {"t": whole}])["t"]) == by_position(whole)
    assert by_position(overlaid([{"t": written({})}, {"t": written({})}])["t"]) == {}


def test_arrays_are_read_by_parts_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred rows, cut into parts of a few, in four checkpoints of other blocks: against a dict."""
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", 64)
    rng, chain = np.random.default_rng(1), []
    truth: dict[int, float] = {}
    largest = 0
    for number, block in enumerate((7, 3, 1, 11)):
        rows = {int(p): float(rng.random(dtype=np.float32)) for p in rng.permutation(300)[: 200 - 40 * number]}
        arrays = written(rows, table=np.array([300, 0, 64]))

        def read(part: Any, of: np.ndarray = arrays["rows"], block: int = block) -> np.ndarray:
            nonlocal largest
            assert part[0].start // block == (part[0].stop - 1) // block
            largest = max(largest, part[0].stop - part[0].start)
            return of[part]

        if number < 3:  # of the last nothing is laid over, so that it is read as it is
            arrays["rows"] = LazyArray(arrays["rows"].shape, np.dtype(np.float32), read, (block, 2))
        chain.append({"t": arrays})
        truth |= rows
    assert by_position(overlaid(chain)["t"]) == {p: [x, -x] for p, x in truth.items()}
    assert 1 < largest <= 7


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"table": np.array([11, 0, 64])}, "the same table everywhere"),
        ({"table": np.array([10, 1, 64])}, "the same table everywhere"),
        ({"initial": np.array([0.4, 0.0])}, "the same table everywhere"),
        ({"rows": np.zeros((1, 3), np.float32)}, "the same table everywhere"),
        ({"sum": np.zeros(1, np.float64)}, "the same table everywhere"),
        ({"momentum": np.zeros(1, np.float32)}, "the same table everywhere"),
        ({"positions": np.array([10])}, "beyond its 10"),
        ({"positions": np.array([-1])}, "beyond its 10"),
    ],
)
def test_what_does_not_fit_is_refused(other: dict[str, Any], words: str) -> None:
    for chain in ([written({1: 1}, **other), written({2: 2})], [written({2: 2}), written({1: 1}, **other)]):
        with pytest.raises(ValueError, match=f"table 't'.*{words}|table 't' {words}"):
            overlaid([{"t": each} for each in chain])
    with pytest.raises(ValueError, match="table 't' are not those of the same table"):
        overlaid([{}, {"t": written({1: 1})}])
