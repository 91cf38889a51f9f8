"""A predicted step: what bounds it, and what changes it."""

import dataclasses

import pytest
from support.machines import FORK, MACHINE, scaled

from recjax.lab.predict import draw
from recjax.planning.costs import Costs
from recjax.planning.graph import Graph, Node, read_graph
from recjax.planning.machine import SIZES, Kernel, Point, Quantity, open_machine
from recjax.planning.predict import HostWork, figures, parts, predict
from recjax.planning.schedule import node_cost
from recjax.planning.step_sizes import Routed
from recjax.planning.work import Work

HOST = HostWork(
    samples=1000,
    ids=8000,
    features=8,
    placed_bytes=10**6,
    placed_arrays=20,
    arguments=50,
    devices=4,
    workers=2,
    source="prepared",
)
H100 = open_machine("h100")


def with_stages(machine=MACHINE, **us):
    """The machine with host stages that take so long whatever the sizes, each by one thread at a time."""
    stages = {
        f"host_{name}": Kernel(
            1.0,
            "measured",
            tuple(
                Point({s: size for s in SIZES[f"host_{name}"]}, time, 1.0)
                for size in ((1.0, 1e9) if name == "read" else (1e9,))  # a sum, which two show to be constant
            ),
        )
        for name, time in us.items()
    }
    return dataclasses.replace(machine, kernels=stages)


def step(batch):
    """The program for another batch size."""
    return read_graph(FORK.replace("[64,", f"[{batch},"), 4)


def test_a_step_takes_as_long_as_the_slowest_of_what_it_waits_for():
    machine = with_stages(read=300.0, route=500.0, pack=40.0, place=50.0, dispatch=60.0)
    found = predict(step(64), dataclasses.replace(machine, shared=False), HOST)
    assert found.bounds["main thread"] == pytest.approx(150)
    assert found.bounds["reading and routing"] == pytest.approx(800)  # two threads make no more progress than one
    assert found.bounds["interpreter"] == pytest.approx(950)
    assert found.bound_by == "interpreter" and found.step_us == pytest.approx(950)
    assert found.samples_per_s == pytest.approx(1000 / 950e-6)
    assert found.missing == () and "CPU cores" not in found.bounds


def test_threads_that_make_progress_beside_each_other_halve_the_time_ahead():
    machine = with_stages(read=400.0, route=0.1, pack=1.0, place=1.0, dispatch=1.0)
    read = machine.kernels["host_read"]
    points = tuple(dataclasses.replace(point, cores=2.0) for point in read.points)
    apart = {"host_read": dataclasses.replace(read, points=points)}
    found = predict(step(64), dataclasses.replace(machine, kernels=machine.kernels | apart), HOST)
    assert found.bounds["reading and routing"] == pytest.approx(200.1)
    alone = predict(
        step(64), dataclasses.replace(machine, kernels=machine.kernels | apart), dataclasses.replace(HOST, workers=0)
    )
    assert alone.bounds["reading and routing"] == 0 and alone.bounds["main thread"] == pytest.approx(403.1)


def test_devices_that_share_the_cores_of_their_host_take_as_long_as_all_their_work():
    one, four = (predict(step(64), MACHINE, dataclasses.replace(HOST, devices=n)) for n in (2, 8))
    assert four.bounds["CPU cores"] == pytest.approx(4 * one.bounds["CPU cores"])
    assert (
        four.cpu_us == pytest.approx(MACHINE.cores * four.bounds["CPU cores"])
        and predict(step(64), H100, HOST).cpu_us is None
    )
    assert four.bounds["devices"] > 2 * one.bounds["devices"]
    apart = dataclasses.replace(MACHINE, shared=False)
    one, four = (predict(step(64), apart, dataclasses.replace(HOST, devices=n)) for n in (2, 8))
    assert four.step_us == one.step_us


def test_dispatching_a_step_goes_by_the_arrays_that_it_is_called_with():
    """Four times the arrays took twice as long: halfway in logarithms sqrt(2) times; beyond, in proportion."""
    points = tuple(Point({"arguments": n, "devices": 1.0}, us) for n, us in ((16.0, 30.0), (64.0, 60.0)))
    machine = dataclasses.replace(MACHINE, kernels={"host_dispatch": Kernel(1.0, "measured", points)})
    for arguments, us in ((16, 30), (32, 30 * 2**0.5), (64, 60), (192, 180)):
        found = predict(step(64), machine, dataclasses.replace(HOST, arguments=arguments, devices=1))
        assert found.stages["host_dispatch"] == pytest.approx(us), arguments


def test_what_is_done_once_a_call_is_shared_by_its_steps():
    """By hand: 320 us of dispatch over 16 steps; 16 batches of 1 MB placed together at 80 us a MB are 80 us a step.

    Each of 10 kernels is launched in every step, 0.5 us each. Samples in rows are one array, which nobody packs.
    """
    dispatch = Kernel(1.0, "measured", (Point({"arguments": 64.0, "devices": 1.0}, 320.0),))
    points = [Point({"bytes": b, "arrays": a, "devices": 1.0}, 80 * b / 1e6 * a) for b in (1e6, 16e6) for a in (1, 16)]
    machine = with_stages(MACHINE, pack=40.0)
    kernels = {"host_dispatch": dispatch, "host_place": Kernel(1.0, "measured", tuple(points))}
    overheads = MACHINE.overheads | {"launch": Quantity(0.5, "us", "a test")}
    machine = dataclasses.replace(machine, shared=False, kernels=machine.kernels | kernels, overheads=overheads)
    nodes = tuple(Node(f"n{n}", "copy", "", "kernel", (Work("copy", {"bytes": 8.0}, 0.0, 8.0),), ()) for n in range(10))
    host = dataclasses.replace(HOST, devices=1, placed_bytes=10**6, placed_arrays=1, arguments=64)
    stages = [
        predict(Graph(nodes), machine, dataclasses.replace(host, steps=steps, in_rows=in_rows)).stages
        for steps, in_rows in ((1, False), (16, False), (16, True))
    ]
    assert [round(of["host_dispatch"], 6) for of in stages] == [325, 25, 25]
    assert [round(of["host_place"], 3) for of in stages] == [80, 16 * 80, 80]
    assert [round(of["host_pack"], 6) for of in stages] == [40, 40, 0]


def test_rows_that_are_taken_and_those_on_the_devices_are_read_as_was_measured_of_them():
    """A machine whose file has times of blocks alone predicts none for them."""
    point = Point({"samples": 1000.0, "features": 8.0, "ids": 8000.0}, 700.0)
    blocks = {name: Kernel(1.0, "measured", (point,)) for name in ("host_read", "host_read.in_order")}
    rows = {
        f"host_read.{name}": Kernel(1.0, "measured", (dataclasses.replace(point, us=us),))
        for name, us in (("packed", 90.0), ("resident", 20.0))
    }
    for kernels, expected in ((blocks, {"packed": 0, "resident": 0}), (blocks | rows, {"packed": 90, "resident": 20})):
        machine = dataclasses.replace(MACHINE, kernels=kernels)
        for source, us in expected.items():
            for ordered in (False, True):
                found = predict(step(64), machine, dataclasses.replace(HOST, source=source, ordered=ordered))
                assert round(found.stages["host_read"], 6) == us and ("host_read" in found.missing) == (not us)


def test_a_kernel_on_all_cores_takes_longer_beside_the_threads_of_the_host():
    kernels = {
        "copy": Kernel(1.0, "measured", (Point({"bytes": 1e9}, 100.0, 1.0),)),
        "elementwise": Kernel(1.0, "measured", (Point({"bytes": 1e9}, 100.0, 2.0),)),
    }
    dispatch = with_stages(dispatch=100.0).kernels
    nothing = dataclasses.replace(MACHINE.overheads["kernel"], value=1e-9)
    machine = dataclasses.replace(
        MACHINE, cores=2, kernels=kernels | dispatch, overheads={"kernel": nothing, "loop": nothing}
    )
    nodes = (
        Node("a", "copy", "", "kernel", (Work("copy", {"bytes": 1e9}, 0.0, 1e9),), ()),
        Node("b", "add", "", "kernel", (Work("elementwise", {"bytes": 1e9}, 0.0, 1e9),), (0,)),
    )
    found = predict(Graph(nodes), machine, dataclasses.replace(HOST, devices=1))
    # T = 100 + 100 * 2 / (2 - 100 / T): a alone on a core, then b on what a host's 100 us of each T leave it of two.
    assert found.step_us == pytest.approx((500 + 170_000**0.5) / 4, rel=0.01)
    assert found.bounds["CPU cores"] == pytest.approx(200)


def test_stages_and_kernels_take_longer_in_a_training_as_it_was_measured():
    """Three times in kernels; starting a kernel and collectives as long as before. CPU time of the host twice as long.

    A thread of the host takes no longer: part of that CPU time is of others that work for it.
    """
    times = {"host_in_training": 2.0, "kernels_in_training": 3.0}
    longer = dataclasses.replace(
        plain := with_stages(dispatch=100.0),
        overheads=plain.overheads | {name: Quantity(value, "times", "measured") for name, value in times.items()},
    )
    found = predict(step(64), longer, HOST)
    assert found.stages["host_dispatch"] == pytest.approx(found.bounds["main thread"]) == pytest.approx(100)
    assert found.cpu_us == pytest.approx(HOST.devices * found.schedule.core_us + 200)
    graph = read_graph(FORK, 4)
    alone, beside = ([node_cost(node, Costs(machine)).us for node in graph.nodes] for machine in (plain, longer))
    started = plain.overheads["kernel"].value
    for node, before, after in zip(graph.nodes, alone, beside, strict=True):
        assert after == pytest.approx(before if node.kind == "collective" else started + 3 * (before - started))


def test_by_the_clock_a_step_takes_longer_in_a_training_than_its_work_needs():
    """Three times as long, host and devices alike, with the same CPU time, where each device has a core."""
    plain = dataclasses.replace(with_stages(dispatch=100.0), cores=HOST.devices)
    over = plain.overheads | {"step_in_training": Quantity(3.0, "times", "measured")}
    alone, beside = (predict(step(64), m, HOST) for m in (plain, dataclasses.replace(plain, overheads=over)))
    assert beside.step_us == pytest.approx(3 * alone.step_us) and beside.cpu_us == pytest.approx(alone.cpu_us)
    assert beside.bounds == pytest.approx({name: 3 * us for name, us in alone.bounds.items()})
    assert beside.schedule.end_us == max(span.end_us for span in beside.schedule.spans)
    assert sum(parts(beside).values()) == pytest.approx(3 * sum(parts(alone).values()))


def test_a_core_waits_when_all_of_its_devices_wait():
    """By hand: one that waits half of the time, then two, and four, that do so for a core; fewer than cores as one."""
    over = {"step_in_training": Quantity(2.0, "times", "measured")}
    machine = dataclasses.replace(MACHINE, overheads=MACHINE.overheads | over, cores=2, shared=True)
    assert [machine.longer(devices) for devices in (1, 2, 4, 8)] == pytest.approx([2, 2, 4 / 3, 16 / 15])
    assert dataclasses.replace(machine, shared=False).longer(8) == 2  # no core of the host's works for them
    assert dataclasses.replace(machine, overheads={}).longer(8) == 1


def test_what_is_read_in_order_is_a_class_of_its_own():
    """Unless the source has one, as data that are drawn each time."""
    kernels = {
        f"host_read{source}": Kernel(1.0, "measured", (Point({"samples": 32.0, "features": 2.0, "ids": 64.0}, us),))
        for source, us in (("", 40.0), (".in_order", 10.0), (".synthetic", 70.0))
    }
    machine = dataclasses.replace(MACHINE, kernels=kernels)

    def read_us(machine, **how):
        host = dataclasses.replace(HOST, samples=32, ids=64, features=2, **how)
        return round(predict(step(64), machine, host).stages["host_read"], 6)

    assert [read_us(machine, ordered=ordered, source="mine") for ordered in (False, True)] == [40, 10]
    assert [read_us(machine, ordered=ordered, source="synthetic") for ordered in (False, True)] == [70, 70]
    older = dataclasses.replace(MACHINE, kernels={"host_read": kernels["host_read"]})
    assert read_us(older, ordered=True, source="mine") == 40


@pytest.mark.parametrize("machine", [MACHINE, H100], ids=["cpu", "h100"])
def test_a_larger_batch_never_takes_less(machine):
    times = [predict(step(batch), machine, HOST).step_us for batch in (1, 2, 64, 65, 100, 1000, 4096)]
    assert times == sorted(times) and times[-1] > times[0]


@pytest.mark.parametrize("machine", [MACHINE, H100], ids=["cpu", "h100"])
def test_a_machine_twice_as_fast_takes_half_the_time(machine):
    machine = dataclasses.replace(machine, kernels=machine.kernels | with_stages(read=9.0, pack=80.0).kernels)
    slow, fast = (predict(step(500), one, HOST) for one in (machine, scaled(machine, 2)))
    assert fast.step_us == pytest.approx(slow.step_us / 2)
    assert fast.samples_per_s == pytest.approx(2 * slow.samples_per_s)
    assert fast.bound_by == slow.bound_by


def test_what_the_machine_file_does_not_know_of_the_host_is_named():
    found = predict(step(64), H100, HOST)
    assert found.missing == ("host_read", "host_route", "host_pack", "host_dispatch")
    assert found.stages["host_place"] == pytest.approx(1e6 / 4 / 64e9 * 1e6)  # each device has a link of its own
    routed_there = predict(step(64), H100, dataclasses.replace(HOST, routes=False))
    assert "host_route" not in routed_there.missing


def test_ids_are_routed_by_ways_that_take_a_time_of_their_own_each():
    machine = with_stages(read=9.0, route=80.0, pack=7.0, place=9.0, dispatch=6.0)

    def takes(name, of_id, **more):
        points = tuple(
            Point({"ids": n, "features": 2.0, "devices": d}, n * d * of_id, **more)
            for n in (1000.0, 8000.0)
            for d in (2.0, 4.0)
        )
        return {name: Kernel(1.0, "measured", points)}

    own = takes("host_route.pooled", 0.01) | takes("host_route.split_pooled", 0.1, cores=2.0)
    machine = dataclasses.replace(machine, shared=False, kernels=machine.kernels | own)
    ways = (Routed("", 4000, 2), Routed("pooled", 2000, 2), Routed("split_pooled", 1000, 2, owners=2.0))
    found = predict(step(64), machine, dataclasses.replace(HOST, routed=ways))
    # Two devices share a table that is split; other ids go to the four of the host. The file does not know how pooled
    # ids are packed: as others.
    assert found.stages["host_route"] == pytest.approx(80 + 4 * 2000 * 0.01 + 2 * 1000 * 0.1)
    assert found.stages["host_pack"] == pytest.approx(3 * 7)
    # of the last, two threads do twice as much
    assert found.bounds["reading and routing"] == pytest.approx(9 + 80 + 80 + 200 / 2, rel=0.1)
    assert found.bounds["interpreter"] == pytest.approx(9 + 80 + 80 + 200 / 2 + 21 + 9 + 6)
    two = predict(step(64), machine, dataclasses.replace(HOST, routed=ways, hosts=2))
    assert two.stages["host_route"] < found.stages["host_route"]
    plain = predict(step(64), machine, dataclasses.replace(HOST, routed=(Routed("", 8000, 8),)))
    assert plain.stages == predict(step(64), machine, HOST).stages


def test_hosts_share_the_work_of_the_host():
    machine = with_stages(read=9.0, route=80.0, pack=7.0, place=9.0, dispatch=6.0)
    points = tuple(Point({"ids": n, "features": 8.0, "devices": 1.0}, n / 100) for n in (4000.0, 8000.0))
    machine = dataclasses.replace(
        machine, shared=False, kernels=machine.kernels | {"host_route": Kernel(1.0, "measured", points)}
    )
    one, two = (predict(step(64), machine, dataclasses.replace(HOST, hosts=n)) for n in (1, 2))
    assert (one.stages["host_route"], two.stages["host_route"]) == (pytest.approx(80), pytest.approx(40))


def test_parts_make_up_the_time_in_which_something_runs():
    machine = dataclasses.replace(MACHINE, shared=False, streams=1)
    found = predict(step(64), machine, HOST)
    assert sum(parts(found).values()) == pytest.approx(found.bounds["devices"])
    assert set(parts(found)) == {"dense_forward", "dense_grads", "other", "dense_update"}
    slow_link = dataclasses.replace(machine, kernels={"all_reduce": Kernel(1e-3, "x")})
    assert predict(step(64), slow_link, HOST).exposed_us > found.exposed_us == 0


def test_figures_name_the_critical_path():
    shown = figures(predict(step(64), dataclasses.replace(MACHINE, shared=False, streams=1), HOST))
    assert shown["device"]["kernels"] == 3 and shown["device"]["collectives"] == 1
    assert shown["device"]["gflop"] == pytest.approx((2 * 2 * 64 * 16 * 32 + 64 * 16) / 1e9)
    assert {one["name"] for one in shown["critical_path"]["longest"]} >= {"dot.1", "dot.2", "sum_fusion"}
    assert shown["bounds_ms"]["devices"] * 1e3 == pytest.approx(
        sum(o["ms"] for o in shown["critical_path"]["longest"]) * 1e3
    )


def test_the_trace_has_an_event_for_each_node_and_the_picture_is_a_png():
    found = predict(step(64), H100, HOST)
    events = draw.trace(found)["traceEvents"]
    drawn = {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert set(drawn) == {"dot.1", "all-reduce.1", "dot.2", "sum_fusion"}
    assert drawn["all-reduce.1"]["tid"] != drawn["dot.1"]["tid"]
    assert drawn["sum_fusion"]["ts"] + drawn["sum_fusion"]["dur"] == pytest.approx(found.bounds["devices"])
    assert draw.picture(found, figures(found)).startswith(b"\x89PNG")


def test_the_host_hands_over_every_kernel_of_every_program():
    """A turn of a loop, too; the end of a collective is no kernel."""
    loop = Node("loop", "while", "", "loop", (), (), 5, Graph((Node("a", "add", "", "kernel", (), ()),) * 2))
    ends = Node("end", "all-reduce-done", "", "wait", (), (0,))
    graph = Graph((loop, ends, Node("b", "add", "", "kernel", (), ())))
    assert graph.launches == 11
    machine = dataclasses.replace(with_stages(dispatch=60.0), shared=False)
    launching = dataclasses.replace(machine, overheads=machine.overheads | {"launch": Quantity(2.0, "us", "measured")})
    plain, launched = (predict(graph, on, HOST).stages["host_dispatch"] for on in (machine, launching))
    assert (plain, launched) == pytest.approx((60, 60 + 22))
