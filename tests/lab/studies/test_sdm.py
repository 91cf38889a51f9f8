"""The study of inference from disk: hits predicted, power by hand, and a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import assert_refused, inside

from recjax.errors import ConfigError
from recjax.lab.studies.sdm import measure, power, study
from recjax.lab.studies.sdm.hit_rate import clock_hit_rate
from recjax.lab.studies.sdm.study import Options
from recjax.lab.studies.sdm.workload import Size, Workload
from recjax.tiers.row_cache import CachedRows

pytestmark = pytest.mark.light_compile(optimised=True)


class Numbers:
    """Rows that hold their numbers, without a file."""

    row_bytes, records, unit = 4, 3000, 512


def numbers_read(asked: Any) -> list[np.ndarray]:
    return [numbers.astype("<i4")[:, None].view(np.uint8) for _, numbers, _ in asked]


@pytest.mark.parametrize(("share", "requests"), [(0.02, 2500), (0.1, 3500), (0.4, 2500)])
def test_hits_of_the_cache_are_those_of_the_offline_curve(share: float, requests: int) -> None:
    """Within a point, after as many requests as fill it several times; bags of 16 of Zipf's ids, of 1,500 users."""
    workload = Workload(Size(tables=1, rows=Numbers.records, users=1500))
    slots = int(share * Numbers.records)
    store = CachedRows({"t": Numbers()}, numbers_read, slots * 9)
    users = workload.users(requests).tolist()
    for count, user in enumerate(users):
        if count == requests // 3:
            store.forget_counts()
        store.rows({"t": np.unique(workload.ids[user, 0])})
    expected = clock_hit_rate(workload.presence(0), store.room["t"])
    assert 0.98 * slots < store.room["t"] <= slots and 0.3 < expected < 0.97
    assert abs(store.hits["t"] / (store.hits["t"] + store.misses["t"]) - expected) < 0.01


def test_the_offline_curve_by_hand() -> None:
    """Of rows that are all alike as many are there as there is room; without room none, with enough of it all."""
    even = np.full(50, 0.3)
    assert clock_hit_rate(even, 20) == pytest.approx(0.4)
    assert (clock_hit_rate(even, 0), clock_hit_rate(even, 50)) == (0.0, 1.0)
    skewed = np.array([0.9, 0.0, 0.01])  # the second is never asked for
    assert clock_hit_rate(skewed, 2) == 1.0 and 0.9 < clock_hit_rate(skewed, 1) < 1


def test_presence_counts_a_row_once_a_request() -> None:
    workload = Workload(Size(tables=2, rows=5, users=3, ids=4))
    for table in range(2):
        truth = [
            sum(p for p, bag in zip(workload.probability, workload.ids[:, table], strict=True) if row in bag)
            for row in range(5)
        ]
        np.testing.assert_allclose(workload.presence(table), truth)


def test_power_by_hand() -> None:
    """1,001 requests a second: 11 hosts of 100, or 21 of 50, each with half a helper."""
    scenario = power.Scenario("x", 1001, power.Host("a", 100, 500), power.Host("b", 50, 100, 0.5, 20))
    found = power.saved(scenario)
    assert (found["without"]["hosts"], found["without"]["power"]) == (11, 5500)
    assert (found["with"]["hosts"], found["with"]["power"]) == (21, 21 * 100 + 10.5 * 20)
    assert found["saved"] == pytest.approx(1 - 2310 / 5500)
    assert power.power(power.Host("exact", 240, 1), 288_000)["hosts"] == 1200
    assert [round(power.saved(each)["saved"], 2) for each in power.PAPER] == [0.20, 0.05, 0.29]


def test_who_waits_for_another_is_timed_from_when_it_came() -> None:
    """Each takes 2 ms, and 2,000 a second come: the last of 40 waits for about 60 ms."""
    import time

    def start(requests: Any) -> Any:
        return lambda: time.sleep(0.002)

    asked: list[Any] = [None]
    found = measure.open_loop(start, asked, 2000, 0.02, 0)
    assert found["requests"] == 40 and found["p99_ms"] > 40 and found["p50_ms"] > 15
    assert measure.closed_loop(start, asked, 0.05) < 500


def test_those_that_wait_are_served_together() -> None:
    """At most so many, in their order, and none before it came."""
    import time

    turns: list[list[Any]] = []

    def serve(requests: Any) -> Any:
        turns.append(list(requests))
        time.sleep(0.002)
        return lambda: None

    asked: list[Any] = list(range(100))
    found = measure.open_loop(serve, asked, 10_000, 0.01, 0, together=8)
    assert [number for turn in turns for number in turn] == asked
    assert max(map(len, turns)) == 8 and found["together"] == 100 / len(turns) > 5
    turns.clear()
    assert measure.open_loop(serve, asked, 50, 0.4, 0, together=8)["together"] < 1.5
    turns.clear()
    measure.closed_loop(serve, asked, 0.02, together=8)
    assert {len(turn) for turn in turns} == {8}


@pytest.mark.parametrize("batches", [1, 2])
def test_the_next_batch_starts_before_the_last_one_ends(batches: int) -> None:
    """So many are under way, never more; they end in their order, and all of them before the loop does."""
    import time

    started: list[int] = []
    ended: list[int] = []
    under_way: list[int] = []

    def start(requests: Any) -> Any:
        number = len(started)
        started.append(number)
        under_way.append(len(started) - len(ended))

        def finish() -> None:
            time.sleep(0.005)
            ended.append(number)

        return finish

    asked: list[Any] = [None] * 8
    measure.closed_loop(start, asked, 0.05, 2, batches)
    assert max(under_way) == batches and started == ended == list(range(len(started)))


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shares of the tables above 0 and up to 1"):
        Options(shares=(0.5, 1.5))
    assert_refused(inside("study", "sdm", "--out", tmp_path / "x", "--shares", "a"), 2, "give shares with commas")
    assert_refused(inside("study", "sdm", "--out", tmp_path / "x", "--tables", "0"), 2, "tables is 0; give 1 or more")
    assert not (tmp_path / "x").exists()


@pytest.mark.full
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores from disk have the bits of those from memory, and all figures are there.

    Two requests at most are served at once: for eight, twice as many programs are compiled.
    """
    monkeypatch.setattr(study, "TOGETHER", 2)
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    how = ("--rows", "500", "--tables", "1", "--shares", "0.1", "--seconds", "0.05")
    found: dict[str, Any] = inside("study", "sdm", "--out", tmp_path, *how, "--json").result
    assert found["same_bits"] and 0 <= found["pooled_error"] < 1e-5
    (line,) = found["sweep"]
    assert 0 < line["misses_per_request"] < 16 and 0 < line["open"]["p50_ms"] <= line["open"]["p99_ms"]
    small, large = found["units"]
    assert large["bytes_read_per_request"] > 2 * small["bytes_read_per_request"] > 0
    assert 0 <= found["pooled"][2]["bag_hit_rate"] <= 1 and found["pooled"][0]["bag_hit_rate"] is None
    written = json.loads((tmp_path / "sdm.json").read_text())
    assert written["report"]["rows"][3]["ours"] == "the bits of tables in memory"
    assert {"sdm.html", "sdm.md", "cache.png"} <= {path.name for path in tmp_path.iterdir()}
    other = inside("study", "sdm", "--out", tmp_path, "--rows", "600", "--tables", "1")
    assert_refused(other, 2, "has tables of another size")
