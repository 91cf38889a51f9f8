"""The study of inference from disk: what two kinds of storage allow, and what of power counts as a result."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recjax.lab.studies.sdm import findings
from recjax.lab.studies.sdm.power import DEVICES, Device


def test_a_device_by_hand() -> None:
    """Ten reads at once of 100 us: 100,000/s, unless 4,096 bytes of each are more than it reads in a second."""
    slow = Device("a", 4096, 100.0, 10, 1e9)
    assert slow.reads_per_s == 100_000
    assert slow.requests_per_s(25.0) == 4000 and slow.requests_per_s(0.0) == math.inf
    assert (slow.request_us(25.0), slow.request_us(10.0), slow.request_us(0.0)) == (300.0, 100.0, 0.0)
    assert Device("b", 4096, 100.0, 10, 4096e4).reads_per_s == 10_000


def test_the_devices_are_those_of_the_paper() -> None:
    assert [(d.block_bytes, d.latency_us) for d in DEVICES] == [(4096, 100.0), (512, 10.0)]
    nand, xpoint = (device.requests_per_s(10.0) for device in DEVICES)
    assert xpoint == pytest.approx(10 * nand, rel=0.05)


def made_up() -> dict[str, Any]:
    seen = {"qps": 70.0, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}
    line = {
        "share": 0.1,
        "unit": 512,
        "pooled_share": 0.0,
        "closed_qps": 80.0,
        "cpu_ms": 1.0,
        "hit_rate": 0.92,
        "offline_hit_rate": 0.91,
        "bag_hit_rate": 0.5,
        "misses_per_request": 20.0,
        "bytes_read_per_request": 20 * 512.0,
        "dram_saved": 0.9,
        "bound_qps": 100.0,
        "open": seen,
    }
    return {
        "same_bits": True,
        "pooled_error": 0.0,
        "memory_qps": 100.0,
        "bounds": {"iops": {"512": 1.0}, "cached_qps": 120.0},
        "sweep": [line, line | {"share": 0.2, "misses_per_request": 5.0}],
        "units": [line, line | {"unit": 4096, "bytes_read_per_request": 20 * 4096.0}],
        "pooled": [line, line, line],
        "power": [{"name": "x", "saved": share, "without": ARITHMETIC, "with": ARITHMETIC} for share in (0.05, 0.29)],
    }


ARITHMETIC = {"arithmetic": "1 = 1"}


def test_what_goes_in_is_no_result() -> None:
    rows = {row.quantity: row for row in findings.rows(made_up())}
    assert rows["saved, least and most"].same is None and "no result" in rows["saved, least and most"].why
    own = rows["requests/s from disk over those from memory, 10% of the rows in memory"]
    assert (own.ours, own.same) == ("0.80", None)
    # 64 reads of 100 us are 640,000 a second, and of 20 rows a request 32,000 requests; of 10 us ten times as many.
    nand, xpoint = (row.ours for quantity, row in rows.items() if quantity.startswith("requests/s that"))
    assert (nand, xpoint) == ("32,000", "320,000")


def test_the_table_of_devices() -> None:
    (section,) = [s for s in findings.report(made_up(), {}).sections if s.title == "Two kinds of storage"]
    assert [row[:4] for row in section.tables[0].rows[1:]] == [
        ("NAND flash", "10%", "20.0", "32,000"),
        ("NAND flash", "20%", "5.0", "128,000"),
        ("3D XPoint", "10%", "20.0", "320,000"),
        ("3D XPoint", "20%", "5.0", "1,280,000"),
    ]
