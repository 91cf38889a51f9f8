"""Cuts of tables into shards: what is split, how, and what stays whole; by hand."""

from __future__ import annotations

import numpy as np
import pytest

from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.segment import EXACT
from recjax.embedding.spec import TableSpec
from recjax.planning.cuts import Cut, Demand, cut_all, cut_width
from recjax.planning.loads import LOADS, Profile, TableUse, Workload

LOAD_OF_BYTES = list(LOADS).index("held_bytes")


def demand_of(*shapes: tuple[int, int, float], devices: int) -> tuple[list[Cut], Demand]:
    """Tables of (rows, D, ids a sample), none of which is cut."""
    specs = [TableSpec(f"t{n}", rows, dim, Sgd()) for n, (rows, dim, _) in enumerate(shapes)]
    use = {spec.name: TableUse(ids, 1.0) for spec, (_, _, ids) in zip(specs, shapes, strict=True)}
    work = Workload(Profile(use, "a test"), 1000, devices)
    base_NxK = np.zeros((devices, len(LOADS)))
    return [Cut(spec, spec.dim) for spec in specs], Demand(work, EXACT, base_NxK, {}, 0.0)


def test_ranges_of_columns() -> None:
    cut = Cut(TableSpec("t", 10, 160, Sgd()), 64)
    assert cut.ranges == ((0, 64), (64, 128), (128, 160))
    assert cut.widths == {64: 2, 32: 1}
    assert Cut(cut.spec, 160).ranges == ((0, 160),)
    assert Cut(cut.spec, 80).widths == {80: 2}


# Sixteen tables of 64 columns: 6.4M values a device. Of that, 1.5% may be allocated in vain for one of two buffers.
@pytest.mark.parametrize(("rows", "parts"), [(5900, 1), (6100, 2)])
def test_a_buffer_that_holds_next_to_nothing_may_be_uneven(rows: int, parts: int) -> None:
    cuts, demand = demand_of(*[(50_000, 64, 1)] * 16, (rows, 16, 1), devices=8)
    *others, small = cut_all(cuts, demand, 64, 1.0)
    assert others == cuts[:-1]
    assert (small.width, small.rows) == (16, parts)
    assert "part of a buffer of 16 columns" in small.why or parts == 1


def test_of_two_widths_the_large_tables_come_to_share_a_buffer() -> None:
    """Whole, each of four tables of either width would be twice a device's part of its buffer."""
    cuts, demand = demand_of(*[(50_000, 128, 1), (50_000, 192, 1)] * 4, *[(5000, 64, 1)] * 16, devices=8)
    found = cut_all(cuts, demand, 64, 1.0)
    assert [cut.widths for cut in found[:8]] == [{64: 2}, {64: 3}] * 4
    assert {cut.rows for cut in found} == {1}
    assert found[0].why == "2.00 of a device's part of a buffer of 128 columns"
    assert found[8:] == cuts[8:]


def test_rows_are_split_as_far_as_there_are_too_many_ids_and_columns_for_the_rest() -> None:
    """1.5 shares of the ids and 6 of the bytes: two parts of rows, four ranges of columns."""
    others = [(2500, 128, 0.302)] * 32 + [(60_000, 32, 0.302)] * 16
    cuts, demand = demand_of((200_000, 128, 1.5), *others, devices=16)
    cut, *rest = cut_all(cuts, demand, 32, 1.0)
    assert (cut.rows, cut.widths) == (2, {32: 4})
    assert rest == cuts[1:]


def test_the_width_with_which_samples_send_least() -> None:
    """A table of 384,000 rows, 128 columns and 1 id on 16 devices, 6.4 shares of the bytes.

    Beside tables of 32 columns: in 4 ranges of these it needs 2 parts of rows, of which samples get 2 vectors of 128
    columns for 4 ids, 260 in all. Otherwise it has a buffer for itself, over all devices: 16 * 128 + 1.
    """
    cuts, demand = demand_of((384_000, 128, 1), *[(4500, 32, 1 / 12)] * 512, devices=16)
    assert cut_width(cuts, demand) == 32
    assert cut_all(cuts, demand, 32, 1.0)[0] == Cut(
        cuts[0].spec, 32, 2, "16.00 of a device's part of a buffer of 128 columns"
    )
    assert cut_all(cuts, demand, 64, 1.0)[0].rows == 16


def test_of_equal_widths_the_widest() -> None:
    """Beside small tables of as many columns, with so many of the ids that its rows are split in any case."""
    cuts, demand = demand_of((384_000, 128, 1), *[(4500, 128, 0.01)] * 128, devices=16)
    assert cut_width(cuts, demand) == 128


def test_a_remainder_is_32_columns_at_least() -> None:
    """In ranges of 64, of 80 columns 16 would be left: they stay together, and the rows are split."""
    others = [(10_000, dim, 1) for dim in (64, 32, 16) for _ in range(16)]
    cuts, demand = demand_of((20_000, 80, 0.1), (20_000, 96, 0.1), *others, devices=4)
    wide, other, *_ = cut_all(cuts, demand, 64, 1.0)
    assert wide.width == 80 and wide.rows > 1
    assert other.widths == {64: 1, 32: 1}


def test_what_is_allocated_counts() -> None:
    """A table of 16 columns on one of two devices, one of 48 on the other: 64 bytes a row for 32 that are held."""
    cuts, demand = demand_of((1000, 16, 1), (1000, 48, 1), devices=2)
    shares = demand.shares(cuts)
    loads_NxM = np.array([shares.of_shard(cuts[0], 16), shares.of_shard(cuts[1], 48)])
    assert loads_NxM[:, LOAD_OF_BYTES].tolist() == [0.5, 1.5]
    assert shares.imbalance(loads_NxM) == 2
    assert shares.imbalance(np.array([loads_NxM.sum(0) / 2] * 2)) == 1


def test_rows_whose_means_are_made_of_several_buffers_are_apart() -> None:
    """Row-wise Adagrad: half of 64 columns does not share a buffer with whole rows of 32, as it does with SGD."""
    spec = TableSpec("a", 10, 64, RowWiseAdagrad())
    narrow = TableSpec("b", 10, 32, RowWiseAdagrad())
    _, demand = demand_of(devices=2)
    demand.work.profile.tables.update({name: TableUse(1, 1) for name in "abcd"})
    apart = demand.of_part(Cut(spec, 32), 32)[1]
    assert demand.of_part(Cut(narrow, 32), 32)[1] != apart
    assert demand.of_part(Cut(TableSpec("c", 10, 96, RowWiseAdagrad()), 32), 32)[1] == apart
    assert demand.of_part(Cut(TableSpec("d", 10, 64, Sgd()), 32), 32)[1] != apart
