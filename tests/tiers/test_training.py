"""Training with rows on the host is training with all rows on the devices, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cached_training import (
    OPTIMIZERS,
    STEPS,
    B,
    V,
    bits,
    ends,
    in_order,
    make,
    stream_of,
    trained,
    whole,
    with_rows,
)
from support.contract import OPTIONS
from support.problems import Problem, trainer_of

from recjax.config.run import HotConfig
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.errors import ConfigError, TrainingError
from recjax.planning.tier_replay import homes_of, replay
from recjax.tiers import tier as tiers
from recjax.tiers.store import RowStore
from recjax.tiers.tier import Tier
from recjax.tiers.transfers import Transfers
from recjax.train.hot_periods import HotPeriods
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]


def test_bits_are_those_of_rows_on_the_devices_and_a_run_goes_on_with_either(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("adagrad", "momentum")
    problem = make(names, True)
    losses, middle, end = whole(names, 2, True, "row_wise")
    trainer = trainer_of(problem, 2, "row_wise", cache_bytes=6_000)
    assert [group.rows < group.homes for group in trainer.bound.groups] == [True, True]
    state, before = trained(problem, trainer, trainer.init_state(), 0, STEPS // 2)
    counts = state.host.tier.figures()
    homes = [homes_of(trainer.bound, batch) for batch in problem.batches]
    told = replay(trainer.bound, homes, STEPS // 2 + 1, 4)  # the batch after these is being prepared
    assert (told.total("hits"), told.total("misses")) == (counts["hits"], counts["misses"])
    assert bits(trainer.export(state)) == jax.tree.map(np.ndarray.tobytes, middle)
    with monkeypatch.context() as patched:
        patched.setattr(RowStore, "write", None)  # the store is up to date, and is not written again
        saved = load(trainer.checkpoint(state))
    assert all(0 < len(of["rows"]) == len(of["positions"]) < V for of in saved["written"].values())
    state, after = trained(problem, trainer, state, STEPS // 2, STEPS)  # a new stream: an empty cache
    assert before + after == losses
    assert bits(trainer.export(state)) == end

    then = trainer_of(problem, 2, "row_wise")
    host = state.host
    for trainer_of_rest, arrays, host_of_rest in ((trainer, middle, host), (then, saved, None)):
        start = trainer_of_rest.restore(arrays, 25, host=host_of_rest)
        state, again = trained(problem, trainer_of_rest, start, 25, STEPS)
        assert again == losses[25:]
        assert bits(trainer_of_rest.export(state)) == end

    write, gate = RowStore.write, threading.Event()

    def waits(*given: Any) -> None:
        gate.wait(120)
        write(*given)

    with monkeypatch.context() as patched:  # nothing is written for 20 steps, in which rows come back
        start = trainer.restore(saved, 25, host=host)
        patched.setattr(RowStore, "write", waits)
        so_far = host.tier.read_while_waiting
        state, again = trained(problem, trainer, start, 25, 45)
        assert host.tier.read_while_waiting > so_far
        gate.set()
        state, rest = trained(problem, trainer, state, 45, STEPS)
    assert again + rest == losses[25:]
    assert bits(trainer.export(state)) == end

    other = trainer_of(problem, 1, "row_wise", cache_bytes=9_500)
    assert len(other.bound.cached) == 2
    elsewhere = other.init_state().host
    for arrays in (middle, saved):
        assert bits(other.export(other.restore(arrays, 25, host=elsewhere))) == jax.tree.map(np.ndarray.tobytes, middle)
    found = load(other.checkpoint(other.restore(saved, 25, host=elsewhere)))
    assert in_order(found) == in_order(saved)

    logits = [
        np.concatenate([found for _, found in t.predict(s, t.inputs_of(problem.batches[:9], B, s.host))])
        for t, s in ((trainer, trainer.restore(middle, 25, host=host)), (then, then.restore(middle, 25)))
    ]
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.full
def test_two_states_of_one_trainer_leave_each_other_alone() -> None:
    """Rows on the host are a state's own, so that a trainer holds nothing that changes."""
    names = ("adagrad", "momentum")
    problem = make(names, True)
    losses, middle, _ = whole(names, 2, True, "row_wise")
    trainer = trainer_of(problem, 2, "row_wise", cache_bytes=6_000)
    state, before = trained(problem, trainer, trainer.init_state(), 0, 10)
    other, again = trained(problem, trainer, trainer.init_state(), 0, 5)
    state, rest = trained(problem, trainer, state, 10, STEPS // 2)
    assert before + rest == losses[: STEPS // 2]
    assert again == losses[:5]
    assert bits(trainer.export(state)) == jax.tree.map(np.ndarray.tobytes, middle)
    other, more = trained(problem, trainer, other, 5, 10)
    assert more == losses[5:10]


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "cache_bytes", "plan"),
    [pytest.param(1, 40_000, "row_wise", marks=pytest.mark.wide), (8, 14_000, "table_wise")],
)
def test_bits_of_all_optimizers(devices: int, cache_bytes: int, plan: str, tmp_path: Path) -> None:
    """Over two turns of the rows that batches name most."""
    problem = make(tuple(OPTIMIZERS))
    on_disk: Any = {"dram_bytes": 9_000, "disk": str(tmp_path)} if devices > 1 else {}
    trainer = trainer_of(problem, devices, plan, cache_bytes=cache_bytes, **on_disk)
    assert len(trainer.bound.cached) == len(trainer.bound.groups)
    found = []
    for one in (trainer, trainer_of(problem, devices, plan)):
        state, losses = trained(problem, one, one.init_state(), 0, 20)
        found.append((losses, bits(one.export(state))))
    assert found[0] == found[1]


@pytest.mark.full
@pytest.mark.parametrize("hot", [pytest.param(False, marks=pytest.mark.wide), True])
def test_bits_of_replica_groups_that_agree_in_each_step(
    hot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over memory; and beside hot rows, which all devices of all groups hold, over a disk that each step waits for."""
    monkeypatch.setattr(tiers, "_WAITING_BYTES", 0 if hot else 2**20)
    names = ("adagrad", "momentum")
    problem = make(names, True)
    plan = hot_plan(problem) if hot else "row_wise"
    on_disk: Any = {"dram_bytes": 9_000, "disk": str(tmp_path)} if hot else {}
    trainer = trainer_of(problem, 4, plan, replicas=2, cache_bytes=6_000, **on_disk)
    assert (len(trainer.bound.cached), len(trainer.bound.hot)) == (len(names), int(hot))
    state = trainer.init_state()
    assert state.host.tier is not None
    if not hot:
        shards = [s.data for x in jax.tree.leaves((state.tables, state.slots)) for s in x.addressable_shards]
        assert state.host.tier.figures()["row_bytes"] == sum(data.nbytes for data in shards)  # nothing is written
    assert ends(problem, trainer, state) == ends(problem, trainer_of(problem, 4, plan, replicas=2))
    assert (state.host.tier.figures()["disk_rows"] > 0) == hot


def assert_bits(problem: Problem, trainer: Trainer, other: Trainer) -> dict[str, int]:
    """Checks that both end alike, and that the caches' hits and misses are those of a replay; returns the figures."""
    start = trainer.init_state()
    assert ends(problem, trainer, start) == ends(problem, other)
    assert start.host.tier is not None
    counts = start.host.tier.figures()
    told = replay(trainer.bound, [homes_of(trainer.bound, batch) for batch in problem.batches], 21, 4)
    assert (told.total("hits"), told.total("misses")) == (counts["hits"], counts["misses"])
    return counts


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "hot", "how"),
    [
        pytest.param(4, "hot", {"hosts": 2}, marks=pytest.mark.wide),
        (8, "hot_per_host", {"hosts": 2, "replicas": 2, "pieces": 2}),
    ],
)
def test_bits_over_hosts(devices: int, hot: str, how: dict[str, int], tmp_path: Path) -> None:
    """Rows travel in two steps, by relays that list slots; of one table one host has all rows, and hot rows none."""
    names = ("adagrad", "momentum")
    problem = make(names, True)
    plan = Plan({**hot_plan(problem, placement=hot).tables, names[1]: (Segment("table_row_wise"),)})
    trainer = trainer_of(problem, devices, plan, cache_bytes=4_000, dram_bytes=9_000, disk=str(tmp_path), **how)
    assert [group.two_step for group in trainer.bound.cached] == [True, True]
    counts = assert_bits(problem, trainer, trainer_of(problem, devices, plan, **how))
    assert counts["disk_rows"] > 0


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.wide)])
def test_bits_of_pooled_vectors(devices: int) -> None:
    """One table sends rows, too, for it has a sequence; the vectors of the other are sums and means alone."""
    names = ("adagrad", "momentum")
    problem = make(names, True)
    ways = zip(names, ("table_wise", "row_wise"), strict=True)
    plan = Plan({name: (Segment(way, exchange=Exchange(kind="pooled")),) for name, way in ways})
    trainer = trainer_of(problem, devices, plan, cache_bytes=3_000)
    assert [bool(group.sources) for group in trainer.bound.cached] == [True, False]
    assert_bits(problem, trainer, trainer_of(problem, devices, plan))


def delayed(call: Any, delay_s: float) -> Any:
    def later(*given: Any) -> Any:
        time.sleep(delay_s)
        return call(*given)

    return later


@pytest.mark.full
@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.wide) if n > 1 else n for n in (1, 2, 8)])
@pytest.mark.parametrize("share", [pytest.param(x, marks=pytest.mark.wide) if x else x for x in (0, 0.05, 0.2)])
def test_bits_with_caches_of_all_sizes(
    devices: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All optimizers; over memory, over a disk, and over one so slow that steps wait for it."""
    names, rows = tuple(OPTIMIZERS), 4000
    problem = make(names, rows=rows)
    losses, _, end = whole(names, devices, False, "row_wise", rows)
    first: tuple[Trainer, Tier] | None = None
    for dram_bytes, delay_s in ((0, 0.0), (20_000, 0.0), (20_000, 0.002)):
        trainer = with_rows(problem, devices, share, dram_bytes=dram_bytes, disk=str(tmp_path) if dram_bytes else "")
        start = trainer.init_state()
        tier = start.host.tier
        assert tier is not None
        if first is not None:  # compile once
            vars(trainer)["step_program"] = first[0].step_program
            tier._movers = first[1]._movers
        first = first or (trainer, tier)
        assert len(trainer.bound.cached) == len(names)
        with monkeypatch.context() as patched:
            patched.setattr(Transfers, "_move", delayed(Transfers._move, delay_s))
            state, found = trained(problem, trainer, start, 0, STEPS)
            assert found == losses
            assert bits(trainer.export(state)) == end
            figures = tier.figures()
            assert (figures["records_read"] > 0) == (figures["disk_rows"] > 0) == bool(dram_bytes)
            tier.close()


@pytest.mark.full
@pytest.mark.wide  # `test_bits_over_hosts` has rows in two pieces
@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (4, 2)])
def test_bits_with_rows_that_come_in_pieces(devices: int, hosts: int) -> None:
    problem = make(("adagrad", "momentum"), True)
    ends: list[Any] = []
    ways: tuple[dict[str, Any], ...] = ({}, {"cache_bytes": 6_000, "pieces": 3})
    for how in ways:
        trainer = trainer_of(problem, devices, "row_wise", hosts=hosts, **how)
        assert {group.row_pieces for group in trainer.bound.groups} == {how.get("pieces", 1)}
        assert bool(trainer.bound.cached) == bool(how)
        state, losses = trained(problem, trainer, trainer.init_state(), 0, STEPS // 2)
        ends.append((losses, bits(trainer.export(state))))
    assert ends[0] == ends[1]


@pytest.mark.full
@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.wide) if n != 2 else n for n in (1, 2, 8)])
def test_bits_with_caches_of_all_rows(devices: int, tmp_path: Path) -> None:
    """Over a disk that gets its rows from the checkpoint alone, since none leaves a cache before."""
    problem = make(("momentum",))
    trainer = with_rows(problem, devices, 1, dram_bytes=4_000, disk=str(tmp_path))
    assert [group.rows for group in trainer.bound.cached] == [group.homes for group in trainer.bound.groups]
    found, tier = [], None
    for one in (trainer_of(problem, devices), trainer):
        state, losses = trained(problem, one, one.init_state(), 0, 12)
        found.append((losses, bits(one.export(state))))
        tier = state.host.tier
    assert found[0] == found[1]
    assert tier is not None
    counts = tier.figures()
    assert 0 < counts["written_rows"] <= counts["misses"]  # those of the batch after the last, too
    assert counts["records_read"] == counts["records_read_aside"]
    tier.close()


def hot_plan(problem: Problem, first: int = 0, pooled: bool = False, placement: str = "hot") -> Plan:
    """Hot rows of all tables but the last: some of those that batches name most from `first` on, and some anywhere."""
    plan: dict[str, tuple[Segment, ...]] = {}
    for number, table in enumerate(problem.tables):
        ids = tuple(sorted({*range(first, first + 40), first, *range(number, table.rows, 97)}))
        exchange = Exchange(kind="pooled" if pooled and number else "rows")
        way = ("row_wise", "table_wise")[number % 2]
        plan[table.name] = (Segment(placement, RowIds(ids)), Segment(way, "rest", exchange=exchange))
    plan[problem.tables[-1].name] = (Segment("row_wise"),)
    return Plan(plan)


@pytest.mark.full
@pytest.mark.wide
@pytest.mark.parametrize(
    ("devices", "pooled", "placement"),
    [(1, False, "hot"), (2, False, "hot_per_host"), (8, False, "hot"), (8, True, "hot")],
)
def test_bits_beside_hot_rows(devices: int, pooled: bool, placement: str, tmp_path: Path) -> None:
    """Over memory and a disk, with the smallest caches and with a fifth of the rows; resumed in the middle."""
    problem, how = make(("adagrad", "momentum", "adam"), True), OPTIONS
    plan = hot_plan(problem, pooled=pooled, placement=placement)
    assert how.clip_norm > 0  # so that what one table does depends on all
    whole = trainer_of(problem, devices, plan)
    state, losses = trained(problem, whole, whole.init_state(), 0, STEPS // 2)
    middle = bits(whole.export(state))
    state, rest = trained(problem, whole, state, STEPS // 2, STEPS)
    end = bits(whole.export(state))
    logits = predicted(problem, whole, state)
    program = None
    for share, dram_bytes in itertools.product((0, 0.2), (0, 6_000)):
        trainer = with_rows(
            problem, devices, share, plan, dram_bytes=dram_bytes, disk=str(tmp_path) if dram_bytes else ""
        )
        assert len(trainer.bound.hot) == 2
        assert len(trainer.bound.cached) == 3
        if program is not None and program[0] == trainer.bound:
            vars(trainer)["step_program"] = program[1]
        program = trainer.bound, trainer.step_program
        state, found = trained(problem, trainer, trainer.init_state(), 0, STEPS // 2)
        assert found == losses
        saved = load(trainer.checkpoint(state))
        assert bits(trainer.export(state)) == middle
        state, found = trained(problem, trainer, trainer.restore(saved, STEPS // 2, host=state.host), STEPS // 2, STEPS)
        assert found == rest
        assert bits(trainer.export(state)) == end
        assert predicted(problem, trainer, state) == logits
        again = load(trainer.checkpoint(state))
        assert state.host.tier is not None
        counts = state.host.tier.figures()
        assert (counts["disk_rows"] > 0) == bool(dram_bytes)
        told = replay(trainer.bound, [homes_of(trainer.bound, b) for b in problem.batches[STEPS // 2 :]], STEPS // 2, 4)
        assert (told.total("hits"), told.total("misses")) == (counts["hits"], counts["misses"])
        for table in problem.tables:
            segments = trainer.bound.segments(table.name)
            parts = dataclasses.astuple(told.parts[table.name])
            assert sum(parts) + sum(s.band.size for g, s in segments if not g.cached) == table.rows
            rows = again["written"][table.name]["positions"]
            assert len(np.unique(rows)) == len(rows)  # no hot row is on the host, too
        state.host.close()
    for other in (trainer_of(problem, devices, hot_plan(problem, 60)), trainer_of(problem, 2, cache_bytes=6_000)):
        assert bits(other.export(other.restore(saved, STEPS // 2))) == middle  # other rows are hot, or none


def predicted(problem: Problem, trainer: Trainer, state: TrainState) -> list[bytes]:
    return [
        found.tobytes() for _, found in trainer.predict(state, trainer.inputs_of(problem.batches[:3], B, state.host))
    ]


def test_a_cache_that_is_too_small_is_an_error_before_the_step() -> None:
    problem = make(("adagrad", "momentum"), True)
    trainer = trainer_of(problem, 1, "row_wise", cache_bytes=1_200)
    with pytest.raises(TrainingError, match=r"two batches in a row name \d+ rows .* raise tier.device_bytes"):
        next(stream_of(problem, trainer, trainer.init_state().host))


def test_what_caches_cannot_do_is_refused() -> None:
    problem = make(("adagrad", "momentum"), True)
    divided = (Segment("row_wise", RowIds((1, 5))), Segment("row_wise", "rest"))
    every = dataclasses.replace(problem.tables[0], optimizer=RowWiseAdagrad(0.2, every_row=True))
    other = dataclasses.replace(problem, tables=(every, problem.tables[1]))
    for words, what, devices, plan, how in (
        ("every_row", other, 2, "row_wise", {}),
        ("replica groups", problem, 4, "row_wise", {"replicas": 2, "independent": True}),
        ("dedup", problem, 2, "row_wise", {"dedup": False}),
        ("rows that are not hot", problem, 2, Plan({t.name: divided for t in problem.tables}), {}),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer_of(what, devices, plan, cache_bytes=4_000, **how)
    assert not trainer_of(problem, 1, "data_parallel", cache_bytes=4_000).bound.cached  # all devices have all of it
    trainer = trainer_of(problem, 2, "row_wise", cache_bytes=6_000)
    state = trainer.init_state()
    inputs = next(stream_of(problem, trainer, state.host))
    with pytest.raises(ConfigError, match=r"tier\.device_bytes=0"):
        trainer.train_step(state, inputs)
    with pytest.raises(ConfigError, match=r"train_inputs\(host=state\.host\)"):
        trainer.stages()
    with pytest.raises(ConfigError, match=r"dataclasses\.replace\(state, host="):
        trainer.export(jax.tree.map(jnp.copy, state))  # which is of the arrays alone
    trainer = trainer_of(problem, 2, hot_plan(problem), cache_bytes=6_000)
    embedding = dataclasses.replace(trainer.config.embedding, hot=HotConfig(refresh=5))
    with pytest.raises(ConfigError, match=r"cannot become hot .* Set embedding\.hot\.refresh=0"):
        HotPeriods(dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, embedding=embedding)))
