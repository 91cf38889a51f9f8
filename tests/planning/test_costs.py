"""Times of kernels: at measured points, between and beyond them, and by the roofline of a data sheet."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import MACHINE, scaled

from recjax.planning.costs import Costs, of_sizes
from recjax.planning.machine import HeldOut, Kernel, Point, Quantity, open_machine
from recjax.planning.work import Work, gather, matmul


def measured(kernel, points):
    """A machine whose points of one class are (sizes..., us)."""
    names = {
        "copy": ("bytes",),
        "matmul.f32": ("m", "n", "k"),
        "gather": ("rows", "row_bytes", "table_bytes"),
        "host_read": ("samples", "features", "ids"),
    }[kernel]
    made = tuple(Point(dict(zip(names, map(float, sizes), strict=True)), us, 1.0) for *sizes, us in points)
    return Costs(dataclasses.replace(MACHINE, kernels={kernel: Kernel(1.0, "measured", made)}))


def us(costs, kernel, **sizes):
    return costs.of(of_sizes(kernel, sizes)).us


COPIES = measured("copy", [(100, 2.0), (10_000, 8.0), (1_000_000, 800.0)])


@pytest.mark.parametrize(
    ("size", "expected"), [(100, 2), (10_000, 8), (1_000_000, 800), (1000, 4), (100_000, 80), (1, 2), (3_000_000, 2400)]
)  # at the points, halfway in logarithms, at the floor, and in proportion beyond
def test_times_lie_on_lines_in_logarithms(size, expected):
    assert us(COPIES, "copy", bytes=size) == pytest.approx(expected)


def test_between_two_sizes_both_count():
    costs = measured("matmul.f32", [(m, n, 8, m * n / 8) for m, n in itertools.product((8, 32), (8, 32))])
    assert us(costs, "matmul.nn_f32", m=16, n=16, k=8) == pytest.approx(32)
    assert us(costs, "matmul.nn_f32", m=64, n=16, k=16) == pytest.approx(64 * 16 / 8 * 2)  # beyond m and k


def test_a_table_larger_than_any_measured_takes_as_long_as_the_largest():
    costs = measured("gather", [(100, 64, table, t) for table, t in ((2**16, 1.0), (2**26, 5.0))])
    assert us(costs, "gather", rows=100, row_bytes=64, table_bytes=2**34) == pytest.approx(5)
    assert us(costs, "gather", rows=300, row_bytes=64, table_bytes=2**34) == pytest.approx(15)


def test_points_of_which_a_larger_one_took_less_are_evened_out():
    costs = measured("copy", [(10, 8.0), (100, 2.0)])
    assert us(costs, "copy", bytes=10) == us(costs, "copy", bytes=100) == pytest.approx(4)


def test_wider_rows_may_take_less_but_more_rows_may_not():
    """Since compilers make other code for them."""
    costs = measured(
        "gather", [(100, 256, 64, 90.0), (100, 512, 64, 10.0), (900, 256, 64, 40.0), (900, 512, 64, 100.0)]
    )
    times = [[us(costs, "gather", rows=n, row_bytes=of, table_bytes=64) for of in (256, 512)] for n in (100, 900)]
    assert times == [[pytest.approx(60), pytest.approx(10)], [pytest.approx(60), pytest.approx(100)]]


def test_reading_takes_a_sum_of_what_a_batch_its_samples_features_and_ids_take():
    """The law is given, and six batches show it; where times contradict it, no term is below 0."""

    def us(samples, features, ids):
        return 50 + 3 * features + 0.2 * samples + 0.01 * samples * features + 0.002 * ids

    sizes = [(100, 1, 100), (1000, 8, 8000), (1000, 8, 80_000), (5000, 1, 5000), (200, 40, 8000), (5000, 40, 200_000)]
    costs = measured("host_read", [(*size, us(*size)) for size in sizes])
    for samples, features, ids in [(1, 1, 1), (700, 20, 14_000), (100_000, 2, 10**6)]:  # also far outside
        found = costs.host("host_read", samples=samples, features=features, ids=ids)
        assert found.us == pytest.approx(us(samples, features, ids)) and found.cores == 1
    far = {"samples": 20_000.0, "features": 80.0, "ids": 50.0}
    assert costs.outside(Work("host_read", far, 0.0, 0.0)) == pytest.approx(4 * 2 * 2)
    disturbed = measured("host_read", [(100, 1, 100, 500.0), (100, 2, 200, 100.0), (100, 4, 400, 90.0)])
    assert disturbed.host("host_read", samples=1e5, features=50, ids=5e6).us > 0


def test_handing_ids_to_owners_takes_a_sum_of_what_ids_and_features_take_for_each_owner():
    """The law is given. A grid of these points says 1.2 times as much in their midst."""

    def us(ids, features, devices):
        return 300 + 0.02 * ids + 10 * features + 0.03 * ids * devices + 5 * features * devices

    sizes = [(i, f, d) for i in (1024, 16_384, 262_144) for f in (1, 40) for d in (2, 8) if i // f <= 2**16]
    for kernel in ("host_route.split_pooled", "host_pack.pooled"):
        points = tuple(Point(dict(zip(("ids", "features", "devices"), of, strict=True)), us(*of)) for of in sizes)
        costs = Costs(dataclasses.replace(MACHINE, kernels={kernel: Kernel(1.0, "measured", points)}))
        for ids, features, devices in [(60_000, 20, 4), (1000, 1, 32), (65_536, 6, 2)]:
            found = costs.host(kernel, ids=ids, features=features, devices=devices)
            assert found.us == pytest.approx(us(ids, features, devices))


def test_one_point_that_was_disturbed_does_not_raise_all_larger_ones():
    costs = measured("copy", [(10**n, us) for n, us in enumerate((16.0, 1.0, 1.0, 1.0, 8.0, 64.0), 1)])
    assert us(costs, "copy", bytes=10**4) == pytest.approx(2)  # the geometric mean of 16, 1, 1 and 1
    assert us(costs, "copy", bytes=10**5) == pytest.approx(8)


def test_how_far_outside_of_the_points_a_size_is():
    costs = measured("gather", [(r, b, t, 1.0) for r, b, t in itertools.product((64, 1024), (16, 64), (2**16, 2**20))])
    far = {
        "inside": (512, 32, 2**18),
        "larger": (4096, 128, 2**20),
        "smaller": (1024, 4, 2**16),
        "table": (64, 64, 2**30),
    }
    found = {name: costs.outside(gather(r, b, t, 0.0)) for name, (r, b, t) in far.items()}
    assert found == {"inside": 1, "larger": pytest.approx(4 * 2), "smaller": pytest.approx(4), "table": 1}
    assert costs.outside(matmul(8, 8, 8, 1, "f32", "nn", 1.0)) == float("inf")


def test_a_corner_that_nobody_measured_follows_the_roofline_of_its_neighbour():
    grid = [(m, n, 64, m * n / 64) for m, n in ((64, 64), (64, 4096), (4096, 64))]  # bound by operations
    costs = measured("matmul.f32", grid)
    found, near = (us(costs, "matmul.nn_f32", m=4096, n=n, k=64) for n in (4096, 64))
    assert found / near == pytest.approx(64, rel=0.05)


sizes = st.tuples(*[st.integers(1, 2**20)] * 3)


@given(
    st.lists(st.tuples(sizes, st.floats(0.1, 1e5)), min_size=1, max_size=12),
    sizes,
    st.tuples(*[st.integers(0, 999)] * 3),
)
def test_more_never_takes_less(points, base, more):
    costs = measured("matmul.f32", [(*size, t) for size, t in points])
    large = tuple(a + b for a, b in zip(base, more, strict=True))
    small_us, large_us = (us(costs, "matmul.f32", **dict(zip("mnk", s, strict=True))) for s in (base, large))
    assert large_us >= small_us * (1 - 1e-9)


def test_products_on_a_data_sheet_take_the_longer_of_operations_and_bytes():
    h100 = open_machine("h100")
    large = matmul(4096, 4096, 4096, 1, "bf16", "nn", 3 * 2 * 4096**2)
    assert Costs(h100).of(large).us == pytest.approx(2 * 4096**3 / 989.4e12 / 0.7 * 1e6)
    thin = matmul(65_536, 1, 512, 1, "f32", "nn", 4 * (65_536 * 512 + 512 + 65_536))
    assert Costs(h100).of(thin).us == pytest.approx(4 * (65_536 * 512 + 512 + 65_536) / 3.35e12 / 0.7 * 1e6)


def test_a_matrix_unit_takes_whole_tiles():
    v5e = Costs(open_machine("tpu_v5e"))
    narrow, whole = (v5e.of(matmul(65_536, 1024, k, 1, "bf16", "nn", 1.0)).us for k in (130, 256))
    assert narrow == pytest.approx(whole)


def test_rows_come_in_whole_lines_from_the_cache_as_far_as_the_table_fits_into_it():
    machine = open_machine("h100")
    eighth = machine.rates | {"cache": Quantity(1e18, "B/s", "no limit"), "line_size": Quantity(64, "B", "x")}
    costs = Costs(dataclasses.replace(machine, rates=eighth, kernels={}))
    table = 2 * machine.rates["cache_size"].value  # so every second row is there
    rows, row_bytes = 1e6, 80  # two lines each
    streamed = rows * row_bytes + 4 * rows  # rows written, ids read
    expected = (rows * 128 / 2 + streamed) / machine.rates["memory"].value * 1e6
    assert costs.of(gather(rows, row_bytes, table, 4 * rows)).us == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 14 * 6.0 + 2 * 7 / 8 * 2**30 / 450e9 * 1e6 / 1),
        ("all_to_all", 6.0 + 7 / 8 * 2**30 / 450e9 * 1e6),
        ("all_gather", 7 * 6.0 + 7 / 8 * 2**30 / 450e9 * 1e6),
    ],
)
def test_collectives_on_a_data_sheet_are_latencies_and_what_a_link_carries(kind, expected):
    costs = Costs(dataclasses.replace(open_machine("h100"), kernels={}))
    assert costs.of(Work(kind, {"bytes": 2**30, "devices": 8}, 0, 2**30)).us == pytest.approx(expected)


def test_collectives_of_more_devices_than_were_measured_grow_as_their_roofline_does():
    points = tuple(Point({"bytes": size, "devices": 2.0}, 10.0, 1.0) for size in (2.0**10, 2.0**20))
    machine = dataclasses.replace(open_machine("h100"), kernels={"all_gather": Kernel(1.0, "measured", points)})
    of = {n: Work("all_gather", {"bytes": 2.0**10, "devices": n}, 0, 2**10) for n in (2.0, 8.0)}
    latency, carried = 6.0, 2**10 / 450e9 * 1e6
    expected = 10 * (7 * latency + carried * 7 / 8) / (latency + carried / 2)
    assert Costs(machine).of(of[2.0]).us == pytest.approx(10)
    assert Costs(machine).of(of[8.0]).us == pytest.approx(expected)
    shared = dataclasses.replace(machine, shared=True)
    assert Costs(shared).of(of[8.0]).us == pytest.approx(10)  # the schedule slows all of them down


@pytest.mark.parametrize("name", ["h100", "tpu_v6e"])
@pytest.mark.parametrize("work", [matmul(512, 64, 64, 1, "f32", "nn", 1e6), gather(1000, 64, 1e9, 4000)])
def test_a_machine_twice_as_fast_takes_half_the_time(name, work):
    machine = open_machine(name)
    assert Costs(scaled(machine, 2)).of(work).us == pytest.approx(Costs(machine).of(work).us / 2)


def test_errors_are_ratios_and_the_geometric_mean_of_relative_errors():
    found = HeldOut.of([(2.0, 1.0), (1.0, 2.0), (1.5, 1.5)])
    assert found.points == 3
    assert found.ratio_mean == pytest.approx(4 ** (1 / 3)) and found.ratio_p50 == 2.0
    assert HeldOut.of([(1.1, 1.0), (1.4, 1.0)]).gmae == pytest.approx((0.1 * 0.4) ** 0.5)
    assert found.gmae < 0.01  # one lucky hit


def test_between_hosts_a_device_has_its_part_of_the_network():
    """16 devices in two hosts of an H200: 50 GB/s each, and rings enter a host through all eight parts together."""
    costs = Costs(dataclasses.replace(open_machine("h200"), kernels={}))
    size, far, near = 2.0**30, 15.0, 6.0

    def us(kind, **more):
        return costs.of(Work(kind, {"bytes": size, "devices": 16.0, **more}, 0, size)).us

    assert us("all_to_all") == pytest.approx(near + far + size * 8 / 16 / 50e9 * 1e6)
    assert us("all_gather") == pytest.approx(14 * near + 2 * far + size * 15 / 16 / 400e9 * 1e6)
    assert us("all_reduce") == pytest.approx(2 * (14 * near + 2 * far) + 2 * size * 15 / 16 / 400e9 * 1e6)
    assert us("all_to_all", hosts=16.0) == pytest.approx(far + size * 15 / 16 / 50e9 * 1e6)  # one device of each host
    small = costs.of(Work("all_reduce", {"bytes": 8.0, "devices": 16.0}, 0, 8)).us
    assert small == pytest.approx(2 * (3 * near + far), rel=1e-3)  # a tree: three levels inside, one across


def test_all_to_alls_of_a_torus_pass_through_others():
    costs = Costs(dataclasses.replace(open_machine("tpu_v5e"), kernels={}))
    work = Work("all_to_all", {"bytes": 2.0**30, "devices": 64.0}, 0, 2**30)
    hops = 2 * 8 / 4  # a quarter of each ring of eight
    assert costs.of(work).us == pytest.approx(1.0 + hops * 63 / 64 * 2**30 / 200e9 * 1e6)


def test_collectives_of_several_hosts_grow_from_those_measured_in_one_as_their_roofline_does():
    """Measured with up to 8 devices of one host; between two hosts each device has 50 GB/s."""
    points = tuple(Point({"bytes": size, "devices": n}, 10.0, 1.0) for size in (2.0**10, 2.0**30) for n in (2.0, 8.0))
    measured = dataclasses.replace(open_machine("h200"), kernels={"all_to_all": Kernel(1.0, "measured", points)})
    size, far, near = 2.0**30, 15.0, 6.0

    def us(devices, hosts):
        sizes = {"bytes": size, "devices": devices, "hosts": hosts}
        return Costs(measured).of(Work("all_to_all", sizes, 0, size)).us

    inside = near + 7 / 8 * size / 450e9 * 1e6
    assert us(8.0, 1.0) == pytest.approx(10)
    assert us(8.0, 2.0) == pytest.approx(10 * (near + far + size * 4 / 8 / 50e9 * 1e6) / inside)
    assert us(16.0, 2.0) == pytest.approx(10 * (near + far + size * 8 / 16 / 50e9 * 1e6) / inside)


def test_more_owners_that_pool_take_longer_than_was_measured_and_more_devices_do_not():
    points = tuple(
        Point({"ids": n, "features": 4.0, "devices": d}, n * d / 100) for n in (100.0, 1000.0) for d in (2.0, 8.0)
    )
    kernels = {name: Kernel(1.0, "measured", points) for name in ("host_route", "host_route.split_pooled")}
    costs = Costs(dataclasses.replace(MACHINE, kernels=kernels))
    where = {"ids": 1000.0, "features": 4.0, "devices": 32.0}
    assert costs.host("host_route", **where).us == pytest.approx(1000 * 8 / 100)
    assert costs.host("host_route.split_pooled", **where).us == pytest.approx(1000 * 32 / 100)
    assert costs.host("host_route.pooled", **where).us == pytest.approx(1000 * 8 / 100)  # nothing is known of them


@pytest.mark.parametrize(("variant", "passes"), [("tf32", 1), ("tf32x3", 3)])
def test_products_of_tensorfloat32_go_by_its_rate_and_three_of_them_take_three_times_as_long(variant, passes):
    """An H100: 494.5 TFLOP/s by the data sheet, of which a product reaches 0.7; in three passes 2.46 times float32."""
    sheet, size = Costs(open_machine("h100")), {"m": 4096, "n": 4096, "k": 4096}
    by_hand = passes * 2 * 4096**3 / 494.5e12 / 0.7 * 1e6
    assert us(sheet, f"matmul.nn_{variant}", **size) == pytest.approx(by_hand)
    assert us(sheet, "matmul.nn_f32", **size) / by_hand == pytest.approx(494.5 / 67 / passes)
    # A machine on which float32 was measured, at half of its rate, is as far off the other; one without it as slow.
    measured_us = 2 * 2 * 64**3 / 1e9 * 1e6
    points = [(64, 64, 64, measured_us)]
    plain = measured("matmul.f32", points)
    assert us(plain, f"matmul.nn_{variant}", m=64, n=64, k=64) == pytest.approx(measured_us)
    rates = plain.machine.rates | {"flops_tf32": Quantity(4e9, "FLOP/s", "a test")}
    faster = Costs(dataclasses.replace(plain.machine, rates=rates))
    assert us(faster, f"matmul.nn_{variant}", m=64, n=64, k=64) == pytest.approx(measured_us * passes / 4)
