"""Replica groups: exact unless one asks for something else; and what independent ones are, step by step and on disk."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import Placed, Problem, compare, problem, run_oracle, run_sharded, trainer_of
from support.routing import locate

import recjax
from recjax.config.run import RunConfig
from recjax.config.train import TrainConfig
from recjax.data.source import between
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.buffers import initial_rows
from recjax.embedding.layout import SUMMED
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.quantize import decode, encode
from recjax.embedding.replica_groups import make_average
from recjax.embedding.routing import capacity, host
from recjax.embedding.routing import device as route_device
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.traffic import sent_bytes
from recjax.errors import ConfigError
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import BATCH_AXES, MeshConfig
from recjax.planning.compiled_collectives import collectives, members
from recjax.train.build import build_trainer
from recjax.train.step import StepOptions
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

B, D = 44, 8
ADAGRAD = RowWiseAdagrad(0.1)
OWN: Any = {"replica_sync": "never", "replica_init": "own"}


@functools.cache
def make(optimizer: Any = ADAGRAD, steps: int = 50, rows: tuple[int, ...] = (300, 37, 50, 41)) -> Problem:
    """An epoch is 500 samples, so that its last batch is short and leaves the last devices without a sample."""
    bags, weighted = (1, 3, 0, 1), (False, True, False, False)
    source = Synthetic(rows=rows, ids_per_bag=bags, weighted=weighted, train_rows=500).open()
    model = DLRMConfig(bottom=(16, D), top=(16, 1))
    return problem(source, model, optimizer, D, steps=steps, batch_size=B, tx=optax.sgd(0.1))


def built(
    problem: Problem, devices: int, replicas: int, plan: str | Plan = "row_wise", dtype: Any = np.float32, **how: Any
) -> Placed:
    """A problem on a mesh of replica groups."""
    return Placed.of(problem, trainer_of(problem, devices, plan, dtype, replicas=replicas, **how))


PLACED = ("column_wise", "data_parallel", "row_wise", "table_wise")
MIXED = Plan({f"sparse_{i}": (Segment(placement),) for i, placement in enumerate(PLACED)})


@pytest.mark.parametrize(
    ("devices", "replicas", "optimizer"),
    [pytest.param(4, 2, ADAGRAD, marks=pytest.mark.wide), (8, 4, Adam(0.01))],
)
def test_synchronous_groups_give_the_numbers_of_any_mesh(devices: int, replicas: int, optimizer: Any) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        result = run_sharded(make(optimizer), devices, MIXED, np.float64, replicas=replicas)
        compare(result, run_oracle(make(optimizer), np.float64), loss_rtol=1e-9, atol=1e-9)


def test_copies_of_the_tables_are_equal_to_the_bit_and_work_in_place() -> None:
    """All groups, in float32, where another order of additions would show; with clipping, and a table of 4 MB."""
    clipped = dataclasses.replace(make(ADAGRAD, 12, (130_000, 37, 50, 41)), options=StepOptions(clip_norm=0.1))
    placed = built(clipped, 8, 4)
    state = placed.steps(placed.trainer.init_state())
    for array in jax.tree.leaves((state.tables, state.slots)):
        of_part = collections.defaultdict(list)
        for shard in array.addressable_shards:
            of_part[shard.index[0].start].append(np.asarray(shard.data))
        assert [len(same) for same in of_part.values()] == [4, 4]
        for first, *others in of_part.values():
            assert first.std() > 0 and all(np.array_equal(first, other) for other in others)
    compiled = placed.trainer.step_program.lower(state, placed.inputs[0]).compile()
    memory = compiled.memory_analysis()
    table = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.tables))
    assert table > 2_000_000 > 4 * memory.temp_size_in_bytes  # and donated:
    assert memory.alias_size_in_bytes > table


def test_the_collectives_are_those_of_one_group_and_one_exchange_between_groups() -> None:
    made = make(steps=3)
    placed = built(made, 8, 2)
    compiled = placed.compiled
    found = collections.defaultdict(list)
    for c in collectives(compiled.as_text()):
        found[c.phase, c.kind].append((members(c.groups, 8), c.result_bytes))
    inside, across = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    (group,) = placed.trainer.bound.groups
    C, K = placed.capacities[group.name], placed.capacities[group.name + SUMMED]
    assert K < 4 * C  # equal rows of a group's devices travel once to the other group
    between = found.pop(("replica_exchange", "all-gather"))
    assert all(groups == across for groups, _ in between)
    assert sum(size for _, size in between) == 2 * K * (4 + D * 4)
    assert {key: [groups for groups, _ in value] for key, value in found.items()} == {
        ("id_exchange", "all-to-all"): [inside],
        ("row_exchange", "all-to-all"): [inside],
        ("grad_exchange", "all-to-all"): [inside],
        ("dense_grads", "all-reduce"): [[list(range(8))]],
        ("finite_check", "all-reduce"): [inside],
    }
    assert found["grad_exchange", "all-to-all"][0][1] == 4 * C * D * 4


@pytest.mark.parametrize(
    ("hosts", "plan"),
    [
        (1, MIXED),
        (2, "row_wise"),
        pytest.param(1, "row_wise", marks=pytest.mark.wide),
        pytest.param(2, MIXED, marks=pytest.mark.wide),
    ],
)
def test_devices_route_to_owners_of_their_own_group(hosts: int, plan: Any) -> None:
    made = make(steps=3)
    placed = built(made, 8, 2, plan, hosts=hosts)
    counted = route_device.count_ids(made.batches[1], placed.trainer.bound, B)
    features = route_device.pack_ids(counted, placed.trainer.bound, placed.capacities, np.float32)
    bound, over = placed.trainer.bound, P(BATCH_AXES)

    def find(features: Any) -> Any:
        return route_device.find_rows(bound, features)

    mapped = jax.shard_map(find, mesh=placed.trainer.mesh, in_specs=over, out_specs=(over, P()))
    located, needs = jax.jit(mapped)(features)
    for name, need in needs.items():
        exactly = placed.routed[1].required_capacities[name]
        assert int(need) == exactly or (name.endswith(SUMMED) and int(need) >= exactly)
    capacities = capacity.grow(placed.capacities, {name: int(need) for name, need in needs.items()})
    sizes = route_device.sizes(placed.trainer.bound, capacities)

    def lay_out(features: Any, located: Any) -> Any:
        return route_device.lay_out(bound, features, located, sizes)

    found = jax.jit(jax.shard_map(lay_out, mesh=placed.trainer.mesh, in_specs=over, out_specs=over))(features, located)
    truth = host.pack(placed.routed[1], placed.trainer.bound, capacities)
    jax.tree.map(np.testing.assert_array_equal, found, truth)


@pytest.mark.parametrize(("hosts", "plan"), [(1, "row_wise"), (2, "row_wise"), (2, "column_wise")])
def test_who_sends_what_stays_within_groups(hosts: int, plan: str) -> None:
    """Distinct rows that each device, or in two steps each host, asks of each owner of its group, counted anew."""
    made = make(steps=3)
    placed = built(made, 8, 2, plan, hosts=hosts)
    (group,) = placed.trainer.bound.groups
    counted = placed.routed[0]
    of_host: dict[tuple[int, int], set[tuple[str, int]]] = collections.defaultdict(set)
    for feature in group.features:
        bags = counted.batch.bags[feature.reads]
        lengths = bags.ids.shape[1] if bags.lengths is None else bags.lengths
        device_L = np.repeat(np.arange(counted.batch.size), lengths) // counted.local
        owner_L, _ = locate(group, feature.table, bags.ids.ravel())
        for device, owner, row in zip(
            device_L.tolist(), np.broadcast_to(owner_L, device_L.shape), bags.ids.ravel(), strict=True
        ):
            asker = device // group.per_host if group.two_step else device
            of_host[asker, int(owner)].add((feature.table, int(row)))
    truth = np.zeros((8, 8), np.int64)
    for n, m in itertools.product(range(8), range(8)):
        if n // 4 == m // 4 and (not group.two_step or n % group.per_host == m % group.per_host):
            asker = n // group.per_host if group.two_step else n
            truth[n, m] = len(of_host[asker, 0 if plan == "column_wise" else m % 4])
    found = sent_bytes(group, host.true_counts(group, counted), "id_exchange", 4)
    assert truth[:4, :4].any() and truth[4:, 4:].any()
    np.testing.assert_array_equal(found, truth * 4)
    (columns,) = {int(group.columns.start(1))}
    rows = sent_bytes(group, host.true_counts(group, counted), "row_exchange", 4)
    np.testing.assert_array_equal(rows, truth.T * columns * 4)


def test_precision_between_groups_is_that_of_gradients_and_leaves_copies_equal() -> None:
    exchange = Exchange("float32", "int8")
    plan = Plan({f"sparse_{i}": (Segment("row_wise", exchange=exchange),) for i in range(4)})
    made = make(Sgd(0.1), 6)
    placed = built(made, 4, 4, plan)  # a group is one device: nothing else is encoded
    state = placed.steps(placed.start())
    compiled = placed.trainer.step_program.lower(state, placed.inputs[0]).compile()
    kinds = {c.shapes[0][0] for c in collectives(compiled.as_text()) if c.phase == "replica_exchange"}
    assert kinds == {"u8", "s32"}
    for array in jax.tree.leaves(state.tables):
        first, *others = [np.asarray(s.data) for s in array.addressable_shards]
        assert all(np.array_equal(first, other) for other in others)
    exact = built(make(Sgd(0.1), 6), 4, 4)
    (truth,), (found,) = exact.steps(exact.start()).tables.values(), state.tables.values()
    assert 1e-7 < np.abs(np.asarray(truth) - np.asarray(found)).max() < 1e-2


# Independent groups.


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[Problem, Placed, Any]]:
    """Two groups of two devices that have trained for six steps of SGD, each by itself; with the state on the host."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        made = make(Sgd(0.5), 15)
        placed = built(made, 4, 2, MIXED, independent=True, dtype=np.float64)
        yield made, placed, load(placed.trainer.export(placed.steps(placed.start(), last=6)))


def test_averaging_each_step_of_sgd_is_the_step_of_the_whole_batch(apart: tuple[Problem, Placed, Any]) -> None:
    """mean(w - lr * g) = w - lr * mean(g): also for short batches, of which a group has fewer samples or none."""
    made, placed, _ = apart
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert {c.batch.size for c in placed.routed} == {B, 500 % B}
        average, state = make_average(placed.trainer.bound, placed.trainer.mesh), placed.start()
        for i in range(15):
            state = placed.steps(state, i, i + 1)
            tables, slots = average(state.tables, state.slots, state.ok)
            state = dataclasses.replace(state, tables=tables, slots=slots)
        truth = run_oracle(made, np.float64)
        saved = load(placed.trainer.export(state))
    for version in saved["replicas"].values():
        for name, arrays in truth.tables.items():
            table = next(t for g in placed.trainer.bound.groups for t in g.segments if t.spec.name == name)
            rows = version[name]["rows"][table.order.position(np.arange(table.spec.rows))]
            np.testing.assert_allclose(rows, arrays["rows"], rtol=0, atol=1e-9)


def test_each_group_learns_from_its_part_of_the_batch_alone() -> None:
    """With the dense part held still: as two runs, each of its half of every batch."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        still = dataclasses.replace(make(steps=6), tx=optax.set_to_zero())
        made = still
        placed = built(made, 4, 2, MIXED, independent=True, dtype=np.float64)
        saved = load(placed.trainer.export(placed.steps(placed.start())))["replicas"]
        for group in range(2):
            local = placed.routed[0].local * 2
            batches = [between(b, group * local, min((group + 1) * local, b.size)) for b in still.batches]
            own = dataclasses.replace(still, batches=batches)
            truth = run_oracle(own, np.float64).tables
            for table in (t for g in placed.trainer.bound.groups for t in g.segments):
                position = table.order.position(np.arange(table.spec.rows))
                for key, array in truth[table.spec.name].items():
                    found = saved[str(group)][table.spec.name][key][position]
                    np.testing.assert_allclose(found, array, rtol=0, atol=1e-9)


def test_distance_is_the_norm_of_the_difference_and_averages_end_it(apart: tuple[Problem, Placed, Any]) -> None:
    made, placed, saved = apart
    with jax.enable_x64(True):
        state = placed.trainer.restore(saved, 6)
        first, second = saved["replicas"]["0"], saved["replicas"]["1"]
        for group in placed.trainer.bound.groups:
            names = [t.spec.name for t in group.segments]
            assert np.sqrt(sum(np.square(first[n]["rows"] - second[n]["rows"]).sum() for n in names)) > 0.01
        average = make_average(placed.trainer.bound, placed.trainer.mesh)
        copied = jax.tree.map(jnp.copy, (state.tables, state.slots))
        kept = average(copied[0], copied[1], jnp.asarray(False))
        jax.tree.map(np.testing.assert_array_equal, kept, (state.tables, state.slots))
        tables, slots = average(state.tables, state.slots, jnp.asarray(True))
        state = dataclasses.replace(state, tables=tables, slots=slots)
        after = load(placed.trainer.export(state))["replicas"]
        means = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
        for each in ("0", "1"):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-15), after[each], means)
        jax.tree.map(np.testing.assert_array_equal, after["0"], after["1"])


def test_seeds_of_their_own_give_each_group_the_tables_of_its_seed(apart: tuple[Problem, Placed, Any]) -> None:
    made, placed, _ = apart
    trainer = placed.trainer
    config = dataclasses.replace(trainer.config, seed=2**32 - 1, train=TrainConfig(**OWN))
    for each, seeds in ((config, (2**32 - 1, 0)), (dataclasses.replace(config, train=TrainConfig()), (2**32 - 1,) * 2)):
        with jax.enable_x64(True):
            saved = dataclasses.replace(trainer, config=each).export(
                dataclasses.replace(trainer, config=each).init_state()
            )
        for version, seed in zip(load(saved)["replicas"].values(), seeds, strict=True):
            for table in (t for g in trainer.bound.groups for t in g.segments):
                spec = table.spec
                truth = initial_rows(seed, spec.name, jnp.arange(spec.rows), spec.dim, spec.scale)
                rows = version[spec.name]["rows"][table.order.position(np.arange(spec.rows))]
                np.testing.assert_array_equal(rows, np.asarray(truth))


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=pytest.mark.wide), "int8"])
def test_averages_in_fewer_bytes_are_means_of_what_was_sent(precision: Any) -> None:
    trainer = trainer_of(make(), 2, replicas=2, independent=True)
    state = dataclasses.replace(trainer, config=RunConfig(train=TrainConfig(**OWN))).init_state()
    state = dataclasses.replace(state, slots=jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype), state.slots))
    average: Any = make_average(trainer.bound, trainer.mesh, precision)
    sent = [c for c in collectives(average.lower(state.tables, state.slots, state.ok).compile().as_text())]
    assert {c.shapes[0][0] for c in sent if c.kind == "all-gather"} == {{"bfloat16": "u16", "int8": "u8"}[precision]}
    rows = {name: np.asarray(x).reshape(2, -1, x.shape[1]) for name, x in state.tables.items()}
    slots = jax.tree.map(lambda x: np.asarray(x).reshape(2, -1), state.slots)
    tables, means = average(state.tables, state.slots, jnp.asarray(True))
    for name, halves in rows.items():
        found = np.asarray(tables[name]).reshape(halves.shape)
        truth = np.mean(
            [np.asarray(decode(encode(jnp.asarray(half), precision), precision)) for half in halves], axis=0
        )
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_allclose(found[0], truth, rtol=1e-6, atol=1e-7)
        of = {"bfloat16": 2.0**-8 * np.abs(halves), "int8": np.ptp(halves, axis=2, keepdims=True) / 255 / 2}
        off = np.abs(found[0] - halves.mean(axis=0))
        assert 0 < off.max() and (off <= of[precision].mean(axis=0) * 1.01 + 1e-7).all()
    for x, y in zip(jax.tree.leaves(slots), jax.tree.leaves(means), strict=True):
        np.testing.assert_allclose(np.asarray(y).reshape(2, -1)[1], x.mean(axis=0), rtol=1e-6)


def test_averages_and_distances_need_no_room_for_a_table() -> None:
    made = make(rows=(400_000, 37, 50, 41), steps=1)
    placed = built(made, 4, 2, independent=True)
    state = placed.start()
    table = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.tables))
    average: Any = make_average(placed.trainer.bound, placed.trainer.mesh)
    memory = average.lower(state.tables, state.slots, state.ok).compile().memory_analysis()
    assert table > 6_000_000
    assert memory.temp_size_in_bytes < 6 * 4 * 2**20  # chunks of 4 MiB, whatever the table's size


def test_predictions_are_those_of_the_mean_tables(apart: tuple[Problem, Placed, Any]) -> None:
    """Equal to a single group that restored the checkpoint, which takes the means."""
    made, placed, saved = apart
    with jax.enable_x64(True):
        state = placed.trainer.restore(saved, 6)
        found = np.asarray(placed.trainer.predict_program(state, placed.inputs[0]))[:B]
        truth = first_logits(built(made, 3, 1, dtype=np.float64), saved)
        np.testing.assert_allclose(found, truth, rtol=0, atol=1e-12)
        alone = {"tables": saved["replicas"]["0"], "dense": saved["dense"], "opt": saved["opt"]}
        own = first_logits(built(made, 1, 1, dtype=np.float64), alone)
        assert np.abs(found - own).max() > 1e-4
        again = load(placed.trainer.export(state))
    jax.tree.map(np.testing.assert_array_equal, again, saved)  # what was restored is what was saved, group by group


def first_logits(placed: Placed, saved: Any) -> np.ndarray:
    """Logits of the first batch by what was saved."""
    state = placed.trainer.restore(saved, 6)
    return np.asarray(placed.trainer.predict_program(state, placed.inputs[0]))[:B]


def test_clipping_counts_the_rows_of_every_group(apart: tuple[Problem, Placed, Any]) -> None:
    """The first step's norm, of which both groups see the same dense part; and their own rows, once each."""
    made, free, _ = apart
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):

        def moved(placed: Placed) -> Any:
            after = load(placed.trainer.export(placed.steps(placed.start(), last=1)))
            return jax.tree.map(lambda a, b: a - b, load(placed.trainer.export(placed.start())), after)

        whole = moved(free)
        # Learning rates of 0.5 and 0.1 show gradients, of which those of two groups' tables are doubled.
        rows = sum(np.square(t["rows"]).sum() for v in whole["replicas"].values() for t in v.values())
        norm = np.sqrt(rows + sum(np.square(x / 0.1).sum() for x in whole["dense"].values()))
        options = StepOptions(clip_norm=float(norm) / 4)
        clipped = dataclasses.replace(made, options=options)
        less = moved(built(clipped, 4, 2, MIXED, independent=True, dtype=np.float64))
        for kind in ("replicas", "dense"):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 4 * b, atol=1e-12), whole[kind], less[kind])


# Whole runs.

SETTINGS = ("train.batch_size=100", "train.steps=9", "train.eval_every=4", "train.log_every=1", "plan=row_wise")


def run(preset: Any, out: Any, *overrides: str) -> Any:
    config = recjax.load(str(preset), *SETTINGS, *overrides)
    return recjax.fit(config, out)


def test_a_run_of_groups_that_average_is_resumed_exactly(preset: Any, tmp_path: Any) -> None:
    groups = ("mesh.devices=4", "mesh.replicas=2", "train.replica_sync=average", "train.average_every=3")
    whole = run(preset, tmp_path / "whole", *groups)
    run(preset, tmp_path / "cut", *groups, "train.steps=5")
    resumed = run(preset, tmp_path / "cut", *groups)
    assert resumed["eval"] == whole["eval"] and resumed["steps"] == 9
    with pytest.raises(ConfigError, match="train.replica_sync"):
        run(preset, tmp_path / "cut", *groups, "train.replica_sync=exact")


def test_another_number_of_groups_goes_on_with_the_means_and_says_so(
    preset: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    never = ("train.replica_sync=never",)
    run(preset, tmp_path, "mesh.devices=4", "mesh.replicas=2", *never, "train.steps=5")
    assert "means" not in capsys.readouterr().err
    there = recjax.evaluate(tmp_path)
    elsewhere = recjax.evaluate(tmp_path, "mesh.devices=3", "mesh.replicas=1")
    assert elsewhere["auc"] == pytest.approx(there["auc"], abs=1e-6)
    summary = run(preset, tmp_path, "mesh.devices=3", "mesh.replicas=3", *never)
    assert (
        "2 replica groups wrote checkpoint 5, each with tables of its own; now there are 3" in capsys.readouterr().err
    )
    assert summary["steps"] == 9


def test_settings_that_make_no_groups_are_refused() -> None:
    for make_config, message in (
        (lambda: TrainConfig(average_precision="int8"), "average_precision is int8, but replica_sync is exact"),
        (lambda: TrainConfig(replica_init="own"), "replica_init=own gives each replica group initial tables of its"),
        (lambda: MeshConfig(6, replicas=4), r"6 devices cannot be shared evenly among 4 replica groups\. Set mesh\."),
        (lambda: MeshConfig(6, hosts=3, replicas=2), "2 replica groups on 3 hosts: a group must have whole hosts"),
        (lambda: MeshConfig(replicas=0), "replicas is 0; it must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config()
    assert MeshConfig(8, hosts=4, replicas=2).shape == (2, 2, 2)
    assert MeshConfig(8, hosts=2, replicas=4).shape == (4, 1, 2)
    config = recjax.load("synthetic", "mesh.devices=4", "mesh.replicas=2")
    bound = build_trainer(config).bound
    assert (bound.devices, bound.all_devices, bound.synchronous) == (2, 4, True)
