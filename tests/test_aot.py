"""Promises of compiled programs for accelerators, read from those for eight H200 and eight TPU v6e: none is needed.

`pytest -m aot`, with the extra `aot`. Tables take no memory here, so they are large beside all that a step makes. Each
check is also shown to fail on what it is there to find.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from support import aot
from support.aot import Compiled
from support.graphs import fetching

from recjax.config import presets
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.exchange.wire import cuts
from recjax.embedding.lines import Lines
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.segment import Exchange
from recjax.lab.bench.overlap import flights
from recjax.lab.predict.targets import missing
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.planning.compiled_collectives import collectives
from recjax.planning.graph import read_graph
from recjax.train.module import parameters
from recjax.utils.hlo import Program, read_program

# Programs for devices that are not there cannot be read back from the cache.
pytestmark = [pytest.mark.aot, pytest.mark.full, pytest.mark.fresh_compile]

Routing = Literal["auto", "device"]
ROWS = (4_000_000, 3, 1_000_000, 2_000_000)


def config(
    dim: int, plan: str = "auto", pieces: int = 1, devices: int = aot.DEVICES, routing: Routing = "auto"
) -> RunConfig:
    """Spread tables of one-hot, weighted multi-hot and jagged bags, and a small one that every device holds.

    Under any other plan all of them are placed so, and exchange pooled vectors.
    """
    return RunConfig(
        data=Synthetic(ROWS, ids_per_bag=(1, 1, 20, 0), weighted=(False, False, True, False), train_rows=4096),
        model=DLRMConfig(bottom=(32, dim), top=(32, 1)),
        embedding=EmbeddingConfig(
            dim,
            optimizer=RowWiseAdagrad(),
            exchange=Exchange(kind="auto" if plan == "auto" else "pooled", pieces=pieces),
        ),
        plan=plan,
        train=TrainConfig(batch_size=1024, optimizer=DenseAdagrad(), shuffle=False, routing=routing),
        mesh=MeshConfig(devices=devices, platform="cpu"),
    )


def compiled(
    target: str,
    what: str,
    dim: int = 128,
    plan: str = "auto",
    ragged: bool = False,
    pieces: int = 1,
    devices: int = aot.DEVICES,
) -> Compiled:
    if lacking := missing(target):
        pytest.skip(lacking)
    routing: Routing = "device" if what == "steps" else "auto"
    return aot.compiled(config(dim, plan, pieces, devices, routing), target, what, ragged)


STEPS = [("h200", 16), ("v6e", 16), ("v6e", 64), ("v6e", 128)]


@pytest.mark.parametrize(("target", "dim"), STEPS)
def test_tables_are_updated_in_place_beside_little_else(target: str, dim: int) -> None:
    found = compiled(target, "train_step", dim)
    (spread,) = (g for g in found.trainer.bound.groups if g.spread)
    held = sum(g.rows * (g.width + 1) * 4 for g in found.trainer.bound.groups)  # with an accumulator a row
    table = spread.rows * spread.width * 4
    assert found.memory.alias_size_in_bytes >= held > table > 0.9 * sum(ROWS) / aot.DEVICES * dim * 4
    assert found.memory.temp_size_in_bytes < table / 4
    assert not aot.copies(found.program, table)


@pytest.mark.parametrize(("target", "dim"), STEPS)
def test_predicting_holds_no_second_table(target: str, dim: int) -> None:
    found = compiled(target, "predict", dim)
    (spread,) = (g for g in found.trainer.bound.groups if g.spread)
    table = spread.rows * spread.width * 4
    assert found.memory.temp_size_in_bytes < table / 4
    assert not aot.copies(found.program, table)


@pytest.mark.parametrize(("target", "dim"), STEPS)
def test_the_collectives_of_the_step_are_the_claimed_ones(target: str, dim: int) -> None:
    found = compiled(target, "train_step", dim)
    (spread,) = (g for g in found.trainer.bound.groups if g.spread)
    C = found.capacities[spread.name]
    counted: dict[tuple[str, str], int] = collections.Counter()
    dense_bytes = 4 * sum(x.size for x in jax.tree.leaves(parameters(found.trainer.model)))
    for collective in collectives(found.text):
        assert collective.group_size == aot.DEVICES
        # XLA for GPUs puts arrays that it adds up together into one, and forgets where they came from.
        joined = collective.phases == ("",) and collective.result_bytes >= dense_bytes
        for phase in ("dense_grads", "grad_exchange") if joined else collective.phases:
            counted[phase, collective.kind] += 1
            if phase in ("row_exchange", "grad_exchange") and collective.kind == "all-to-all":
                assert collective.result_bytes == aot.DEVICES * C * dim * 4
    assert {key for key in counted if key[1] == "all-to-all"} == {
        (phase, "all-to-all") for phase in ("id_exchange", "row_exchange", "grad_exchange")
    }
    reduced = {phase for phase, kind in counted if kind == "all-reduce"}  # XLA joins what small tables add
    assert {"dense_grads", "finite_check"} <= reduced <= {"dense_grads", "finite_check", "grad_exchange"}
    assert {kind for _, kind in counted} == {"all-to-all", "all-reduce"}


# Operations that a device is given in a run, each of which costs some microseconds, and loops: about a fifth above
# those of JAX 0.12.0.1, so that a new loop over the ids of a bag is seen, and a kernel more or less is not.
BOUNDS = {
    ("h200", "train_step"): (140, 0),
    ("h200", "predict"): (60, 0),
    ("v6e", "train_step"): (340, 1),
    ("v6e", "predict"): (150, 0),
}


@pytest.mark.parametrize(("target", "what"), BOUNDS)
def test_operations_and_loops_are_few(target: str, what: str) -> None:
    program = compiled(target, what, dict(STEPS)[target]).program
    assert (aot.launches(program), aot.loops(program)) <= BOUNDS[target, what]
    assert aot.loops(program) <= BOUNDS[target, what][1]


ON_ONE = ["train.batch_size=4096", "mesh.devices=1", "mesh.platform=cpu", "train.routing=device"]


def test_a_small_step_on_one_gpu_is_few_operations() -> None:
    """On a GPU each costs some microseconds, of which a step of 4,096 samples of this model has some hundreds."""
    if lacking := missing("h200"):
        pytest.skip(lacking)
    found = aot.compiled(presets.load("bench_kaggle16", ON_ONE), "h200", "steps")
    assert aot.launches(found.program) / aot.STEPS <= 90
    (group,), entries = found.trainer.bound.groups, 4096 * 26  # small tables lie beside the others
    gathers = [i for i in aot.instructions(found.program) if i.opcode == "gather" and i.arrays[0].dtype == "f32"]
    rows = [math.prod(i.arrays[0].dims) / group.dim for i in gathers if i.arrays[0].dims[-1] == group.dim]
    assert rows and max(rows) <= 1.2 * entries
    sorts = [i for i in aot.instructions(found.program) if i.opcode == "sort" or "DeviceRadixSort" in i.attributes]
    assert len(sorts) == 1  # the group's ids once


def test_products_by_three_passes_are_so_all_of_them() -> None:
    if lacking := missing("h200"):
        pytest.skip(lacking)
    config = presets.load("bench_kaggle16", [*ON_ONE, "compute_dtype=tensorfloat32x3"])
    dots = [i for i in aot.instructions(aot.compiled(config, "h200", "train_step").program) if i.opcode == "dot"]
    assert len(dots) >= 3 * 6  # of all layers but that with a single output, and not for the first one's input
    assert all("dot_tf32_tf32_f32_x3" in dot.attributes for dot in dots)


@pytest.mark.parametrize("what", ["train_step", "predict"])
def test_on_a_gpu_every_sum_has_an_order(what: str) -> None:
    """So that two runs agree to the bit."""
    assert aot.unordered_sums(compiled("h200", what, 16).program) == []


@pytest.mark.parametrize("what", ["train_step", "predict", "steps"])
def test_sorts_are_those_that_gpus_have_in_a_library(what: str) -> None:
    program = compiled("h200", what, 16).program
    assert aot.slow_sorts(program) == []
    sorts = sum(i.opcode == "sort" or "DeviceRadixSort" in i.attributes for i in aot.instructions(program))
    assert (sorts > 0) == (what != "predict")


@pytest.mark.parametrize(("target", "dim", "devices"), [("h200", 16, 1), ("h200", 16, 8), ("v6e", 128, 8)])
def test_steps_of_one_call_are_a_loop_that_holds_no_second_table(target: str, dim: int, devices: int) -> None:
    """It adds the largest of a few sizes to what a step agrees on by an all-reduce, and no collective.

    A GPU is told beforehand how many turns there are, so that none waits for the host; a TPU counts them by itself.
    """
    found = compiled(target, "steps", dim, devices=devices)
    tables = [g.rows * g.width * 4 for g in found.trainer.bound.groups]
    held = sum(g.rows * (g.width + 1) * 4 for g in found.trainer.bound.groups)
    assert found.memory.alias_size_in_bytes >= held
    assert found.memory.temp_size_in_bytes < max(tables) / 4
    assert not aot.copies(found.program, max(tables))
    if target == "h200":
        assert aot.trips(found.program) == [aot.STEPS]
    one = compiled(target, "train_step", dim, devices=devices)
    assert aot.loops(found.program) == aot.loops(one.program) + 1
    sent, sent_by_one = (
        collections.Counter((c.kind, c.result_bytes) for c in collectives(program.text)) for program in (found, one)
    )
    if devices > 1:
        sizes = len(found.trainer.bound.listing)
        sent_by_one += collections.Counter({("all-reduce", 4 * (1 + sizes)): 1})
        sent_by_one -= collections.Counter({("all-reduce", 4): 1})
    assert sent == sent_by_one


@pytest.mark.parametrize(("target", "plan"), [("h200", "table_wise"), ("h200", "column_wise"), ("v6e", "table_wise")])
def test_pooled_exchange_keeps_what_the_step_promises(target: str, plan: str) -> None:
    """Tables in place, no copy, no unordered sum, sorts of the library, vectors in place of rows."""
    found = compiled(target, "train_step", 128, plan)
    held = sum(g.rows * (g.width + 1) * 4 for g in found.trainer.bound.groups)
    table = max(g.rows * g.width * 4 for g in found.trainer.bound.groups)
    assert found.memory.alias_size_in_bytes >= held
    assert found.memory.temp_size_in_bytes < table / 4
    assert not aot.copies(found.program, table)
    exchanged = {phase for c in collectives(found.text) for phase in c.phases if c.kind == "all-to-all"}
    divided = {"row_statistic"} if plan == "column_wise" else set()
    assert exchanged == {"id_exchange", "pooled_exchange", "pooled_grad_exchange"} | divided
    if target == "h200":
        assert aot.unordered_sums(found.program) == [] == aot.slow_sorts(found.program)


@pytest.mark.parametrize(("target", "plan"), [("h200", "row_wise"), ("v6e", "auto")])
def test_ids_and_rows_travel_without_padding(target: str, plan: str) -> None:
    """Pooled vectors of row-wise tables, and rows; only lengths of lists, and vectors, travel in blocks of one size."""
    found = compiled(target, "train_step", dict(STEPS)[target], plan, ragged=True)
    held = sum(g.rows * (g.width + 1) * 4 for g in found.trainer.bound.groups)
    assert found.memory.alias_size_in_bytes >= held
    exchanges = collectives(found.text)
    ragged = [c for c in exchanges if c.kind == "ragged-all-to-all"]  # of which XLA for GPUs forgets the scopes
    padded = {phase for c in exchanges for phase in c.phases if c.kind == "all-to-all"}
    if plan == "auto":
        assert len(ragged) == 3 and padded == {"id_exchange"}
    else:  # ids and their weights
        assert len(ragged) == 2 and padded == {"id_exchange", "pooled_exchange", "pooled_grad_exchange"}


@pytest.mark.parametrize(("target", "dim"), [("h200", 16), ("v6e", 128)])
def test_rows_in_pieces_are_gathered_and_sent_apart(target: str, dim: int) -> None:
    """No pass of XLA's joins them again; on a GPU a gather lies beside each exchange but the last."""
    found = compiled(target, "train_step", dim, pieces=3)
    (spread,) = (g for g in found.trainer.bound.groups if g.spread)
    table = spread.rows * spread.width * 4
    assert found.memory.temp_size_in_bytes < table / 4
    assert not aot.copies(found.program, table)
    sent = [c for c in collectives(found.text) if c.phase == "row_exchange" and c.kind == "all-to-all"]
    lengths = sorted(last - first for first, last in cuts(found.capacities[spread.name], 3))
    assert sorted(c.result_bytes for c in sent) == [aot.DEVICES * length * dim * 4 for length in lengths]
    gathers = fetching(read_graph(found.text, aot.DEVICES))
    assert len(gathers) == 3 and all(gathers)
    assert not any(a & b for a, b in itertools.combinations(gathers, 2))
    if target == "h200":
        beside = [f["beside"].get("gather", 0) for f in flights(found.text) if f["phase"] == "row_exchange"]
        assert beside[:2] == [1, 1]


TABLE, IDS = jax.ShapeDtypeStruct((100_000, 16), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
VALUES = jax.ShapeDtypeStruct((4096, 16), jnp.float32)


def put_back(target: str, unique: bool = False, sorted_arrays: int = 2, copied: bool = False) -> Program:
    """A small update of a table with one thing or another that the library does without."""
    if lacking := missing(target):
        pytest.skip(lacking)

    def update(table, ids, values):
        at = jnp.arange(len(ids), dtype=jnp.int32)
        ids, order, *more = jax.lax.sort((ids, at, values[:, 0])[:sorted_arrays], num_keys=1)
        after = table.at[ids].add(values[order] * sum(more, jnp.ones(len(ids)))[:, None], unique_indices=unique)
        return (after, (table * 2).at[ids].set(0.0)) if copied else after

    return aot.compiled_alone(update, target, TABLE, IDS, VALUES)


SIZE = 100_000 * 16 * 4


def test_the_checks_find_what_they_are_there_for() -> None:
    good = put_back("h200", unique=True)
    assert not aot.unordered_sums(good) and not aot.slow_sorts(good) and not aot.copies(good, SIZE)
    assert aot.unordered_sums(put_back("h200"))
    assert aot.slow_sorts(put_back("h200", unique=True, sorted_arrays=3))
    assert aot.copies(put_back("h200", unique=True, copied=True), SIZE)


# A table goes to the memory on the chip, whole and in two parts, is updated there, and is written back over itself.
ON_CHIP = """\
%scattering (p: f32[64,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %s = f32[64,128]{1,0:T(8,128)S(1)} scatter(%p, %p, %p), to_apply=%add
}
ENTRY %main (table: f32[64,128]) -> (f32[64,128]) {
  %table = f32[64,128]{1,0:T(8,128)} parameter(0)
  %b1 = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%table)
  %b2 = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%b1)
  %c1 = ((f32[64,128]{1,0:T(8,128)}), f32[32,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%table), slice={}
  %c2 = f32[32,128]{1,0:T(8,128)S(1)} slice-done(%c1)
  %d = f32[64,128]{1,0:T(8,128)S(1)} custom-call(%c2, %c2), custom_call_target="ConcatBitcast"
  %e = f32[64,128]{1,0:T(8,128)S(1)} fusion(%d), kind=kCustom, calls=%scattering
  %f1 = (f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%e)
  %f2 = f32[64,128]{1,0:T(8,128)} copy-done(%f1)
  ROOT %r = (f32[64,128]{1,0:T(8,128)}) tuple(%f2)
}
"""


@pytest.mark.parametrize(
    ("was", "then", "found"),
    [
        ("", "", set()),
        ("tuple(%f2)", "tuple(%table)", {"f1", "f2"}),  # another array beside the table
        ("copy-done(%b1)", "copy-done(%b1)\n  %x = f32[64,128]{1,0:T(8,128)} copy(%b2)", {"x"}),
        (":T(8,128)", "", {"b1", "b2", "d", "f1", "f2"}),  # as on a GPU, which has no such memory
    ],
)
def test_a_table_on_the_chip_and_back_is_no_copy(was: str, then: str, found: set[str]) -> None:
    program = read_program(ON_CHIP.replace(was, then) if was else ON_CHIP)
    assert {line.split()[1] for line in aot.copies(program, 64 * 128 * 4)} == found


def test_on_a_tpu_narrow_rows_are_laid_out_anew_unless_in_lines() -> None:
    assert aot.copies(put_back("v6e", unique=True), SIZE)


@pytest.mark.parametrize("width", [1, 10, 48, 100, 200])
def test_rows_of_any_width_are_updated_in_place_in_lines(width: int) -> None:
    if lacking := missing("v6e"):
        pytest.skip(lacking)
    lines = Lines(width)
    table = jax.ShapeDtypeStruct(lines.shape(2**23 // lines.padded), jnp.float32)
    values = jax.ShapeDtypeStruct((*IDS.shape, width), jnp.float32)

    def update(table, ids, values):
        return lines.set(table, ids, lines.get(table, ids) - values)

    program = aot.compiled_alone(update, "v6e", table, IDS, values)
    assert not aot.copies(program, table.size * 4) and aot.loops(program) == 0
