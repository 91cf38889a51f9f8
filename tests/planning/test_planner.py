"""The planner: what it chooses where that is plain, budgets, reasons, and a plan kept in a run and used again."""

import dataclasses
import itertools
import json
import time

import pytest
from support.commands import SMALL, assert_refused, inside, write_preset
from support.machines import MACHINE

from recjax.config.run import PlannerConfig
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import check_plan, make_plan
from recjax.embedding.segment import EXACT, Exchange
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.assign import POOLING, WAYS, Demand, as_plan, sizes
from recjax.planning.loads import Profile, TableUse, Workload
from recjax.planning.machine import Quantity, open_machine, write
from recjax.planning.planner import BAND, Planner, allowed, answer, exact_sizes, plain_ways, price, reason, search
from recjax.planning.predict import HostWork
from recjax.planning.question import GIB, Question, needed
from recjax.planning.step_sizes import DenseSizes

pytestmark = pytest.mark.light_compile

H200 = open_machine("h200")
DENSE = DenseSizes(((16, 16), (16, 1)), 300, 1, 4, None, 32)
HOST = HostWork(1, 1, 1, 1, 1, 1, 8, 2)


def asked(
    *shapes, devices=8, batch=8192, machine=H200, exchange=None, hosts=1, dedup=True, host_routes=True, **settings
):
    """Tables t0, t1, ... of (rows, D, ids of a bag, share of a device's ids that are distinct)."""
    tables = tuple(TableSpec(f"t{n}", rows, dim, Sgd(0.1)) for n, (rows, dim, _, _) in enumerate(shapes))
    features = tuple(FeatureSpec(t.name, t.name, ids) for t, (_, _, ids, _) in zip(tables, shapes, strict=True))
    uses = {
        t.name: TableUse(ids, min(t.rows, batch / devices * ids * share))
        for t, (_, _, ids, share) in zip(tables, shapes, strict=True)
    }
    work = Workload(Profile(uses, "by hand"), batch, devices, hosts, dedup=dedup)
    demand = Demand(tables, features, work, exchange or Exchange(kind="auto"), host_routes)
    host = dataclasses.replace(HOST, samples=batch, devices=devices)
    return Question(demand, DENSE, machine, host, PlannerConfig(**settings))


def answered(question):
    return answer(question, make_plan("auto", question.demand.tables))


def slow_links(bytes_per_s):
    rates = H200.rates | {
        "link": Quantity(bytes_per_s, "B/s", "a test"),
        "link_latency": Quantity(0.01, "us", "a test"),
    }
    return dataclasses.replace(H200, rates=rates)


def test_bags_of_many_distinct_ids_are_pooled_where_links_are_slow():
    """Rows would be 100 times as many bytes as vectors: eight tables of one D, one for each device."""
    found = answered(asked(*[(1_000_000, 64, 100, 1.0)] * 8, machine=slow_links(1e8)))
    assert set(found.ways.values()) <= set(POOLING) and not found.kept_plain
    assert {s.exchange.kind for segments in found.plan.tables.values() for s in segments} == {"pooled"}
    assert found.prediction.step_us < found.plain.step_us / 10
    assert all(of["next"] in ("rows", "pooled", "whole", None) for of in found.tables.values())


def test_a_table_whose_rows_travel_many_times_over_is_copied():
    """Without dedup a device sends for each row 100 times; and it is over 64 KiB, so that the plain rule spreads it."""
    found = answered(asked((1000, 64, 10, 0.1), machine=slow_links(1e7), batch=80_000, dedup=False))
    assert found.ways["t0"] == "copy" and found.plan.tables["t0"][0].placement == "data_parallel"
    sums_us = 2 * 7 / 8 * (1000 * 65 + sum(k * n + n for k, n in DENSE.layers)) * 4 / 1e7 * 1e6 / 0.75
    assert found.prediction.bounds["devices"] == pytest.approx(sums_us, rel=0.01)  # the closed form of the all-reduce
    rows_us = 7 / 8 * 100_000 * (4 + 2 * 256) / 1e7 * 1e6 / 0.75
    assert rows_us < found.plain.bounds["devices"] < 1.15 * rows_us  # lists have room


def test_the_plain_plan_stays_where_no_other_is_clearly_faster():
    question = asked((900_000, 16, 1, 0.5), (1_000_000, 16, 1, 0.5))
    found = answered(question)
    assert found.kept_plain and found.plan == make_plan("auto", question.demand.tables)
    assert price(found.prediction) <= (1 + BAND) * price(found.plain)


@pytest.mark.parametrize("machine", [H200, slow_links(1e9)], ids=["fast", "slow"])
def test_no_assignment_of_few_tables_is_predicted_to_be_faster_than_what_the_search_finds(machine):
    """All 64 assignments of three tables, by the same prices: the search must find one within a hundredth."""
    question = asked((2000, 32, 1, 0.9), (50_000, 32, 20, 0.6), (1_000_000, 32, 50, 0.9), machine=machine)
    planner, tables = Planner(question), question.demand.tables
    every = [dict(zip((t.name for t in tables), ways, strict=True)) for ways in itertools.product(WAYS, repeat=3)]
    assert planner.cost(search(planner)[0]) <= 1.01 * min(map(planner.cost, every))


def test_what_the_user_fixed_stays():
    question = asked((1000, 16, 5, 0.5), (1000, 16, 5, 0.5), exchange=Exchange("bfloat16", "float32", "rows"))
    tables = question.demand.tables
    assert allowed(question.demand, tables[0]) == ("copy",)  # small, as the plain rule has it: copies are not rounded
    fixed = dataclasses.replace(tables[0], placement="row_wise")
    demand = dataclasses.replace(question.demand, tables=(fixed, tables[1]))
    assert allowed(demand, fixed) == ("rows",)
    plan = as_plan(demand, plain_ways(demand), dict.fromkeys(("t0", "t1"), "a reason"))
    assert plan.tables["t0"][0].placement == "row_wise" and "placement=row_wise" in plan.tables["t0"][0].why
    pooled = dataclasses.replace(question.demand, exchange=dataclasses.replace(EXACT, kind="pooled"))
    assert allowed(pooled, tables[1]) == ("copy", "whole", "pooled")


@pytest.mark.parametrize("rows", [(10**5,) * 3, (10**5,) * 4, (5 * 10**6, 10**6, 10**6), (10**6, 10**5, 10**4)])
def test_the_search_expects_the_tables_to_be_split_that_are(rows):
    """Three equal tables on two devices are split alike; of four each has two; a very large one is split alone."""
    question = asked(*[(r, 32, 20, 0.5) for r in rows], devices=2, exchange=Exchange(kind="pooled"))
    for way in POOLING:
        ways = {t.name: way for t in question.demand.tables}
        plan = as_plan(question.demand, ways, dict.fromkeys(ways, ""))
        assert set(sizes(question.demand, ways).routed) == set(exact_sizes(question.demand, plan).routed)
        assert way == "pooled" or all(segments[0].columns == "all" for segments in plan.tables.values())


def test_tables_stay_whole_where_shards_would_send_more_than_they_even_out():
    """Six equal tables on eight devices: 24 quarters are three of half a vector on each device."""
    question = asked(*[(1_000_000, 64, 20, 1.0)] * 6, machine=slow_links(1e8))
    planner = Planner(question)
    whole, shards = ({t.name: way for t in question.demand.tables} for way in ("whole", "pooled"))
    assert planner.cost(whole) < planner.cost(shards)
    one, quarters = (
        sum(e.padded_bytes for e in sizes(question.demand, ways).vectors[0].events if e.phase == "pooled_exchange")
        for ways in (whole, shards)
    )
    assert 1.5 * one <= quarters <= 1.8 * one  # with some room for what is not even
    found = answered(question)
    assert set(found.ways.values()) == {"whole"} and not found.kept_plain
    owners = [segments[0].owners for segments in found.plan.tables.values()]
    assert {len(segments) for segments in found.plan.tables.values()} == {1} and len(set(owners)) == 6


def test_plans_that_are_compiled_are_compared_by_that():
    """By hand: the compiled second best is fastest; or all are as fast as the plain rule's, which then stays."""
    question = asked(*[(10**6, 64, 20, 1.0), (10**5, 64, 20, 1.0)], machine=slow_links(1e8), compile=2)
    sketched, plain = answered(question), make_plan("auto", question.demand.tables)
    assert not sketched.kept_plain and sketched.choices[0]["next"] == "the planner's next"
    seen = []

    def judge(plan, us):
        seen.append(plan)
        of = Planner(question).predicted(exact_sizes(question.demand, plan))
        return dataclasses.replace(of, bounds={"devices": us[len(seen) - 1]})

    found = answer(question, plain, judge=lambda plan: judge(plan, (900.0, 500.0, 1000.0)))
    assert len(seen) == 3 and seen[2] == plain and not found.kept_plain
    placed = [
        {name: [(s.placement, s.exchange.kind) for s in segments] for name, segments in plan.tables.items()}
        for plan in (found.plan, *seen)
    ]
    assert placed[0] == placed[2] != placed[1]
    choice = found.choices[0]
    assert (choice["step_ms"], choice["next_step_ms"], choice["next"]) == (0.5, 0.9, "the planner's next")
    assert "2 were compiled" in choice["why"] and found.prediction.step_us > 1000  # of sizes alone, for what follows
    seen.clear()
    kept = answer(question, plain, judge=lambda plan: judge(plan, (990.0, 1000.0, 1000.0)))
    assert kept.kept_plain and kept.plan == plain and kept.choices[0]["chosen"] == "the plain rule"


def test_plans_are_deterministic_whole_and_give_every_table_a_reason():
    shapes = [(10 ** (n % 5 + 2), 16 << n % 3, 1 + 9 * (n % 4), 0.7) for n in range(24)]
    question = asked(*shapes, machine=slow_links(1e9))
    found = answered(question)
    assert found.plan == answered(question).plan
    check_plan(found.plan, question.demand.tables)
    for table in question.demand.tables:
        text = reason(found.tables[table.name])
        assert WAYS[found.ways[table.name]] in text and "ms a step predicted" in text
        assert not found.kept_plain and text in found.plan.tables[table.name][0].why


def test_a_budget_keeps_copies_out_and_below_the_least_there_is_no_plan():
    shapes = [(1000, 64, 10, 0.1)] * 4
    how = {"machine": slow_links(1e7), "batch": 80_000, "dedup": False}
    free = answered(asked(*shapes, **how))
    assert set(free.ways.values()) == {"copy"}
    assert free.memory["tables"] == 4 * 1000 * 256  # SGD has no slots
    least = answered(asked(*shapes, **how, memory_gib=0.99 * free.memory["total"] / GIB))
    assert least is not None and "copy" not in least.ways.values()
    assert least.memory["total"] <= 0.99 * free.memory["total"]
    assert answered(asked(*shapes, **how, memory_gib=4 * 1000 * 256 / 8 / GIB)) is None


def test_memory_counts_tables_dense_and_batch_by_their_sizes():
    question = asked((1000, 16, 1, 1.0), devices=4, batch=400)
    found = needed(sizes(question.demand, {"t0": "rows"}), DENSE)
    assert found["tables"] == 250 * 64
    assert found["dense"] == 4 * 300 * 3  # parameters, one slot each, gradients
    assert found["total"] == sum(size for name, size in found.items() if name != "total")


def test_memory_counts_rows_that_every_device_holds_where_they_fit():
    """By hand: 5,000 rows of 7 words beside a table of 16,000 bytes a device and a dense part of 3,600."""
    question, ways = asked((1000, 16, 1, 1.0), devices=4, batch=400, host_routes=False), {"t0": "rows"}
    in_rows = dataclasses.replace(question.host, in_rows=True)
    question = dataclasses.replace(question, host=in_rows, resident_bytes=4 * 5000 * 7)
    found, state = question.memory(sizes(question.demand, ways)), 250 * 64 + 4 * 300 * 3
    rest = needed(sizes(question.demand, ways), DENSE)["total"]
    assert found["rows"] == 140_000 and found["total"] == rest + 140_000
    assert Planner(question).predicted(sizes(question.demand, ways)).host.source == "resident"
    for budget, fits in ((state + 2 * 140_000, True), (state + 2 * 140_000 - 8, False)):  # half of what is left
        limited = dataclasses.replace(question, settings=PlannerConfig(memory_gib=budget / GIB))
        found = limited.memory(sizes(question.demand, ways))
        assert found.get("rows", 0) == 140_000 * fits and found["total"] == rest + 140_000 * fits
        asked_for = dataclasses.replace(limited, resident_always=True).memory(sizes(question.demand, ways))
        assert asked_for["total"] == rest + 140_000
    by_host = dataclasses.replace(question, host=dataclasses.replace(in_rows, in_rows=False))
    assert by_host.memory(sizes(question.demand, ways))["total"] == rest


def test_a_thousand_tables_on_128_devices_are_planned_in_thirty_seconds():
    shapes = [(10 ** (n % 5 + 2) + n, 16 << n % 4, (1, 1, 5, 20)[n % 4], 0.6) for n in range(1000)]
    question = asked(*shapes, devices=128, hosts=16, batch=65_536)
    began = time.process_time()
    found = answered(question)
    assert time.process_time() - began < 30
    assert len(found.plan.tables) == 1000


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    path = write_preset(tmp_path_factory.mktemp("preset"))
    path.write_text(path.read_text().replace('plan="row_wise"', 'plan="auto"'))
    write(slow_machine(), path.parent / "slow.json")
    return path


def slow_machine():
    """A machine on which sending is so slow that even the largest table of the preset is better copied."""
    links = {"link": Quantity(1e5, "B/s", "a test"), "link_latency": Quantity(1.0, "us", "a test")}
    return dataclasses.replace(MACHINE, shared=False, platform="gpu", kernels={}, rates=MACHINE.rates | links)


def test_plan_explains_what_it_chose_and_without_a_machine_nothing_changes(preset, tmp_path):
    machine = f"planner.machine={preset.parent / 'slow.json'}"
    done = inside("plan", preset, machine, "mesh.devices=2", "--out", tmp_path / "plan")
    assert (tmp_path / "plan/choice.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "plan/choice.json").read_text())["tables"].keys() == {f"sparse_{n}" for n in range(3)}
    for text in (
        "chosen for a machine: ",
        "the plain rule's plan",
        "next best",
        "bucket: ",
        "routing: ",
        "memory of a",
    ):
        assert text in done.out, done.out + done.err
    plain = inside("plan", preset, "mesh.devices=2", "--json").result
    again = inside("plan", preset, "mesh.devices=2", "planner.memory_gib=1", "--json").result
    assert plain == again and "chosen" not in plain


@pytest.mark.full
def test_plans_are_compiled_for_the_machine_that_they_are_for_alone(preset, tmp_path):
    write(dataclasses.replace(slow_machine(), platform="cpu"), tmp_path / "cpu.json")
    how = ("plan", preset, "mesh.devices=2", "planner.compile=1")
    done = inside(*how, f"planner.machine={tmp_path / 'cpu.json'}")
    assert "compiling a plan for 2 device(s), to compare it" in done.err and "1 were compiled" in done.out, done.err
    other = inside(*how, f"planner.machine={preset.parent / 'slow.json'}")
    assert "is a gpu, this is a cpu: sizes alone decide" in other.err and "compiled" not in other.out
    assert_refused(inside(*how[:-1], "planner.compile=-1"), 2, "give how many plans to compile")


def test_a_machine_to_plan_by_is_refused_where_the_plan_is_given(preset, tmp_path):
    given = (preset, "planner.machine=h200", "plan=row_wise")
    assert_refused(inside("plan", *given), 2, "plan=row_wise has said so already. Set plan=auto")
    assert_refused(inside("train", *given, "--out", tmp_path / "run"), 2, "plan=row_wise has said so already")


def test_what_does_not_fit_is_refused_with_the_cheapest_change_that_would(preset):
    why = inside("plan", preset, "planner.machine=h200", "planner.memory_gib=0.00004", "mesh.devices=2")
    paragraph = assert_refused(why, 2, "no plan fits a device", "cheapest change", r"changes? no number")
    assert "planner.memory_gib=4e-05" in paragraph


@pytest.mark.full
def test_a_run_keeps_its_plan_and_goes_on_with_it_on_any_machine(preset, tmp_path):
    machine, run = tmp_path / "machine.json", tmp_path / "run"
    write(slow_machine(), machine)
    chosen = (f"planner.machine={machine}", *SMALL, "--out", run)
    assert inside("train", preset, *chosen).status == 0
    kept = json.loads((run / "plan.json").read_text())
    choice = json.loads((run / "choice.json").read_text())
    assert choice["mesh"] == [1, 1, 2] and set(choice["tables"]) == set(kept["tables"])
    machine.unlink()  # the machine that goes on does not know it
    again = inside("train", preset, *chosen[:1], "train.steps=4", "mesh.devices=2", "--out", run, "--json").result
    assert json.loads((run / "plan.json").read_text()) == kept
    on_one = inside("eval", run, "mesh.devices=1", "--json").result
    assert on_one["logloss"] == pytest.approx(again["eval"]["logloss"], rel=1e-5)  # planned anew, for one device


@pytest.mark.full
def test_a_planned_run_with_hot_rows_goes_on_with_them(tmp_path):
    """As long as it has room for them; it is by the planner's machine that they are chosen."""
    machine, run = tmp_path / "machine.json", tmp_path / "run"
    write(H200, machine)
    chosen = (
        "synthetic",
        "data.rows=60000,300,40000",
        "data.ids_per_bag=1,0,3",
        "data.weighted=false",
        "mesh.devices=2",
        "data.train_rows=4096",
        "train.batch_size=64",
        f"planner.machine={machine}",
        "train.checkpoint_every=3",
        "embedding.tables.sparse_0.placement=row_wise",
        "embedding.tables.sparse_2.placement=row_wise",
    )
    hot = "embedding.hot.rows=16"
    assert inside("train", *chosen, hot, "train.steps=3", "--out", run).status == 0
    kept = json.loads((run / "plan.json").read_text())
    sets = [s["rows"]["ids"] for own in kept["tables"].values() for s in own if isinstance(s["rows"], dict)]
    assert sum(map(len, sets)) == 16
    machine.unlink()
    again = inside("train", *chosen, hot, "train.steps=6", "--out", run, "--json").result
    assert again["steps"] == 6 and json.loads((run / "plan.json").read_text()) == kept
    write(H200, machine)
    auto = inside("plan", *chosen, "embedding.hot.rows=auto", "--json").result["hot"]
    assert auto["unit"] == "us" and len(auto["curve"]) > 1
    used = inside("plan", *chosen, "--json").result["chosen"]["memory_bytes"]["total"]
    tight = f"planner.memory_gib={(used + 100 * 80) / GIB}"  # a row and its slot: 68 bytes, on two devices 66
    bounded = inside("plan", *chosen, tight, "embedding.hot.rows=auto", "--json").result["hot"]
    assert [of["rows"] for of in bounded["curve"]] == [0, 64]
