"""What lies between the two ends of a collective, in programs written by hand."""

import textwrap

from recjax.bench.overlap import flights
from recjax.bench.report import flights as table

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
