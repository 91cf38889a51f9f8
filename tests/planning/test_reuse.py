"""Reuse distances of a step's data, against programs worked through by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from support.machines import BEGUN, FORK, LOOKUP, MACHINE

from recjax.planning.costs import Costs
from recjax.planning.graph import read_graph
from recjax.planning.machine import Kernel, Point
from recjax.planning.reuse import Use, uses
from recjax.planning.schedule import node_cost
from recjax.planning.work import works
from recjax.utils.hlo import read_program


def test_each_array_of_a_step_by_hand():
    """Bytes of x are 8192, of w and v 2048, of results 4096; kernels touch 14336, 8192, 14336, 12288: in all 49152."""
    found = uses(read_program(FORK))
    # x was last read by dot.2, after which the sum came; w by dot.1. The result's place is one that the sum has read.
    assert found["dot.1"] == (Use(8192, 12288), Use(2048, 49152 - 14336), Use(4096, 0))
    assert found["all-reduce.1"] == (Use(4096, 0), Use(4096, 14336))
    # x was read by dot.1, before an all-reduce, and with that dot.1's result has become free
    assert found["dot.2"] == (Use(8192, 8192), Use(2048, 34816), Use(4096, 0))
    # beside results that stay, memory is left that the step before touched last at its 22528
    assert found["sum_fusion"] == (Use(4096, 14336), Use(4096, 0), Use(4096, 36864 + 49152 - 22528))


@pytest.mark.parametrize("text", [FORK, LOOKUP, BEGUN], ids=["fork", "loop", "begun"])
def test_uses_are_the_bytes_of_the_kernels(text):
    program = read_program(text)
    found = uses(program)
    assert found
    for computation in program.computations.values():
        for name, instruction in computation.instructions.items():
            if name in found:
                total = sum(work.bytes for work in works(instruction, computation, program))
                assert sum(use.bytes for use in found[name]) == pytest.approx(total)
                assert all(use.distance >= 0 for use in found[name])


def test_a_table_is_touched_where_rows_are_looked_up_and_not_as_a_whole():
    def step(table, ids, new):
        rows = table[ids] * 2
        return table.at[ids].add(new * rows, mode="drop")

    shapes = (
        jax.ShapeDtypeStruct((2**20, 8), jnp.float32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
    )
    text = jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()
    nodes = read_graph(text, 1).nodes
    assert any(work.kernel.startswith("scatter") for node in nodes for work in node.works)
    everything = sum(use.bytes for node in nodes for use in node.uses)
    assert 0 < everything < 16 * 8 * 4 * 30
    # Steps follow one another: what this one reads, the step before has touched.
    assert all(use.distance <= 2 * everything for node in nodes for use in node.uses)


TURNS = """
HloModule turns, is_scheduled=true

%body (c: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %c = (s32[], f32[1024]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %z = f32[1024]{0} get-tuple-element(%c), index=1
  %made = f32[256]{0} slice(%z), slice={[0:256]}
  %back = f32[1024]{0} pad(%made), padding=0_768
  ROOT %next = (s32[], f32[1024]{0}) tuple(%n, %back)
}

%condition (c.1: (s32[], f32[1024])) -> pred[] {
  %c.1 = (s32[], f32[1024]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: s32[], x: f32[1024]) -> f32[1024] {
  %p = s32[] parameter(0)
  %x = f32[1024]{0} parameter(1)
  %start = (s32[], f32[1024]{0}) tuple(%p, %x)
  %loop = (s32[], f32[1024]{0}) while(%start), condition=%condition, body=%body
  ROOT %y = f32[1024]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_turn_of_a_loop_writes_where_the_turn_before_wrote():
    """A turn touches 2 x 1024 bytes and then 1024 + 4096; what it makes was last touched at the end of the other."""
    found = uses(read_program(TURNS))
    assert found["made"][-1] == Use(1024, 1024 + 4096 - (1024 + 4096))  # the pad has just read it
    assert found["back"][-1] == Use(4096, 2048)  # what was made has been written meanwhile


def test_of_more_bytes_than_were_measured_none_are_near():
    """As many as were measured take 4 us touched just before, 16 us from 1000 bytes away, and 8 us in the middle."""
    points = [Point({"bytes": 1000.0, "distance": d}, us, 2.0) for d, us in ((1.0, 4.0), (1000.0, 16.0))]
    machine = dataclasses.replace(MACHINE, kernels={**MACHINE.kernels, "reuse": Kernel(1.0, "measured", tuple(points))})
    costs, half = Costs(machine), math.sqrt(1000.0)
    assert costs.reuse((Use(1000.0, half),)).us == pytest.approx(8 - 4)
    assert costs.reuse((Use(1000.0 + half, 1e9),)).us == pytest.approx((16 - 8) * (1 + half / 1000))
    assert costs.reuse((Use(4000.0, 1e9),)).us == 0  # it passes over 3000 more itself, from one turn to the next


def test_a_pass_over_data_from_far_away_takes_longer_by_their_share():
    points = [Point({"bytes": 1000.0, "distance": d}, us, 2.0) for d, us in ((10.0, 4.0), (1000.0, 16.0))]
    machine = dataclasses.replace(MACHINE, kernels={**MACHINE.kernels, "reuse": Kernel(1.0, "measured", tuple(points))})
    costs = Costs(machine)
    assert costs.reuse((Use(600.0, 5.0), Use(400.0, 1000.0))).us == pytest.approx(0.4 * 12)
    assert costs.reuse((Use(1000.0, 100.0),)).us == pytest.approx(8 - 4)  # half way in logarithms
    assert costs.reuse((Use(1000.0, 1e9),)).us == pytest.approx(12)  # no farther than was measured
    assert costs.reuse((Use(250.0, 1e9),)).us == pytest.approx(12 / 4)  # a quarter of the lines
    assert costs.reuse((Use(4.0, 1e9),)).us == pytest.approx(12 * 64 / 1000)  # a line is the least that is fetched
    assert costs.reuse((Use(1000.0, 3.0),)).us == 0 and costs.reuse(()).us == 0
    assert Costs(MACHINE).reuse((Use(1000.0, 1000.0),)).us == 0
    assert costs.reuse((Use(1000.0, 1000.0),)).cores == 2
    # Two devices that share a cache touch twice as much meanwhile; of its own each of an accelerator has one. Of eight
    # on two cores two run at a time.
    shared, own, many = (
        Costs(dataclasses.replace(costs.machine, shared=shares, cores=2), devices)
        for shares, devices in ((True, 2), (False, 2), (True, 8))
    )
    assert shared.reuse((Use(1000.0, 50.0),)).us == costs.reuse((Use(1000.0, 100.0),)).us > 0
    assert own.reuse((Use(1000.0, 50.0),)).us == costs.reuse((Use(1000.0, 50.0),)).us
    assert many.reuse((Use(1000.0, 50.0),)).us == shared.reuse((Use(1000.0, 50.0),)).us

    large = tuple(dataclasses.replace(point, sizes={**point.sizes, "bytes": 1e5}) for point in points)
    costs = Costs(dataclasses.replace(machine, kernels={**MACHINE.kernels, "reuse": Kernel(1.0, "measured", large)}))
    node = read_graph(FORK, 1).nodes[0]
    alone = node_cost(dataclasses.replace(node, uses=()), costs)
    beside = node_cost(node, costs)
    assert beside.us - alone.us == pytest.approx(costs.reuse(node.uses).us) and beside.us > alone.us
    assert math.isclose(beside.us * beside.cores, alone.us * alone.cores + 2 * (beside.us - alone.us))
