"""The graph of a compiled step, and what its kernels do, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from support.machines import BEGUN, FORK, LOOKUP

from recjax.planning.graph import read_graph
from recjax.planning.work import gather, scatter
from recjax.utils.hlo import Array, read_program


def nodes_of(text, devices=4):
    return {node.name: node for node in read_graph(text, devices).nodes}


def compiled(function, *arguments):
    """The nodes of a function as XLA compiles it here for one device."""
    return read_graph(jax.jit(function).lower(*arguments).compile().as_text(), 1)


def test_the_text_is_read_with_its_shapes_and_attributes():
    program = read_program(LOOKUP)
    loop = program.entry.instructions["while.1"]
    assert loop.arrays == (Array("s32", ()), Array("f32", (128, 16)))
    assert loop.operands == ("begin",) and loop.trips == 7 and loop.called("body") == "body"
    assert program.entry.instructions["one"].branches() == ("dear", "cheap")
    assert program.entry.root.name == "result"
    assert read_program(FORK).entry.instructions["dot.1"].scope == "jit(train_step)/jvp(dense_forward)/dot_general"


def test_a_loop_over_few_numbers_is_one_kernel_of_a_cpu():
    """XLA puts such loops in calls, as those of random keys: each turn has dozens of instructions."""
    graph = compiled(lambda key: jax.random.key_data(jax.random.fold_in(key, 7)), jax.random.key(0))
    (loop,) = (node for node in graph.nodes if node.opcode == "call")
    assert loop.kind == "kernel" and graph.launches == len(graph.nodes)
    assert 0 < loop.works[0].bytes < 10_000


def test_arrays_on_the_chip_of_a_tpu_are_told_from_those_in_other_memories():
    """Layouts of GPUs have no tiles: their memory space 1 is not on the chip."""
    program = read_program(
        "ENTRY %main (a: f32[8,128]) -> f32[8,128] {\n"
        "  %a = f32[8,128]{1,0:T(8,128)} parameter(0)\n"
        "  %b = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)\n"
        "  %c = f32[8,128]{1,0:S(1)} copy(%a)\n"
        "  ROOT %d = f32[8,128]{1,0:T(8,128)} copy(%c)\n}\n"
    )
    found = {i.name: [array.on_chip for array in i.arrays] for i in program.entry.instructions.values()}
    assert found == {"a": [False], "b": [True, False, False], "c": [False], "d": [False]}
    assert program.entry.instructions["b"].arrays[:2] == (Array("f32", (8, 128)),) * 2


def test_a_text_without_an_entry_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        read_program("HloModule nothing")


def test_products_count_two_operations_for_each_term_and_their_bytes_once():
    nodes = nodes_of(FORK)
    (work,) = nodes["dot.1"].works
    assert work.kernel == "matmul.nn_f32" and dict(work.sizes) == {"m": 64, "n": 16, "k": 32}
    assert work.flops == 2 * 64 * 16 * 32
    assert work.bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    (other,) = nodes["dot.2"].works
    assert other.kernel == "matmul.nt_f32" and other.flops == work.flops


def test_a_left_operand_whose_rows_begin_a_kibibyte_apart_is_a_class_of_its_own():
    def of(m):
        text = FORK.replace(
            "lhs_contracting_dims={1}, rhs_contracting_dims={0}", "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
        )
        text = text.replace("f32[64,32]{1,0} parameter(0)", f"f32[32,{m}]{{1,0}} parameter(0)")
        return nodes_of(text)["dot.1"].works[0]

    assert of(64).kernel == "matmul.tn_f32" and of(512).kernel == "matmul.strided_tn_f32"
    assert of(512).sizes["m"] == 512 and of(512).flops == 2 * 512 * 16 * 32


def test_nodes_wait_for_what_they_take_and_have_the_part_of_their_scope():
    graph = read_graph(FORK, 4)
    assert [node.name for node in graph.nodes] == ["dot.1", "all-reduce.1", "dot.2", "sum_fusion"]
    assert [node.waits_for for node in graph.nodes] == [(), (0,), (), (1, 2)]
    assert [node.part for node in graph.nodes] == ["dense_forward", "dense_grads", "other", "dense_update"]
    assert read_graph(FORK, 4, {"dot.2": "mine"}).nodes[2].part == "mine"


def test_a_collective_has_the_bytes_of_its_message_and_of_one_device_is_a_copy():
    (work,) = nodes_of(FORK)["all-reduce.1"].works
    assert work.kernel == "all_reduce" and dict(work.sizes) == {"bytes": 64 * 16 * 4, "devices": 4}
    (alone,) = nodes_of(FORK.replace("{{0,1,2,3}}", "{{0},{1}}"))["all-reduce.1"].works
    assert alone.kernel == "copy"


def test_a_gather_reads_its_rows_and_not_the_table():
    gathered, rest = nodes_of(LOOKUP)["rows"].works
    assert gathered.kernel == "gather.fused"  # with a sum
    assert dict(gathered.sizes) == {"rows": 128, "row_bytes": 64, "table_bytes": 1000 * 64}
    assert gathered.bytes == 2 * 128 * 64 + 128 * 4
    # Read: ids, rows of the table and what is added; written: the sum. Less what the gather counts already.
    assert rest.kernel == "elementwise"
    assert rest.bytes == (128 * 4 + 128 * 64 + 128 * 64) + 128 * 64 - gathered.bytes


def test_a_gather_of_columns_reads_their_elements_each_by_itself():
    text = """
HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[512,37], of: s32[81,1]) -> f32[81,512,1] {
  %x = f32[512,37]{1,0} parameter(0)
  %of = s32[81,1]{1,0} parameter(1)
  ROOT %columns = f32[81,512,1]{2,1,0} gather(%x, %of), offset_dims={1,2}, collapsed_slice_dims={}, start_index_map={1}, index_vector_dim=1, slice_sizes={512,1}
}
"""  # noqa: E501 (as XLA breaks no lines)
    (work,) = nodes_of(text)["columns"].works
    assert dict(work.sizes) == {"rows": 81 * 512, "row_bytes": 4, "table_bytes": 37 * 4}  # those of a row
    (rows,) = nodes_of(text.replace("slice_sizes={512,1}", "slice_sizes={512,37}"))["columns"].works
    assert rows.sizes["row_bytes"] == 512  # all lie in order: long ones count as several


def test_an_update_in_place_writes_its_rows_and_not_the_table():
    (work,) = nodes_of(LOOKUP)["written"].works
    assert work.kernel == "scatter.sorted" and work.sizes["rows"] == 128 and work.sizes["row_bytes"] == 64
    assert work.bytes == 3 * 128 * 64 + 128 * 4  # rows read, and those of the table read and written
    repeated = LOOKUP.replace("unique_indices=true, ", "")
    assert nodes_of(repeated)["written"].works[0].kernel == "scatter.sorted_add"
    (unsorted,) = nodes_of(repeated.replace("indices_are_sorted=true, ", ""))["written"].works
    assert unsorted.kernel == "scatter.add"


def test_a_loop_runs_as_often_as_the_compiler_knows():
    node = nodes_of(LOOKUP)["while.1"]
    assert node.kind == "loop" and node.trips == 7
    (inner,) = node.body.nodes
    assert inner.works[0].bytes == 3 * 128 * 64  # the same array is read twice
    unknown = read_graph(LOOKUP.replace("known_trip_count", "dynamic"), 4)
    assert unknown.unknown == ("while.1",)
    assert unknown.flops == read_graph(LOOKUP, 4).flops - 6 * 128 * 16


def test_of_a_conditional_the_branch_that_does_least_counts():
    assert nodes_of(LOOKUP)["one"].body.nodes == ()
    assert len(nodes_of(LOOKUP.replace("{%dear, %cheap}", "{%dear, %dear}"))["one"].body.nodes) == 2


def test_collectives_that_are_begun_and_ended_and_those_inside_fusions_are_found():
    graph = read_graph(BEGUN, 2)
    assert [(node.name, node.kind) for node in graph.nodes] == [
        ("all-to-all-start", "collective"),
        ("beside", "kernel"),
        ("all-to-all-done", "wait"),
        ("after", "kernel"),
        ("small", "kernel"),
        ("fusion-start", "collective"),
        ("last", "kernel"),
    ]
    assert graph.nodes[0].works[0].sizes["bytes"] == 4096 and graph.nodes[5].works[0].sizes["bytes"] == 32
    assert graph.nodes[2].waits_for == (0,) and graph.nodes[3].waits_for == (1, 2)


def test_a_layer_that_xla_compiled_has_the_operations_of_its_three_products():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jax.lax.dot(x, w, precision="highest")))

    def step(w, x):
        return jax.grad(loss, argnums=(0, 1))(w, x)

    graph = compiled(step, jnp.ones((48, 80)), jnp.ones((64, 48)))
    products = [work for node in graph.nodes for work in node.works if work.kernel.startswith("matmul")]
    assert [work.flops for work in products] == [2 * 64 * 48 * 80] * 3
    assert sum(w.sizes["elements"] for n in graph.nodes for w in n.works if w.kernel == "transcendental") >= 64 * 80


CALLS = """
HloModule jit_train_step

ENTRY %main (x: f32[64,20], w: f32[20,8], b: f32[8]) -> f32[64,8] {
  %x = f32[64,20]{1,0} parameter(0)
  %w = f32[20,8]{1,0} parameter(1)
  %b = f32[8]{0} parameter(2)
  %buffer = f32[64,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %layer = f32[64,8]{1,0} custom-call(%x, %w, %b), custom_call_target="recjax_dense_forward", api_version=API_VERSION_TYPED_FFI
  ROOT %strange = f32[64,8]{1,0} custom-call(%layer), custom_call_target="strange"
}
"""  # noqa: E501 (as XLA breaks no lines)


def test_products_of_the_optional_kernels_count_and_what_else_is_called_is_named_and_moves_its_bytes():
    graph = read_graph(CALLS, 1)
    assert [node.name for node in graph.nodes] == ["layer", "strange"]
    assert graph.flops == 2 * 64 * 20 * 8
    assert graph.unknown == ("strange",)
    assert graph.nodes[1].works[0].bytes == 2 * 64 * 8 * 4


@pytest.mark.parametrize("rows", [1, 300])
def test_a_lookup_that_xla_compiled_gathers_as_many_rows_as_there_are_ids(rows):
    graph = compiled(lambda t, i: t.at[i].get(mode="clip"), jnp.ones((5000, 32)), jnp.zeros(rows, jnp.int32))
    moved = [w for n in graph.nodes for w in n.works if w.kernel == "gather"] or [
        w
        for n in graph.nodes
        for w in n.works  # of one row XLA makes a slice
    ]
    assert sum(w.sizes.get("rows", 1) for w in moved) >= rows
    assert sum(w.bytes for w in moved) < 5000 * 32 * 4


@pytest.mark.parametrize(
    ("left", "right", "result", "summed", "kernel", "sizes"),
    [
        ("64,32", "32,16", "64,16", "", "matmul.nn", {"m": 64, "n": 16, "k": 32}),
        ("32,64", "32,16", "64,16", "", "matmul.nn", {"m": 64, "n": 16, "k": 32}),  # the left one lies transposed
        ("32,64", "32,16", "64,16", "00", "matmul.tn", {"m": 64, "n": 16, "k": 32}),
        ("64,32", "16,32", "64,16", "11", "matmul.nt", {"m": 64, "n": 16, "k": 32}),
        ("8,27,16", "8,27,16", "8,27,27", "22", "batched_matmul.nt", {"batch": 8, "m": 27, "n": 27, "k": 16}),
        ("8,512,367", "8,512,512", "8,367,512", "11", "matmul.tn", {"m": 367, "n": 512, "k": 4096}),  # cut into 8
    ],
)
def test_products_of_a_gpus_library_are_told_from_three_matrices(left, right, result, summed, kernel, sizes):
    dims = (
        f'"lhs_contracting_dimensions":["{summed[0]}"],"rhs_contracting_dimensions":["{summed[1]}"]' if summed else ""
    )
    text = f"""
HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: f32[{left}], w: f32[{right}]) -> f32[{result}] {{
  %x = f32[{left}] parameter(0)
  %w = f32[{right}] parameter(1)
  %call = (f32[{result}], s8[4194304]{{0}}) custom-call(%x, %w), custom_call_target="__cublas$gemm", config={{{dims}}}
  ROOT %got = f32[{result}] get-tuple-element(%call), index=0
}}
"""
    graph = read_graph(text, 1)
    (work,) = graph.nodes[0].works
    assert (work.kernel, dict(work.sizes)) == (f"{kernel}_f32", sizes) and not graph.unknown
    assert work.flops == 2 * sizes.get("batch", 1) * sizes["m"] * sizes["n"] * sizes["k"]


SLICED = """HloModule sliced, entry_computation_layout={()->()}

%inside (rows: f32[96,16], ids: s32[96]) -> bf16[32,16] {
  %rows = f32[96,16]{1,0} parameter(0)
  %ids = s32[96]{0} parameter(1)
  %limit = s32[] constant(90)
  %limits = s32[96]{0} broadcast(%limit), dimensions={}
  %inside_table = pred[96]{0} compare(%ids, %limits), direction=LT
  %wide = pred[96,16]{1,0} broadcast(%inside_table), dimensions={0}
  %grown = f32[96,16]{1,0} exponential(%rows)
  %chosen = f32[96,16]{1,0} select(%wide, %grown, %rows)
  %first = f32[32,16]{1,0} slice(%chosen), slice={[0:32], [0:16]}
  ROOT %narrow = bf16[32,16]{1,0} convert(%first)
}

%turned (x: f32[96,1,16]) -> f32[16,96,1] {
  %x = f32[96,1,16]{2,1,0} parameter(0)
  %other = f32[16,96,1]{0,1,2} transpose(%x), dimensions={2,0,1}
  ROOT %out = f32[16,96,1]{2,1,0} copy(%other)
}

%flat (a: f32[96,16], b: f32[96,1,16]) -> f32[3072] {
  %a = f32[96,16]{1,0} parameter(0)
  %b = f32[96,1,16]{2,1,0} parameter(1)
  %a_flat = f32[1536]{0} bitcast(%a)
  %b_flat = f32[1536]{0} bitcast(%b)
  ROOT %both = f32[3072]{0} concatenate(%a_flat, %b_flat), dimensions={0}
}

ENTRY %main (table: f32[96,16], which: s32[96], y: f32[96,1,16]) -> (bf16[32,16], f32[16,96,1], f32[96,32], f32[1,96,16], f32[3072]) {
  %table = f32[96,16]{1,0} parameter(0)
  %which = s32[96]{0} parameter(1)
  %y = f32[96,1,16]{2,1,0} parameter(2)
  %part = bf16[32,16]{1,0} fusion(%table, %which), kind=kLoop, calls=%inside
  %order = f32[16,96,1]{2,1,0} fusion(%y), kind=kLoop, calls=%turned
  %side = f32[96,32]{1,0} concatenate(%table, %table), dimensions={1}
  %same = f32[1,96,16]{2,1,0} transpose(%y), dimensions={1,0,2}
  %in_a_row = f32[3072]{0} fusion(%table, %y), kind=kLoop, calls=%flat
  ROOT %all = (bf16[32,16]{1,0}, f32[16,96,1]{2,1,0}, f32[96,32]{1,0}, f32[1,96,16]{2,1,0}, f32[3072]{0}) tuple(%part, %order, %side, %same, %in_a_row)
}
"""  # noqa: E501 (as XLA breaks no lines)


def test_a_fusion_computes_what_its_result_asks_for_and_a_pass_is_classed_by_its_way_through_memory():
    """A slice at the end keeps 32 of 96 rows: only these are read and taken to a power."""
    nodes = nodes_of(SLICED)
    streamed, powers = nodes["part"].works
    assert streamed.kernel == "elementwise.bf16"
    assert streamed.bytes == 32 * 16 * (4 + 2) + 96 * 4  # of the ids all, since each element of a row asks for its own
    assert powers.kernel == "transcendental" and powers.sizes["elements"] == 32 * 16
    assert nodes["order"].works[0].kernel == "copy.transposed"
    assert nodes["side"].works[0].kernel == "copy.joined"
    (flat,) = nodes["in_a_row"].works
    assert (flat.kernel, flat.bytes) == ("copy.fused_joined", 2 * 3072 * 4)
    assert nodes["same"].works[0].kernel == "copy"  # a dimension of one row may stand anywhere
    halved = SLICED.replace("f32[96,1,16]", "bf16[96,1,16]").replace("f32[16,96,1]", "bf16[16,96,1]")
    assert nodes_of(halved)["order"].works[0].kernel == "copy.bf16_transposed"


def test_numbers_rounded_to_16_bits_on_the_way_cost_beside_those_that_are_written():
    """A slice keeps 32 of 96 rows: their 512 numbers count, and no others."""
    rounded = SLICED.replace("ROOT %narrow", "%narrow").replace(
        "convert(%first)", "convert(%first)\n  ROOT %wide_again = f32[32,16]{1,0} convert(%narrow)"
    )
    *_, conversions = nodes_of(rounded.replace("bf16[32,16]{1,0} fusion", "f32[32,16]{1,0} fusion"))["part"].works
    assert conversions.kernel == "convert" and dict(conversions.sizes) == {"elements": 32 * 16}
    assert all(work.kernel != "convert" for work in nodes_of(SLICED)["part"].works)  # written as it is


def test_a_long_row_counts_as_several():
    assert gather(36, 4096, 2**20, 144).sizes == {"rows": 288, "row_bytes": 512, "table_bytes": 2**20}
    assert scatter(36, 512, 2**20, 144, "add").sizes == {"rows": 36, "row_bytes": 512, "table_bytes": 2**20}


@pytest.mark.parametrize("passes", ["", "_x3"])
def test_products_say_how_a_gpu_rounds_their_factors(passes):
    """In XLA's own words for an H200: of a product that it compiles itself, and of one by a library."""
    own, by_library = f"dot_tf32_tf32_f32{passes}", f"ALG_DOT_TF32_TF32_F32{passes.upper()}"
    graph = read_graph(FORK.replace("rhs_contracting_dims={0}", f"rhs_contracting_dims={{0}}, algorithm={own}"), 4)
    kernels = [work.kernel for node in graph.nodes for work in node.works if work.kernel.startswith("matmul")]
    assert kernels == [f"matmul.nn_tf32{passes[1:]}", "matmul.nt_f32"]
    text = f"""
HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: f32[64,32], w: f32[32,16]) -> f32[64,16] {{
  %x = f32[64,32] parameter(0)
  %w = f32[32,16] parameter(1)
  ROOT %call = f32[64,16] custom-call(%x, %w), custom_call_target="__cublas$gemm", config={{"algorithm":"{by_library}"}}
}}
"""
    (work,) = read_graph(text, 1).nodes[0].works
    assert work.kernel == f"matmul.nn_tf32{passes[1:]}" and work.flops == 2 * 64 * 32 * 16
