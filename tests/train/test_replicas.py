"""Replica groups: exact unless one asks for something else; and what independent ones are, step by step and on disk.

That synchronous groups give the numbers of any mesh is shown in test_contract.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import contract
from support.exactness import NetRun, Rows, Trained, in_row_order, net_logits, problem_of, train
from support.problems import Placed, Problem, problem, run_oracle, trainer_of
from support.routing import locate

import recjax
from recjax import settings
from recjax.config.run import EmbeddingConfig, FeatureConfig, TableConfig
from recjax.config.train import DenseSgd, TrainConfig
from recjax.data.batch import Feature, Schema
from recjax.data.source import between
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.buffers import initial_rows
from recjax.embedding.layout import SUMMED
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.replica_groups import make_average
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.sharded import exchange_of
from recjax.errors import ConfigError
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.planning.compiled_collectives import collectives, members
from recjax.settings.values import Named
from recjax.train.build import build_trainer
from recjax.train.step import StepOptions
from recjax.utils.lazy_arrays import load
from recjax.utils.phases import Phase

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


B, D = 44, 8
ADAGRAD = RowWiseAdagrad(0.1)


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


@pytest.mark.parametrize(("hosts", "plan"), [(1, "row_wise"), (2, "column_wise")])
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
    exchange, counts = exchange_of(group), counted.true_counts(group.name)
    across = {e.phase: e for e in exchange.events(placed.capacities, counted.local, 4) if not e.inside}
    found = exchange.sent_bytes(across[Phase.ID_EXCHANGE], counts, counted.local, 4)
    assert truth[:4, :4].any() and truth[4:, 4:].any()
    np.testing.assert_array_equal(found, truth * 4)
    (columns,) = {int(group.columns.start(1))}
    rows = exchange.sent_bytes(across[Phase.ROW_EXCHANGE], counts, counted.local, 4)
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


def test_averages_need_no_room_for_a_table() -> None:
    made = make(rows=(400_000, 37, 50, 41), steps=1)
    placed = built(made, 4, 2, independent=True)
    state = placed.start()
    table = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.tables))
    average: Any = make_average(placed.trainer.bound, placed.trainer.mesh)
    memory = average.lower(state.tables, state.slots, state.ok).compile().memory_analysis()
    assert table > 6_000_000
    assert memory.temp_size_in_bytes < 6 * 4 * 2**20  # chunks of 4 MiB, whatever the table's size


# Independent groups: two of two devices, whose tables lie in all ways.

RULES: dict[str, Any] = {
    "one": Adam(0.05),
    "three": RowWiseAdagrad(0.2),
    "jagged": Sgd(0.5),
    "jagged_weighted": Sgd(0.5, momentum=0.9),
}
PLACED: dict[str, Any] = dict(zip(RULES, ("row_wise", "column_wise", "data_parallel", "table_wise"), strict=True))
SOURCE = Rows(
    Schema(("x", "y"), tuple(Feature(name, contract.V, *kind) for name, kind in contract.DATA.items())),
    tuple(dataclasses.replace(contract.make_batch(step), position=contract.B * step) for step in range(contract.STEPS)),
)


def config_of(*texts: str) -> NetRun:
    """Groups that never take means, in float64; and changes."""
    tables = {name: TableConfig(optimizer=rule, placement=PLACED[name]) for name, rule in RULES.items()}
    features = Named({"three": FeatureConfig(pooling="mean")})
    train = TrainConfig(contract.B, steps=contract.STEPS, optimizer=DenseSgd(0.1), replica_sync="never")
    config = NetRun(
        embedding=EmbeddingConfig(4, tables=Named(tables), features=features, exchange=Exchange()),
        train=dataclasses.replace(train, shuffle=False, log_every=1, workers=1),
        mesh=MeshConfig(4, replicas=2),
        plan="row_wise",
        compute_dtype="float64",
    )
    return settings.override(config, texts)


def trained(*texts: str, start: Any = None, step: int = 0) -> Trained:
    return train(config_of(*texts), SOURCE, start, step)


def with_means(arrays: dict[str, Any]) -> dict[str, Any]:
    """What groups have left, with the means of their tables and slots in place of each one's."""
    mean = jax.tree.map(lambda *of_groups: np.mean(of_groups, axis=0), *arrays["replicas"].values())
    return arrays | {"replicas": dict.fromkeys(arrays["replicas"], mean)}


def test_groups_that_average_take_means_after_every_so_many_steps_and_are_apart_in_between() -> None:
    """As groups that never do, stopped after these steps, and going on with the means, which NumPy takes."""
    with jax.enable_x64(True):
        whole = trained("train.replica_sync=average", "train.average_every=2")
        parts, arrays = list[float](), None
        for first, last in ((0, 2), (2, 4), (4, contract.STEPS)):
            part = trained(f"train.steps={last}", start=arrays, step=first)
            parts, arrays = parts + part.losses, with_means(part.arrays)
    np.testing.assert_allclose(whole.losses, parts, rtol=1e-12)
    for kind in ("replicas", "dense"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), whole.arrays[kind], part.arrays[kind]
        )
    first, second = whole.arrays["replicas"].values()
    assert all(np.abs(first[name]["rows"] - second[name]["rows"]).max() > 1e-6 for name in RULES)


KINDS = pytest.mark.parametrize("kind", ["rows", "pooled"])


@KINDS
def test_each_group_learns_from_its_part_of_the_batch_alone(kind: str) -> None:
    """By the mean loss of the whole batch, times the number of groups. The dense part is held still."""
    texts = ("train.optimizer.learning_rate=1e-30", f"embedding.exchange.kind={kind}")
    totals = np.array([block.weights.sum() for block in SOURCE.blocks], np.float64)
    names = list(RULES)

    def loss(params: Any, kept: Any, x: Any, looked_up: Any, y: Any, w: Any, step: Any) -> Any:
        z = net_logits(params, [x, *(looked_up[name] for name in names)])
        return 2 * jnp.sum(w * (jnp.logaddexp(0, z) - y * z)) / jnp.asarray(totals)[step], (kept, [])

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        replicas = trained(*texts).arrays["replicas"]
        share = -(-contract.B // 4) * 2  # samples of a group
        for group, tables in replicas.items():
            first = int(group) * share
            batches = [between(b, min(first, b.size), min(first + share, b.size)) for b in SOURCE.blocks]
            truth = run_oracle(
                dataclasses.replace(problem_of(config_of(*texts), SOURCE, truth=loss), batches=batches), np.float64
            )
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), in_row_order(tables), truth.tables
            )


def test_seeds_of_their_own_give_each_group_the_tables_of_its_seed() -> None:
    for texts, seeds in ((("train.replica_init=own",), (2**32 - 1, 0)), ((), (2**32 - 1,) * 2)):
        with jax.enable_x64(True):
            trainer = build_trainer(config_of(f"seed={2**32 - 1}", *texts), SOURCE)
            replicas = load(trainer.export(trainer.init_state()))["replicas"]
        for tables, seed in zip(replicas.values(), seeds, strict=True):
            for name, arrays in in_row_order(tables).items():
                truth = initial_rows(seed, name, jnp.arange(contract.V), 4, contract.V**-0.5)
                np.testing.assert_array_equal(arrays["rows"], np.asarray(truth))


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=pytest.mark.wide), "int8"])
def test_averages_in_fewer_bytes_are_means_of_what_was_sent(precision: str) -> None:
    """Within the rounding of each row; slots travel as they are; and both groups get the same."""
    texts = ("compute_dtype=float32", "train.steps=2")
    apart = trained(*texts).arrays["replicas"]
    averages = ("train.replica_sync=average", "train.average_every=2", f"train.average_precision={precision}")
    means = trained(*texts, *averages).arrays["replicas"]
    jax.tree.map(np.testing.assert_array_equal, means["0"], means["1"])
    for name in RULES:
        for key, array in means["0"][name].items():
            held = np.stack([apart[group][name][key] for group in ("0", "1")])
            off = np.abs(array - held.mean(axis=0))
            if key != "rows":
                np.testing.assert_allclose(off, 0, atol=1e-6)
                continue
            values = held.reshape(2, len(array), -1, 2) if PLACED[name] == "column_wise" else held[:, :, None]
            most = {"bfloat16": 2.0**-8 * np.abs(values), "int8": np.ptp(values, axis=-1, keepdims=True) / 255 / 2}
            bound = np.broadcast_to(most[precision], values.shape).reshape(held.shape).mean(axis=0)
            assert 0 < off.max() and (off <= bound * 1.01 + 1e-7).all()


@KINDS
def test_predictions_are_those_of_the_mean_tables(kind: str) -> None:
    """Equal to a single group that restored the checkpoint, which takes the means."""

    def logits(config: NetRun, arrays: dict[str, Any]) -> np.ndarray:
        trainer = build_trainer(config, SOURCE)
        state = trainer.restore(arrays, 3)
        ((_, found),) = trainer.predict(state, trainer.inputs_of(SOURCE.blocks[:1], contract.B))
        return found

    with jax.enable_x64(True):
        exchange = f"embedding.exchange.kind={kind}"
        arrays = trained("train.steps=3", exchange).arrays
        one = config_of("mesh.devices=3", "mesh.replicas=1", "train.replica_sync=exact")
        of_groups, of_one = logits(config_of(exchange), arrays), logits(one, arrays)
        alone = {key: arrays[key] for key in ("dense", "opt")} | {"tables": arrays["replicas"]["0"]}
        np.testing.assert_allclose(of_groups, of_one, rtol=0, atol=1e-12)
        assert np.abs(of_groups - logits(one, alone)).max() > 1e-4


def test_clipping_counts_the_rows_of_every_group() -> None:
    """The first step's norm, of which both groups see the same dense part; and their own rows, once each."""
    plain = ("train.steps=1", *(f"embedding.tables.{name}.optimizer=sgd" for name in RULES))
    plain += tuple(f"embedding.tables.{name}.optimizer.learning_rate=0.5" for name in RULES)
    with jax.enable_x64(True):
        trainer = build_trainer(config_of(*plain), SOURCE)
        start = load(trainer.export(trainer.init_state()))
        whole = jax.tree.map(np.subtract, start, trained(*plain).arrays)
        # Learning rates of 0.5 and 0.1 show gradients, of which those of two groups' tables are doubled.
        rows = sum(np.square(t["rows"]).sum() for v in whole["replicas"].values() for t in v.values())
        norm = np.sqrt(rows + sum(np.square(x / 0.1).sum() for x in whole["dense"].values()))
        less = jax.tree.map(np.subtract, start, trained(*plain, f"train.clip_norm={norm / 4}").arrays)
        for kind in ("replicas", "dense"):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 4 * b, atol=1e-12), whole[kind], less[kind])


# Whole runs.


SETTINGS = ("train.batch_size=100", "train.steps=9", "train.eval_every=4", "train.log_every=1", "plan=row_wise")


def run(preset: Any, out: Any, *overrides: str) -> Any:
    config = recjax.load(str(preset), *SETTINGS, *overrides)
    return recjax.fit(config, out)


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
