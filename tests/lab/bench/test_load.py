"""`recjax bench --serve`: times run from when a request was due, and every request is counted once."""

import asyncio
import importlib.util
import json
import time

import numpy as np
import pytest
from support.commands import assert_refused, inside
from support.serving import export_shop

from recjax.lab.bench import load

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


def offered(post, qps=200, seconds=0.5, bodies=(b"x",)):
    return asyncio.run(load.offer(post, bodies, qps, seconds, np.random.default_rng(0)))


def test_who_waits_is_counted_from_when_it_was_due():
    """The server stands still for 0.4 of the 0.5 s: whoever would send one request after the other would not notice."""
    begun = []

    async def post(body):
        if not begun:
            time.sleep(0.4)  # noqa: ASYNC251
        begun.append(body)
        return 200

    found = offered(post, bodies=(b"a", b"b", b"c"))
    assert found["sent"] == found["answered"] == len(begun) and 60 < len(begun) < 140, "a rate of 200 for half a second"
    assert begun[:4] == [b"a", b"b", b"c", b"a"]
    assert 100 < found["p50_ms"] < 5000 and 300 < found["p99_ms"] and found["late_ms"] > 300
    assert found["refused"] == found["failed"] == 0


def test_refusals_and_failures_are_counted_apart():
    count = iter(range(1000))

    async def post(body):
        number = next(count)
        if number % 4 == 3:
            raise ConnectionResetError
        return (200, 503, 400)[number % 4]

    found = offered(post)
    quarter = found["sent"] // 4
    assert abs(found["answered"] - quarter) <= 1 and abs(found["refused"] - quarter) <= 1
    assert found["p50_ms"] < 150, "a time runs from when the request was due, not from the start"
    assert found["answered"] + found["refused"] + found["failed"] == found["sent"]

    async def none(body):
        return 503

    assert offered(none, seconds=0.1)["p99_ms"] is None


@pytest.mark.full
def test_a_service_is_measured_both_ways(tmp_path):
    for package in ("fastapi", "uvicorn", "prometheus_client", "flatbuffers"):
        pytest.importorskip(package, reason="the extra `serve` is not installed")
    format = "onnx" if importlib.util.find_spec("onnxruntime") else "stablehlo"  # which compiles nothing
    exported = export_shop(tmp_path, user=["user"], format=format)
    options = ("--serve", "--qps", "20", "--candidates", "1,3", "--seconds", "0.4", "--http", "--json")
    lines = inside("bench", exported, *options).result["serve"]
    assert [(line["way"], line["candidates"]) for line in lines] == [
        ("in process", 1),
        ("in process", 3),
        ("HTTP", 1),
        ("HTTP", 3),
    ]
    for line in lines:
        assert line["sent"] == line["answered"] > 0 and 0 < line["p50_ms"] <= line["p95_ms"] <= line["p99_ms"]
    assert "p99_ms" in load.to_text({"serve": lines, "seconds": 0.4, "others_share": 0.5})
    assert json.dumps(lines)
    assert_refused(inside("bench", exported, "--serve", "--qps", "0"), 2, "--qps takes rates above 0")
    assert_refused(inside("bench", exported, "--serve", "a.b=1"), 2, "bench --serve takes no settings")
    assert_refused(inside("bench", exported, "--serve", "--qps", "x"), 2, "no list of numbers")
