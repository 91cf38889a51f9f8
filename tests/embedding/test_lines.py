"""Rows in lines: the buffers of a TPU hold what rows would, and a training comes to the same numbers, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.contract import Net, make_batch
from support.problems import Problem, mesh_of, run_sharded

from recjax.config.train import DenseSgd
from recjax.embedding.bind import bind, in_lines
from recjax.embedding.buffers import initialise
from recjax.embedding.collection import export_tables, import_tables
from recjax.embedding.lines import Lines
from recjax.embedding.optim import Adagrad, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import load

pytestmark = pytest.mark.light_compile


@pytest.mark.parametrize(
    ("width", "rows", "padded"),
    [(1, 128, 1), (10, 8, 16), (16, 8, 16), (48, 2, 64), (64, 2, 64), (100, 1, 128), (200, 1, 256)],
)
def test_a_line_has_as_many_rows_as_fit(width: int, rows: int, padded: int) -> None:
    lines = Lines(width)
    assert (lines.rows, lines.padded) == (rows, padded)
    assert lines.shape(256) == (256 // rows, rows * padded)
    values = np.arange(256.0 * width, dtype=np.float32).reshape(256, width)
    packed = np.asarray(lines.packed(jnp.asarray(values)))
    for row in (0, 1, 127, 255):
        first = row % rows * padded
        np.testing.assert_array_equal(packed[row // rows, first : first + width], values[row])
    np.testing.assert_array_equal(lines.unpacked(jnp.asarray(packed)), values)


SIZE, M = 64, 24


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(10, np.float32), (40, np.float32), (100, np.float32), (16, np.uint16)]), st.data())
def test_rows_are_read_and_written_as_in_an_array_of_rows(kind: tuple[int, Any], data: st.DataObject) -> None:
    """Slots beyond the buffer are zeros when read, and dropped when written; whatever is not written stays."""
    width, dtype = kind
    lines, rng = Lines(width), np.random.default_rng(data.draw(st.integers(0, 99)))
    used = data.draw(st.lists(st.integers(0, SIZE - 1), max_size=M, unique=True))
    slots = np.array([*sorted(used), *(SIZE + np.arange(len(used), M))], np.int32)
    before, new = (rng.integers(0, 9999, (n, width)).astype(dtype) for n in (SIZE, M))
    if dtype == np.float32:
        new[::3], new[1::5] = -0.0, np.nan
    after = before.copy()
    after[slots[: len(used)]] = new[: len(used)]
    held = _packed(lines, jnp.asarray(before))
    found = _set(lines, held, slots, new)
    assert np.asarray(lines.unpacked(found)).tobytes() == after.tobytes()
    assert not np.asarray(found).reshape(-1, lines.padded)[:, width:].any()  # padding
    read = np.asarray(_get(lines, found, slots))
    assert read[: len(used)].tobytes() == new[: len(used)].tobytes() and not read[len(used) :].any()


_packed, _set, _get = (jax.jit(f, static_argnums=0) for f in (Lines.packed, Lines.set, Lines.get))

TABLES = (
    TableSpec("user", 103, 6, RowWiseAdagrad(0.1, initial_accumulator=0.25)),
    TableSpec("tiny", 2, 6, RowWiseAdagrad(0.1, initial_accumulator=0.25)),
    TableSpec("wide", 50, 20, Adagrad(0.1)),
    TableSpec("narrow", 70, 3, Sgd(0.1), dtype="bfloat16"),
)
FEATURES = tuple(FeatureSpec(t.name, t.name) for t in TABLES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "plan"),
    [
        (3, "row_wise"),
        (2, "table_wise"),
        (3, "column_wise"),
    ],
)
def test_tables_leave_and_come_as_rows(devices: int, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", 2000)  # parts begin anywhere in a line
    mesh = mesh_of(devices)
    rows = bind(make_plan(plan, TABLES), TABLES, FEATURES, devices)
    lines = in_lines(rows)
    assert all(group.lines and group.rows % group.lines.rows == 0 for group in lines.groups)
    expected = load(export_tables(rows, *initialise(rows, mesh, 3)))
    made = initialise(lines, mesh, 3)
    _equal(load(export_tables(lines, *made)), expected)
    rng = np.random.default_rng(0)
    expected = jax.tree.map(lambda x: rng.integers(0, 99, x.shape).astype(x.dtype), expected)
    _equal(load(export_tables(lines, *import_tables(lines, mesh, expected))), expected)
    for group in lines.groups:
        assert group.lines is not None
        assert made[0][group.name].shape == (group.parts * group.rows // group.lines.rows, 128)


def _equal(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8)), found, expected)


def test_buffers_that_gain_nothing_stay_rows() -> None:
    optimizer = Adagrad(0.1, every_row=True)
    tables = (TableSpec("a", 9, 128, Sgd(0.1)), TableSpec("b", 9, 4, optimizer), TableSpec("c", 9, 4, Sgd(0.1)))
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    plan = Plan({t.name: (Segment("data_parallel" if t.name == "c" else "row_wise"),) for t in tables})
    bound = bind(plan, tables, features, 2)
    assert in_lines(bound) == bound


@pytest.mark.full
def test_a_training_comes_to_the_same_bits() -> None:
    """Rows that travel, columns of them, and bags pooled where they are; slots of one number and of a row."""
    rules: list[Any] = [RowWiseAdagrad(0.2, l2=0.01), Adagrad(0.2), PartialRowWiseAdam(0.05)]
    tables = tuple(TableSpec(f"t{n}", 31, (5, 3)[n % 2], rule) for n, rule in enumerate(rules))
    tables += (TableSpec("half", 31, 20, RowWiseAdagrad(0.2), dtype="bfloat16"),)
    reads = itertools.cycle([("three", 3, True), ("jagged", None, False)])
    features = []
    for table, (source, bag, weighted) in zip(tables, reads, strict=False):
        features.append(FeatureSpec(f"{table.name}.sum", table.name, bag, "sum", weighted, source))
    placed = ["row_wise", "table_wise", "column_wise", "grid"]
    kinds = [Exchange(kind="pooled") if n == 1 else Exchange() for n in range(4)]
    plan = Plan({t.name: (Segment(p, exchange=k),) for t, p, k in zip(tables, placed, kinds, strict=True)})
    batches = [make_batch(step) for step in range(3)]
    problem = Problem(batches, 21, tables, tuple(features), Net(), 2, DenseSgd(0.1).build())
    rows, lines = (run_sharded(problem, 4, plan, np.float32, hosts=2, lines=way) for way in (False, True))
    assert rows.losses == lines.losses
    _equal(lines.tables, rows.tables)
