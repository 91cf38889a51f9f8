"""What lies between the two ends of a collective, in programs written by hand."""

import textwrap

from recjax.lab.bench.overlap import flights
from recjax.lab.bench.report import flights as table
from recjax.lab.formats.trace import COMPUTE, Event
from recjax.lab.replay.profile import Span
from recjax.lab.trace.record import dependencies
from recjax.lab.trace.times import Timeline
from recjax.planning.compiled_collectives import collectives
from recjax.planning.graph import read_graph

PROGRAM = textwrap.dedent("""
    HloModule jit_train_step, is_scheduled=true

    %fused (p: f32[8]) -> f32[8] {
      %p = f32[8]{0} parameter(0)
      ROOT %dot.1 = f32[8]{0} dot(%p, %p), metadata={op_name="jit(train_step)/jvp(dense_forward)/dot_general"}
    }

    ENTRY %main (x: f32[8], /*index=1*/y: f32[8]) -> f32[8] {
      %x = f32[8]{0:T(128)} parameter(0)
      %ids = s32[8]{0} all-to-all(%x), metadata={op_name="jit(train_step)/id_exchange/all_to_all"}
      %rows-start = ((f32[8]{0}), f32[8]{0:T(128)S(1)}, u32[]{:S(2)}) all-to-all-start(%x), metadata={op_name="jit(train_step)/row_exchange/all_to_all"}
      %bottom = f32[8]{0} fusion(%x), kind=kOutput, calls=%fused
      %view = f32[4,2]{1,0} bitcast(%bottom), metadata={op_name="jit(train_step)/jvp(dense_forward)/reshape"}
      %buffer = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
      %copy-start = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}) copy-start(%bottom)
      %copy-done = f32[8]{0} copy-done(%copy-start)
      %top = f32[8]{0} dot(%x, %x), metadata={op_name="jit(train_step)/dense_backward/transpose(jvp(dense_forward))/dot"}
      %bucket-start = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%top), metadata={op_name="jit(train_step)/dense_grads/psum"}
      %scatter = f32[8]{0} scatter(%x, %top), metadata={op_name="jit(train_step)/dense_backward/transpose(jvp(pool))/add"}
      %rows-done = f32[8]{0:T(128)S(1)} all-to-all-done(%rows-start)
      %sync = f32[8]{0} all-reduce(%rows-done), metadata={op_name="jit(train_step)/finite_check/psum"}
      ROOT %bucket-done = f32[8]{0} all-reduce-done(%bucket-start)
    }
""")  # noqa: E501 lines as XLA writes them


def test_operations_between_both_ends_count_and_bookkeeping_does_not() -> None:
    found = flights(PROGRAM)
    assert [(f["name"], f["kind"], f["phase"], f["asynchronous"]) for f in found] == [
        ("ids", "all-to-all", "id_exchange", False),
        ("rows-start", "all-to-all", "row_exchange", True),
        ("bucket-start", "all-reduce", "dense_grads", True),
        ("sync", "all-reduce", "finite_check", False),
    ]
    assert [f["beside"] for f in found] == [
        {},
        {"dense_forward": 1, "dense_backward": 1, "pool_backward": 1},
        {"pool_backward": 1, "finite_check": 1},
        {},
    ]


def test_the_table_tells_synchronous_ones_from_those_beside_which_nothing_runs() -> None:
    lines = table(flights(PROGRAM)).splitlines()
    assert lines[1].split("  ")[-1].strip() == "none: it is synchronous"
    assert lines[2].split("  ")[-1].strip() == "1 dense_forward, 1 dense_backward, 1 pool_backward"


def test_a_collective_that_a_tpu_fuses_with_products_is_one() -> None:
    """Each fusion holds a copy of it; the first and the last bear its name."""
    inside = "{\n  %q = f32[8]{0} parameter(0)\n  ROOT %ar = f32[8]{0} all-reduce(%q)\n}\n"
    scope = 'metadata={op_name="jit(train_step)/dense_backward/transpose(jvp(dense_forward))/dot"}'
    program = "".join(f"%step.{i} (q: f32[8]) -> f32[8] {inside}\n" for i in range(3)) + textwrap.dedent(f"""
        ENTRY %main (x: f32[8]) -> f32[8] {{
          %x = f32[8]{{0}} parameter(0)
          %async-collective-start.4 = (f32[8]{{0}}) fusion(%x), kind=kCustom, calls=%step.0
          %async-collective-start.5 = (f32[8]{{0}}) fusion(%x), kind=kCustom, calls=%step.0
          %fusion.1 = f32[8]{{0}} fusion(%async-collective-start.4), kind=kOutput, calls=%step.1, {scope}
          %async-collective-done.5 = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%step.2
          %fusion.2 = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%step.1, {scope}
          ROOT %async-collective-done.4 = f32[8]{{0}} fusion(%fusion.1), kind=kCustom, calls=%step.2
        }}
    """)
    found = flights(program)
    assert [(f["name"], f["kind"], f["asynchronous"]) for f in found] == [
        ("async-collective-start.4", "all-reduce", True),
        ("async-collective-start.5", "all-reduce", True),
    ]
    assert [f["beside"] for f in found] == [{"dense_backward": 2}, {"dense_backward": 1}]
    assert [c.name for c in collectives(program)] == ["async-collective-start.4", "async-collective-start.5"]


GPU = textwrap.dedent("""
    %fused_psum_invariant.95.0.clone (param_0: s32[3]) -> s32[3] {
      %param_0 = s32[3]{0} parameter(0), metadata={scheduling_name="param_0"}
      ROOT %psum_invariant.95.2 = s32[3]{0} all-reduce(%param_0), channel_id=1, replica_groups=mesh['replica'=1,'host'=1,'device'=8] {'replica','host','device'}, use_global_device_ids=true, to_apply=%region_52.53, metadata={op_name="jit(train_step)/shard_map/finite_check/psum_invariant"}
    }

    %fused_psum_invariant.7 (param_0.1: f32[5]) -> f32[5] {
      %param_0.1 = f32[5]{0} parameter(0)
      ROOT %psum_invariant.7 = f32[5]{0} all-reduce(%param_0.1), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%region_52.54, metadata={op_name="jit(train_step)/shard_map/dense_grads/psum_invariant"}
    }

    ENTRY %main (x: s32[3], y: f32[5]) -> s32[3] {
      %x = s32[3]{0} parameter(0)
      %y = f32[5]{0} parameter(1)
      %fusion.7 = f32[5]{0} fusion(%y), kind=kCustom, calls=%fused_psum_invariant.7, metadata={op_name="jit(train_step)/shard_map/dense_grads/psum_invariant"}, backend_config={"fusion_backend_config":{"kind":"__triton_collective"}}
      %rows-start = ((f32[5]{0}), f32[5]{0}) all-to-all-start(%y), replica_groups=[1,8]<=[8], metadata={op_name="jit(train_step)/row_exchange/all_to_all"}
      %fusion-start = ((s32[3]{0}), s32[3]{0}) fusion-start(%x), kind=kCustom, calls=%fused_psum_invariant.95.0.clone, metadata={op_name="jit(train_step)/shard_map/finite_check/psum_invariant" scheduling_name="fusion-start"}, backend_config={"fusion_backend_config":{"kind":"__triton_collective"}}
      %top = f32[5]{0} add(%y, %y), metadata={op_name="jit(train_step)/jvp(dense_forward)/add"}
      %rows-done = f32[5]{0} all-to-all-done(%rows-start)
      ROOT %fusion-done = s32[3]{0} fusion-done(%fusion-start), metadata={op_name="jit(train_step)/shard_map/finite_check/psum_invariant"}, backend_config={"fusion_backend_config":{"kind":"__triton_collective"}}
    }
""")  # noqa: E501 lines as XLA writes them for an H200


def test_a_collective_that_a_gpu_makes_in_a_kernel_is_one() -> None:
    found = flights(GPU)
    assert [(f["name"], f["kind"], f["phase"], f["asynchronous"]) for f in found] == [
        ("fusion.7", "all-reduce", "dense_grads", False),
        ("rows-start", "all-to-all", "row_exchange", True),
        ("fusion-start", "all-reduce", "finite_check", True),
    ]
    assert [f["beside"] for f in found] == [{}, {"dense_forward": 1}, {"dense_forward": 1}]


def test_readers_of_programs_know_it_by_the_name_that_a_profile_has() -> None:
    listed = collectives(GPU)
    assert [(c.name, c.kind, c.phase, c.result_bytes, c.group_size) for c in listed] == [
        ("fusion.7", "all-reduce", "dense_grads", 20, 8),
        ("rows-start", "all-to-all", "row_exchange", 20, 8),
        ("fusion-start", "all-reduce", "finite_check", 12, 8),
    ]
    assert dependencies(GPU).keys() == {"fusion.7", "rows-start", "fusion-start"}
    graph = read_graph(GPU, 8)
    assert [node.name for node in graph.nodes if node.kind == "collective"] == [
        "fusion.7",
        "rows-start",
        "fusion-start",
    ]
    assert [node.name for node in graph.nodes if node.kind == "wait"] == ["rows-done", "fusion-done"]


def test_the_end_of_one_is_no_computing() -> None:
    event = Event(0, "all_reduce", "finite_check", "", "fusion-start", 0, "int", (0, 1), 12, 12)
    spans = (Span("fusion-start", 10, 12), Span("top", 20, 30), Span("fusion-done", 40, 50))
    joined = Timeline(spans).joined([event], 0, 0)
    assert [(e.kind, e.start_ns, e.duration_ns) for e in joined] == [("all_reduce", 10, 40), (COMPUTE, 20, 10)]
