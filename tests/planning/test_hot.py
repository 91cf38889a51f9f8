"""The choice of hot rows: against counts by brute force, bytes worked by hand, and a machine whose curves are known."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from recjax.config.run import EmbeddingConfig, HotConfig, RunConfig
from recjax.config.train import TrainConfig
from recjax.data.pipeline import batches
from recjax.data.presence import Items, Presence
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.bind import bind
from recjax.embedding.optim import Adam
from recjax.embedding.plan import Plan, check_plan, make_plan
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError
from recjax.planning import hot, work
from recjax.planning.hot import Candidates, HotCopies, candidates, estimate, ranked
from recjax.planning.machine import open_machine
from recjax.planning.resolve import resolve, workload
from recjax.planning.work import Work
from recjax.train.table_specs import specs

SHAPE = (1, 1, 4)


def run(rows: Any, dedup: bool = True, plan: str = "row_wise", batch_size: int = 64, **how: Any) -> RunConfig:
    return RunConfig(
        data=ZipfStream(rows=(300, 5000), train_rows=4000),
        embedding=EmbeddingConfig(dim=4, optimizer=Adam(), dedup=dedup, hot=HotConfig(rows, batches=5, **how)),
        train=TrainConfig(batch_size=batch_size),
        plan=plan,
    )


def resolved(config: RunConfig, shape: tuple[int, int, int] = SHAPE) -> tuple[Plan, hot.Choice]:
    source = config.data.open()
    tables, features = specs(config, source.schema)
    plan, choice = resolve(config, source, tables, features, shape)
    check_plan(plan, tables)
    assert choice is not None
    return plan, choice


def test_the_rows_in_most_shares_of_the_first_batches() -> None:
    config = run(40)
    plan, choice = resolved(config)
    counts = collections.Counter[tuple[str, int]]()
    stream = batches(config.data.open(), "train", 64, seed=0, shuffle=True, workers=0)
    for batch in itertools.islice(stream, 5):
        for name, bags in batch.bags.items():
            counts.update({(name, id) for id in bags.ids[:16].ravel().tolist()})
            for first in (16, 32, 48):
                counts.update({(name, id) for id in bags.ids[first : first + 16].ravel().tolist()})
    least = sorted(counts.values(), reverse=True)[39]
    chosen = {(name, id) for name, ids in choice.ids.items() for id in ids}
    assert len(chosen) == 40 and all(counts[item] >= least for item in chosen)
    assert {item for item, count in counts.items() if count > least} <= chosen
    found = {n: s[0].rows.ids for n, s in plan.tables.items() if isinstance(s[0].rows, RowIds)}
    assert found == choice.ids and all(s[-1].rows == "rest" for s in plan.tables.values())
    assert Plan.from_json(plan.to_json()) == plan


def test_equal_runs_choose_alike_and_other_seeds_otherwise() -> None:
    one, same = (resolved(run(40))[1] for _ in range(2))
    other = resolved(dataclasses.replace(run(40), seed=1))[1]
    assert one == same and one.ids != other.ids


def by_hand(asked: list[float]) -> Candidates:
    """Rows of 16 bytes and as many of slots, each of which as many ids name as ask for it on each of 4 devices."""
    count = len(asked)
    asked_M = np.array(asked)
    sizes = (np.full(count, 16), np.full(count, 16))
    return Candidates(("t",), np.zeros(count, np.int64), np.arange(count), asked_M, 4 * asked_M, *sizes, 10.0)


def test_what_travels_comes_first() -> None:
    """Row 3 is in three shares of four, and row 5 nine times in one of them: which travels more, dedup decides."""
    items = Items(8, np.array([3, 5]), np.array([3, 1]), np.array([3, 9]))
    presence, table = Presence({"t": items}, 1, 4, 8, np.zeros(0)), TableSpec("t", 8, 4, Adam())
    plan = Plan({"t": (Segment("row_wise"),)})
    for dedup, order, asked in ((True, [3, 5], [0.75, 0.25]), (False, [5, 3], [9 / 4, 3 / 4])):
        found = candidates(presence, [table], [table], plan, dedup, 4)
        assert found.ids_M.tolist() == order and found.asked_M.tolist() == asked


def test_bytes_by_hand() -> None:
    """Three of four parts leave a device: 4 + 16 + 16 for a row asked for; 16 + 4, and 16, for a hot one."""
    found = by_hand([3.0, 1.0, 0.5])
    costs = [estimate(count, found, HotCopies(4), None) for count in (0, 1, 3)]
    assert [of.cost for of in costs] == pytest.approx([0.75 * 4.5 * 36, 0.75 * (1.5 * 36 + 36), 0.75 * 3 * 36])
    assert [of.covered for of in costs] == pytest.approx([0, 12 / 28, 18 / 28])
    assert [of.held_bytes for of in costs] == [0, 20, 60]


def test_copies_on_hosts_by_hand() -> None:
    """Two hosts of two devices: as many bytes as copies on devices; half a row is held, and a whole one in a step."""
    found, on_hosts = by_hand([3.0, 1.0, 0.5]), HotCopies(4, 2, True)
    for count in (0, 1, 3):
        one, other = (estimate(count, found, copies, None) for copies in (HotCopies(4), on_hosts))
        assert dataclasses.replace(other, held_bytes=one.held_bytes) == one
    assert estimate(3, found, on_hosts, None).held_bytes == 3 * (16 / 2 + 16 / 4)
    assert on_hosts.step_bytes(16, 16) == 16 + 16 / 2 + 16 / 4 and HotCopies(4).step_bytes(16, 16) == 20
    works = [(w.kernel, w.sizes["bytes"], w.sizes["devices"], w.sizes["hosts"]) for w in on_hosts.works(5, 16)[:4]]
    inside, across = (2, 1), (2, 2)
    assert works == [
        ("all_gather", 5 * 16, *inside),
        ("reduce_scatter", 5 * 20, *inside),
        ("reduce_scatter", 5 * 20 / 2, *across),
        ("all_gather", 5 * 16 / 2, *across),
    ]
    leaving = sum(size * (1 - 1 / each) for _, size, each, _ in works)
    assert leaving == 0.75 * 5 * (2 * 16 + 4)


def test_loads_are_what_devices_hold_in_either_form() -> None:
    """40 rows of 16 bytes and 32 of Adam's slots, on two hosts of two; the rest of both tables is spread."""
    for copies, each in (("device", 16 + 32 / 4), ("host", 16 / 2 + 32 / 4)):
        config, shape = run(40, copies=copies), (1, 2, 2)
        source = config.data.open()
        tables, features = specs(config, source.schema)
        plan = resolve(config, source, tables, features, shape)[0]
        loads_NxK = workload(config, source, tables, features, shape).of_plan(bind(plan, tables, features, 4, hosts=2))
        assert loads_NxK[:, 0].tolist() == [(300 + 5000) / 4 * 48 + 40 * each] * 4


def test_a_network_between_hosts_counts_by_the_form() -> None:
    """Only links between hosts take time. With copies on hosts each device sends its own part over its own link."""
    machine = open_machine("h100")
    slow = dataclasses.replace(
        machine,
        rates=machine.rates
        | {
            name: dataclasses.replace(machine.rates["link"], value=value)
            for name, value in (("network", 1e6), ("network_latency", 0.0), ("link_latency", 0.0), ("link", 1e18))
        },
    )
    found = by_hand([1.0] * 4096)
    costs = [
        estimate(4096, found, HotCopies(8, 2, per_host), slow, False).cost
        - estimate(4096, found, HotCopies(8), slow, False).cost
        for per_host in (False, True)
    ]
    # A ring of all devices carries 7/8 over four links between hosts; four rings of two carry half of a quarter each.
    assert costs[0] / costs[1] == pytest.approx((7 / 8 / 4) / (1 / 2 / 4), rel=1e-3)


def test_small_tables_join_hot_rows() -> None:
    """A table that all devices have copies of is routed as cheaply as hot rows are, once there is one."""
    config = run("auto", plan="auto", batch_size=800)
    source = config.data.open()
    tables, features = specs(config, source.schema)
    plan = make_plan("auto", tables, config.embedding.exchange)
    found, presence = ranked(plan, config, source, tables, features, SHAPE)
    small = presence.occurrences("sparse_0").sum()
    assert found.tables == ("sparse_1",) and found.joining_ids == found.other_ids == small == pytest.approx(800)
    held = hot.with_hot_rows(plan, hot.choose(found, presence, run(1, plan="auto"), HotCopies(4)), tables)
    assert held.tables["sparse_0"][0].placement == "hot"
    shares = [estimate(count, found, HotCopies(4), None).covered for count in (0, 1)]
    assert shares == pytest.approx([0, (800 + found.found_M[0]) / 1600])
    fixed = dataclasses.replace(tables[0], placement="data_parallel")
    stays = candidates(presence, [fixed, tables[1]], [tables[1]], plan, True, 4)
    assert (stays.joining_ids, stays.other_ids) == (0, small)


def test_owners_of_a_cpu_sort_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key and place in one integer (`segment_sums.py`), others pairs, which take a CPU four times as long."""
    found: list[int] = []

    def sort(keys: float, operands: int, moved: float) -> Work:
        found.append(operands)
        return work.sort(keys, operands, moved)

    monkeypatch.setattr(hot, "sort", sort)
    for platform in ("cpu", "gpu"):
        machine = dataclasses.replace(open_machine("h100"), platform=platform)
        estimate(0, by_hand([1.0] * 64), HotCopies(4), machine)
    assert found == [1, 2]


def test_none_is_an_answer_with_its_reason() -> None:
    """With dedup no row is asked for more than once, so that no copy saves bytes."""
    plan, choice = resolved(run("auto"))
    assert choice.rows == 0 and choice.why.startswith("none: by bytes sent")
    assert all(len(segments) == 1 for segments in plan.tables.values())
    text = hot.hot_table(hot.describe_hot(choice))
    assert "hot rows: 0 (none" in text and f"{choice.curve[1].rows:,}" in text


def test_as_many_as_pay() -> None:
    """Without dedup by bytes; and with a machine, whose all-reduces cost nothing, by its time. Memory bounds both."""
    plan, choice = resolved(run("auto", dedup=False, plan="auto", batch_size=800))
    best = min(choice.curve, key=lambda of: of.cost)
    assert choice.rows == best.rows > 0
    assert plan.tables["sparse_0"][0].placement == "hot" == plan.tables["sparse_1"][0].placement
    each = 16 + 2 * 16 / 4  # a row, and a quarter of two slots of Adam
    tight: dict[str, Any] = {"dedup": False, "batch_size": 800, "memory_mib": (best.rows * each - 1) / 2**20}
    few = resolved(run("auto", **tight))[1]
    assert few.rows < best.rows and max(of.rows for of in few.curve) < best.rows
    plan, more = resolved(run("auto", plan="auto", copies="host", **tight), (1, 2, 2))  # half as much of each row
    assert more.rows >= best.rows and more.unit == "bytes"
    assert all(segments[0].placement == "hot_per_host" for segments in plan.tables.values())
    assert f"hot rows: {more.rows:,}, a copy on every host (by" in hot.hot_table(hot.describe_hot(more))
    h100 = open_machine("h100")
    free = dataclasses.replace(
        h100, rates=h100.rates | {"link_latency": dataclasses.replace(h100.rates["link"], value=0.0)}
    )
    found = by_hand([1.0] * 4096)
    assert estimate(4096, found, HotCopies(4), free, False).cost < estimate(0, found, HotCopies(4), free, False).cost


def test_a_data_sheet_says_nothing_of_the_host() -> None:
    """No curve says how much of a host's routing copies save. The reason says so, unless devices route."""
    presence = Presence({"t": Items(8, np.array([3]), np.array([1]), np.array([1]))}, 1, 4, 64, np.zeros(0))
    found, config, untold = by_hand([1.0] * 64), run("auto", machine="h100"), "does not say how long a host routes"
    assert untold not in hot.choose(found, presence, config, HotCopies(4)).why
    on_host = dataclasses.replace(config, train=dataclasses.replace(config.train, routing="host"))
    assert untold in hot.choose(found, presence, on_host, HotCopies(4)).why
    by_bytes = hot.choose(found, presence, run("auto"), HotCopies(4))
    assert untold not in by_bytes.why and "Name a machine" in by_bytes.why


def test_not_beside_a_plan_file() -> None:
    with pytest.raises(ConfigError, match=r"embedding\.hot\.rows=0"):
        hot.refuse_twice(Plan({}), "plan.json")
    with pytest.raises(ConfigError, match="rows is -1"):
        HotConfig(-1)
