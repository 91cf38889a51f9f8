"""A machine, and programs written by hand as XLA prints them."""

import dataclasses

from recjax.planning.machine import HeldOut, Kernel, Machine, Point, Quantity

RATES = {"flops_f32": "FLOP/s", "memory": "B/s", "memory_size": "B", "line_size": "B"}
MACHINE = Machine(
    "a machine",
    True,
    {"cpu": "two cores", "date": "2026-01-02"},
    "cpu",
    2,
    True,
    2,
    {name: Quantity(1e9, unit, "measured") for name, unit in RATES.items()},
    {"kernel": Quantity(2.0, "us", "measured"), "loop": Quantity(1.0, "us", "measured")},
    {
        "copy": Kernel(1.0, "measured", (Point({"bytes": 8.0}, 3.5, 1.5),), HeldOut(1, 1.2, 1.2, 1.2, 0.2)),
        "matmul.f32": Kernel(0.5, "a guess"),
    },
)


def scaled(machine: Machine, factor: float) -> Machine:
    """A machine that does everything `factor` times as fast, with memories as large."""

    def quantity(q: Quantity) -> Quantity:
        times = {**dict.fromkeys(("FLOP/s", "B/s", "1/s"), factor), "us": 1 / factor}.get(q.unit, 1.0)
        return dataclasses.replace(q, value=q.value * times)

    def kernel(k: Kernel) -> Kernel:
        return dataclasses.replace(k, points=tuple(dataclasses.replace(p, us=p.us / factor) for p in k.points))

    return dataclasses.replace(
        machine,
        rates={name: quantity(q) for name, q in machine.rates.items()},
        overheads={name: quantity(q) for name, q in machine.overheads.items()},
        kernels={name: kernel(k) for name, k in machine.kernels.items()},
    )


# Two products wait for nothing; an all-reduce of the first may hide beside the second; the sum waits for both.
FORK = """
HloModule jit_train_step, is_scheduled=true, entry_computation_layout={(f32[64,32]{1,0})->f32[64,16]{1,0}}

%region_0.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused_computation (p.0: f32[64,16], p.1: f32[64,16]) -> f32[64,16] {
  %p.0 = f32[64,16]{1,0} parameter(0)
  %p.1 = f32[64,16]{1,0} parameter(1)
  ROOT %add.2 = f32[64,16]{1,0} add(%p.0, %p.1)
}

ENTRY %main.9 (x.1: f32[64,32], w.1: f32[32,16], v.1: f32[16,32]) -> f32[64,16] {
  %x.1 = f32[64,32]{1,0} parameter(0)
  %w.1 = f32[32,16]{1,0} parameter(1), metadata={op_name="w"}
  %v.1 = f32[16,32]{1,0} parameter(2)
  %dot.1 = f32[64,16]{1,0} dot(%x.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp(dense_forward)/dot_general" stack_frame_id=1}
  %all-reduce.1 = f32[64,16]{1,0} all-reduce(%dot.1), channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%region_0.1, metadata={op_name="jit(train_step)/dense_grads/psum"}
  %dot.2 = f32[64,16]{1,0} dot(%x.1, %v.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %sum_fusion = f32[64,16]{1,0} fusion(%all-reduce.1, %dot.2), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(train_step)/dense_update/add"}
}
"""  # noqa: E501 (as XLA breaks no lines)

# A gather fused with a sum; rows of a table updated in place; a loop of known length; a conditional.
LOOKUP = """
HloModule jit_train_step, is_scheduled=true

%fused_gather (t: f32[1000,16], i: s32[128,1], y: f32[128,16]) -> f32[128,16] {
  %t = f32[1000,16]{1,0} parameter(0)
  %i = s32[128,1]{1,0} parameter(1)
  %y = f32[128,16]{1,0} parameter(2)
  %g = f32[128,1,16]{2,1,0} gather(%t, %i), offset_dims={1,2}, collapsed_slice_dims={}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,16}
  %flat = f32[128,16]{1,0} bitcast(%g)
  ROOT %plus = f32[128,16]{1,0} add(%flat, %y)
}

%first (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}

%fused_scatter (t.1: f32[1000,16], i.1: s32[128,1], u: f32[128,1,16]) -> f32[1000,16] {
  %t.1 = f32[1000,16]{1,0} parameter(0)
  %i.1 = s32[128,1]{1,0} parameter(1)
  %u = f32[128,1,16]{2,1,0} parameter(2)
  ROOT %s = f32[1000,16]{1,0} scatter(%t.1, %i.1, %u), update_window_dims={1,2}, inserted_window_dims={}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, indices_are_sorted=true, unique_indices=true, to_apply=%first
}

%body (c: (s32[], f32[128,16])) -> (s32[], f32[128,16]) {
  %c = (s32[], f32[128,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %z = f32[128,16]{1,0} get-tuple-element(%c), index=1
  %twice = f32[128,16]{1,0} add(%z, %z)
  ROOT %next = (s32[], f32[128,16]{1,0}) tuple(%n, %twice)
}

%condition (c.1: (s32[], f32[128,16])) -> pred[] {
  %c.1 = (s32[], f32[128,16]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%dear (d: f32[128,16]) -> f32[128,16] {
  %d = f32[128,16]{1,0} parameter(0)
  %square = f32[128,16]{1,0} multiply(%d, %d)
  ROOT %cube = f32[128,16]{1,0} multiply(%square, %d)
}

%cheap (e: f32[128,16]) -> f32[128,16] {
  ROOT %e = f32[128,16]{1,0} parameter(0)
}

ENTRY %main (table: f32[1000,16], ids: s32[128,1], new: f32[128,16], which: s32[]) -> (f32[1000,16], f32[128,16]) {
  %table = f32[1000,16]{1,0} parameter(0)
  %ids = s32[128,1]{1,0} parameter(1)
  %new = f32[128,16]{1,0} parameter(2)
  %which = s32[] parameter(3)
  %rows = f32[128,16]{1,0} fusion(%table, %ids, %new), kind=kLoop, calls=%fused_gather
  %wide = f32[128,1,16]{2,1,0} bitcast(%rows)
  %written = f32[1000,16]{1,0} fusion(%table, %ids, %wide), kind=kLoop, calls=%fused_scatter
  %zero = s32[] constant(0)
  %begin = (s32[], f32[128,16]{1,0}) tuple(%zero, %rows)
  %while.1 = (s32[], /*index=1*/f32[128,16]{1,0}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %end = f32[128,16]{1,0} get-tuple-element(%while.1), index=1
  %one = f32[128,16]{1,0} conditional(%which, %end, %end), branch_computations={%dear, %cheap}
  ROOT %result = (f32[1000,16]{1,0}, f32[128,16]{1,0}) tuple(%written, %one)
}
"""  # noqa: E501 (as XLA breaks no lines)

# As XLA for GPUs and TPUs writes a collective: its beginning and its end apart, or inside a fusion.
BEGUN = """
HloModule jit_train_step, is_scheduled=true

%plus (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused_psum (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %psum.3 = f32[8]{0} all-reduce(%q), replica_groups=[1,2]<=[2], to_apply=%plus
}

ENTRY %main (x: f32[1024]) -> f32[8] {
  %x = f32[1024]{0} parameter(0)
  %all-to-all-start = ((f32[1024]{0}), f32[1024]{0}) all-to-all-start(%x), replica_groups={{0,1}}, dimensions={0}
  %beside = f32[1024]{0} negate(%x)
  %all-to-all-done = f32[1024]{0} all-to-all-done(%all-to-all-start)
  %after = f32[1024]{0} add(%all-to-all-done, %beside)
  %small = f32[8]{0} slice(%after), slice={[0:8]}
  %fusion-start = f32[8]{0} fusion(%small), kind=kCustom, calls=%fused_psum
  ROOT %last = f32[8]{0} negate(%fusion-start)
}
"""
