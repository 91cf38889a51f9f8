"""Collectives read from HLO text: every way in which XLA writes them, and one program that it really compiled."""

import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import mesh_of

from recjax.planning.compiled_collectives import Collective, collectives, members

F32 = "f32"


def one(line: str) -> Collective:
    (found,) = collectives(line)
    return found


def test_a_whole_instruction():
    line = (
        "  %psum.14 = f32[8,4]{1,0} all-reduce(%concatenate), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, "
        'use_global_device_ids=true, to_apply=%region_0.0, metadata={op_name="jit(step)/shard_map/dense_grads/psum" '
        "stack_frame_id=15}"
    )
    assert one(line) == Collective(
        name="psum.14",
        kind="all-reduce",
        phase="dense_grads",
        result_bytes=8 * 4 * 4,
        shapes=((F32, (8, 4)),),
        groups="{{0,1,2,3},{4,5,6,7}}",
        group_size=4,
        phases=("dense_grads",),
    )
    assert one(line.replace("  %psum", "  ROOT %psum")) == one(line)


def test_a_joined_all_reduce_has_the_phases_of_all_its_arrays():
    """XLA writes one scope for each array: here 4 bytes, a table's gradients of 680, and 64 and 2048 bytes."""
    scopes = ["dense_grads/psum_invariant", "data_parallel_D16_sgd/grad_exchange/psum_invariant"]
    scopes += ["dense_grads/psum_invariant"] * 2
    line = (
        "  %all-reduce.1 = (f32[], f32[10,17]{1,0}, f32[16]{0}, f32[16,32]{1,0}) all-reduce(a, b, c, d), "
        "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=r, "
        'metadata={op_name="jit(train_step)/shard_map/(SCOPES)" stack_frame_id=3}'
    )
    assert one(line.replace("SCOPES", ":".join(scopes))).phases == ("dense_grads", "grad_exchange")
    large = (line.replace("SCOPES", ":".join(scopes))).replace("f32[10,17]", "f32[1000,17]")
    assert one(large).phases == ("grad_exchange", "dense_grads")
    assert one(line.replace("SCOPES", scopes[0])).phases == ("dense_grads",)
    assert one(line.replace("SCOPES", "add")).phases == ("",)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3,4,5,6,7}}", 8),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2),
        ("{{0},{1}}", 1),
        ("{}", 0),  # all devices there are
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("[1,16]<=[16]", 16),
        ("mesh['replica'=1,'host'=2,'device'=4] {'host','device'}", 8),
        ("mesh['replica'=1,'host'=2,'device'=4] {'device'}", 4),
        ("mesh['host'=2,'device'=4], device_ids=([4,2]T(1,0)) {'host'}", 2),
        ("mesh['host'=2,'device'=4], device_ids=(0,2,4,6,1,3,5,7) {'device','host'}", 8),
        ("mesh['device'=8] {'device':(1)2}", 2),
        ("mesh['host'=2,'device'=8] {'host','device':(2)4}", 8),
    ],
)
def test_replica_groups(groups, size):
    found = one(
        f"  %all-gather.1 = f32[16]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}, "
        'metadata={op_name="x"}'
    )
    assert (found.groups, found.group_size) == (groups, size)


PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", PAIRS),
        ("{{0},{1}}", [[0], [1]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", HALVES),
        ("[4,2]<=[2,4]T(1,0)", PAIRS),
        ("[1,16]<=[16]", [list(range(16))]),
        ("mesh['replica'=1,'host'=2,'device'=4] {'host','device'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['replica'=1,'host'=2,'device'=4] {'device','host'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['replica'=1,'host'=2,'device'=4] {'device'}", HALVES),
        ("mesh['replica'=1,'host'=2,'device'=4] {'host'}", PAIRS),
        # the mesh's first row holds the devices 0, 2, 4 and 6
        ("mesh['host'=2,'device'=4], device_ids=([4,2]T(1,0)) {'host'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['host'=2,'device'=4], device_ids=(0,2,4,6,1,3,5,7) {'device'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['device'=8] {'device':(1)2}", PAIRS),  # the first factor of 8 = 2 * 4
        ("mesh['device'=8] {'device':(2)4}", HALVES),
    ],
)
def test_members_of_groups(groups, expected):
    assert members(groups, 8) == expected


def test_no_replica_groups():
    line = "  %ppermute.3 = f32[8,4]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,2}}"
    found = one(line)
    assert (found.kind, found.groups, found.group_size, found.phase) == ("collective-permute", "", 0, "")


PAIR = ((F32, (8,)), (F32, (2, 3)))


@pytest.mark.parametrize(
    ("result", "opcode", "shapes"),
    [
        # CPU: one array for each device
        ("(f32[8]{0}, /*index=1*/f32[2,3]{1,0})", "all-to-all", PAIR),
        ("f32[8]{0}", "ragged-all-to-all", PAIR[:1]),
        # several all-reduces combined into one
        ("(f32[8]{0}, f32[2,3]{1,0})", "all-reduce", PAIR),
        ("(f32[8]{0}, f32[2,3]{1,0})", "all-reduce-start", PAIR),
        ("(f32[2,3]{1,0}, f32[2,3]{1,0})", "all-reduce-start", (PAIR[1], PAIR[1])),
        ("f32[8]{0}", "all-reduce-start", PAIR[:1]),
        ("((f32[8]{0}), f32[2,3]{1,0})", "all-reduce-start", PAIR[1:]),  # JAX 0.12 on a GPU: (operand, result)
        # (operand, result)
        ("(f32[8]{0}, f32[2,3]{1,0})", "all-gather-start", PAIR[1:]),
        ("((f32[8]{0}), f32[2,3]{1,0})", "reduce-scatter-start", PAIR[1:]),
        ("((f32[8]{0}), f32[2,3]{1,0})", "all-to-all-start", PAIR[1:]),
        # (operand, result, context...)
        ("(f32[8]{0}, f32[2,3]{1,0}, u32[], u32[])", "collective-permute-start", PAIR[1:]),
        ("((f32[8]{0}), f32[2,3]{1,0}, u32[], u32[])", "all-to-all-start", PAIR[1:]),
        ("(f32[8]{0}, f32[2,3]{1,0}, token[])", "collective-permute-start", PAIR[1:]),
        # (operands, results)
        ("((f32[1]{0}, f32[2]{0}), (f32[8]{0}, f32[2,3]{1,0}))", "all-gather-start", PAIR),
        ("((f32[1]{0}, f32[2]{0}), (f32[8]{0}, f32[2,3]{1,0}), s32[])", "all-to-all-start", PAIR),
        # layouts with tiles and memory spaces
        ("((f32[1]{0:T(1024)}), f32[2,3]{1,0:T(8,128)S(1)})", "all-to-all-start", PAIR[1:]),
    ],
)
def test_results_without_operands(result, opcode, shapes):
    found = one(f"  %c.1 = {result} {opcode}(%a, %b), channel_id=1, replica_groups={{{{0,1}}}}")
    assert found.kind == opcode.removesuffix("-start")
    assert found.shapes == shapes
    assert found.result_bytes == sum({(8,): 32, (2, 3): 24}[dims] for _, dims in shapes)


def test_done_and_other_instructions_do_not_count():
    text = """
        %all-reduce-done.1 = f32[8]{0} all-reduce-done(%all-reduce-start.1)
        %all-to-all-done = (f32[8]{0}, f32[8]{0}) all-to-all-done(%all-to-all-start)
        %gte = f32[8]{0} get-tuple-element(%all-to-all), index=0, metadata={op_name="jit(f)/all_to_all"}
        %fusion = f32[8]{0} fusion(%all-gather.1), kind=kLoop, metadata={op_name="a = b all-gather(c)"}
        %t = (f32[8]{0}, f32[8]{0}) tuple(%a, %b), metadata={op_name="x) all-reduce(y"}
        all-reduce(
    """
    assert collectives(textwrap.dedent(text)) == []
    assert collectives("") == collectives(None) == []


@pytest.mark.parametrize(
    ("dtype", "items", "size"),
    [
        *(("pred", 3, 3), ("s8", 3, 3), ("bf16", 3, 6), ("f16", 3, 6), ("s32", 3, 12), ("f32", 3, 12)),
        *(("f64", 3, 24), ("c64", 3, 24), ("c128", 3, 48), ("u64", 3, 24), ("u4", 3, 2), ("f8e4m3fn", 3, 3)),
        ("f8e5m2", 3, 3),
    ],
)
def test_bytes_of_every_type(dtype, items, size):
    found = one(f"  %x = {dtype}[{items}]{{0}} all-gather(%y), replica_groups={{}}")
    assert (found.shapes, found.result_bytes) == (((dtype, (items,)),), size)


@pytest.mark.parametrize(
    ("scope", "phase"),
    [
        ("jit(step)/shard_map/id_exchange/all_to_all", "id_exchange"),
        ("jit(step)/shard_map/dense_backward/transpose(jvp(pool))/psum", "pool"),  # the innermost
        ("jit(step)/shard_map/my_gather/all_gather", ""),  # whole words only
        ("jit(step)/jit(gather)/all_gather", "gather"),
        ("", ""),
    ],
)
def test_phases(scope, phase):
    assert one(f'  %x = s32[] all-reduce(%y), replica_groups={{}}, metadata={{op_name="{scope}"}}').phase == phase


def test_a_compiled_program():
    def step(x):
        with jax.named_scope("row_exchange"):
            y = jax.lax.all_to_all(x, "device", 0, 0, tiled=True)
        with jax.named_scope("dense_grads"):
            return y, jax.lax.psum(y.sum(axis=0), "device")

    mesh = mesh_of(4)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("device"), out_specs=(P("device"), P()))
    compiled = jax.jit(mapped).lower(jnp.zeros((4 * 4 * 3, 5), jnp.float32)).compile()
    exchange, reduction = collectives(compiled.as_text())
    assert (exchange.kind, exchange.phase, exchange.group_size) == ("all-to-all", "row_exchange", 4)
    assert exchange.result_bytes == 4 * 3 * 5 * 4  # each device's whole block, however it is cut into arrays
    assert (reduction.kind, reduction.phase, reduction.group_size) == ("all-reduce", "dense_grads", 4)
    assert (reduction.shapes, reduction.result_bytes) == (((F32, (5,)),), 20)
