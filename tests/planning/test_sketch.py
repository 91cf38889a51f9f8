"""The sketch of a step against closed forms, and against the graph of the compiled step."""

import dataclasses

import pytest
from support.commands import write_preset

from recjax.config import presets
from recjax.embedding.exchange.events import Event, Meeting
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.spec import TableSpec
from recjax.lab.predict.prediction import predicted
from recjax.parallel.mesh import ACROSS_GROUPS, MODEL_AXES
from recjax.planning.costs import Costs
from recjax.planning.machine import Quantity, open_machine
from recjax.planning.predict import HostWork, predict
from recjax.planning.sketch import sketch
from recjax.planning.step_sizes import Buffer, Copies, DenseSizes, Owned, Rows, StepSizes, Vectors, of_plan
from recjax.train.build import build_trainer
from recjax.train.first_batch import sample
from recjax.train.planned import question

pytestmark = pytest.mark.light_compile(as_text=True)

H200 = open_machine("h200")
SPEC = TableSpec("t", 1000, 16, RowWiseAdagrad(0.1))
HOST = HostWork(512, 1, 1, 1, 1, 1, 8, 2)
DENSE = DenseSizes(((13, 64), (64, 16), (100, 1)), 2000, 1, 6, (5, 16), 64)


def sizes(rows=(), copies=(), vectors=(), devices=8, hosts=1):
    return StepSizes(devices, hosts, 512, 4, tuple(rows), tuple(copies), tuple(vectors))


def told(phase, size, devices=8, hosts=1, kind="all-to-all", axes=MODEL_AXES, replicas=1):
    """An event of devices that all stand in one group."""
    return Event(phase, kind, axes, Meeting(replicas, hosts, devices // hosts).members(axes), float(size))


def rows_of(buffer, C, there, back, ids, bags, devices=8, hosts=1, pieces=(1,)):
    """Tables whose rows travel, C to each owner, in pieces of these shares."""
    size = devices * C
    events = [told("id_exchange", 4 * size, devices, hosts)]
    events += [told("row_exchange", there * size * share, devices, hosts) for share in pieces]
    return Rows(buffer, C, ids, bags, (*events, told("grad_exchange", back * size, devices, hosts)))


def vectors_of(there, back, owned, entries, statistic=0):
    ways = ("pooled_exchange", there), ("pooled_grad_exchange", back)
    events = [told("id_exchange", 8 * entries * 4), *(told(phase, 8 * 512 * size) for phase, size in ways)]
    return Vectors((owned,), entries, (*events, *[told("row_statistic", 8 * entries * 4)] * statistic))


def moved(graph, kind):
    return sorted(w.sizes["bytes"] for node in graph.nodes for w in node.works if w.kernel == kind)


def test_collectives_have_the_bytes_of_their_closed_forms():
    buffer = Buffer.of("rows", 125, 16, SPEC, 4)
    graph = sketch(sizes([rows_of(buffer, 100, 64.0, 32.0, 2000, 4)]), DENSE)
    assert moved(graph, "all_to_all") == [8 * 100 * 4, 8 * 100 * 32, 8 * 100 * 64]  # ids, gradients, rows
    dense = sum(4 * (k * n + n) for k, n in DENSE.layers)
    assert moved(graph, "all_reduce") == [8, dense]
    copied = sketch(sizes(copies=[Copies(Buffer.of("copies", 50, 16, SPEC, 4), 40, 512, 1)]), DENSE)
    assert moved(copied, "all_reduce") == [8, dense + 50 * 17 * 4] and not moved(copied, "all_to_all")
    owned = sketch(sizes(vectors=[vectors_of(256, 128, Owned(buffer, 300, 120), 300)]), DENSE)
    assert moved(owned, "all_to_all") == sorted([8 * 300 * 4, 8 * 512 * 256, 8 * 512 * 128])
    divided = sketch(sizes(vectors=[vectors_of(256, 128, Owned(buffer, 300, 120, 2), 300, 2)]), DENSE)
    assert moved(divided, "all_to_all") == sorted([8 * 300 * 4] * 3 + [8 * 512 * 256, 8 * 512 * 128])


def looked_up(graph, part, kind):
    return [
        tuple(w.sizes.values()) for node in graph.nodes if node.part == part for w in node.works if w.kernel == kind
    ]


def test_bags_are_summed_by_one_id_of_each_at_a_time():
    """4 bags of 10 for each of 512 samples, from 8 lists of 100 rows of 64 bytes; gradients go the same way back."""
    graph = sketch(sizes([rows_of(Buffer.of("rows", 125, 16, SPEC, 4), 100, 64.0, 64.0, 512 * 4 * 10, 4)]), DENSE)
    assert looked_up(graph, "pool", "gather.fused") == [(2048, 64, 8 * 100 * 64)] * 10
    assert looked_up(graph, "pool_backward", "scatter.add") == [(2048, 64, 8 * 100 * 64)] * 10


def test_owners_add_up_about_as_many_ids_at_a_time_as_there_are_sums():
    """8 lists of 3000 ids for 2 vectors of 8 x 512 samples: 3 pieces; for 120 rows, 6 of 4096, the least."""
    owned = Owned(Buffer.of("owners", 1000, 16, SPEC, 4), 3000, 120, bags=2)
    graph = sketch(sizes(vectors=[vectors_of(128, 128, owned, 3000)]), DENSE)
    assert looked_up(graph, "gather", "gather") == [(8192, 64, 1000 * 64)] * 3
    assert looked_up(graph, "gather", "scatter.sorted_add") == [(8192, 64, 8192 * 64)] * 3
    merged = looked_up(graph, "sparse_update", "scatter.sorted_add")
    assert merged == [(24_000, 4, 24_000 * 4), *[(4096, 64, 120 * 64)] * 6]
    assert looked_up(graph, "sparse_update", "gather")[:6] == [(4096, 64, 8192 * 64)] * 6


def test_copies_are_passed_over_as_a_whole():
    """10,000 rows of 64 bytes and a slot of 4: sums of 68 bytes a row are cleared, and read without the counts."""
    copies = Copies(Buffer.of("copies", 10_000, 16, SPEC, 4), 400, 512 * 3, 1)
    graph = sketch(sizes(copies=[copies]), DENSE)

    def passes(part, kind):
        return [w.bytes for n in graph.nodes if n.part == part for w in n.works if w.kernel == kind]

    assert passes("grad_exchange", "copy") == [680_000, 2 * 680_000]
    assert passes("sparse_update", "elementwise") == [2 * 640_000, 3 * 640_000, 4 * 40_000]
    assert passes("sparse_update", "reduce.rows") == [640_000]
    assert looked_up(graph, "pool_backward", "scatter.add") == [(512, 68, 400 * 68)] * 3


def test_rows_in_pieces_are_gathered_beside_the_exchange_of_those_before():
    one = Buffer.of("rows", 10**7, 64, SPEC, 4), 600_000, 256.0, 256.0, 48_000, 4
    whole, parts = (sketch(sizes([rows_of(*one, pieces=(1 / n,) * n)]), DENSE) for n in (1, 3))
    assert moved(parts, "all_to_all") == sorted([*moved(whole, "all_to_all"), *[8 * 200_000 * 256] * 3])[:-1]
    free = dataclasses.replace(H200, rates=H200.rates | {"link_latency": Quantity(1e-6, "us", "a test")})
    ends = [end_of_rows(predict(graph, free, HOST)) for graph in (whole, parts)]
    gather = next(s.end_us - s.start_us for s, n in with_nodes(predict(whole, free, HOST)) if n.part == "gather")
    assert ends[0] - ends[1] == pytest.approx(gather * 2 / 3, rel=0.2)  # all but the first are hidden


def with_nodes(found):
    return zip(found.schedule.spans, found.graph.nodes, strict=True)


def end_of_rows(found):
    """When the last row has come."""
    return max(s.end_us for s, n in with_nodes(found) if n.part == "row_exchange" and n.kind == "collective")


def test_products_are_three_a_layer_and_those_of_the_interaction():
    graph = sketch(sizes(), DENSE)
    layers = 3 * 2 * 512 * sum(k * n for k, n in DENSE.layers)
    products = sum(w.flops for node in graph.nodes for w in node.works if "matmul" in w.kernel)
    assert products == layers + 2 * 2 * 512 * 5 * 5 * 16
    assert not [node for node in sketch(sizes(devices=1), DENSE).nodes if node.kind == "collective"]


def test_devices_of_more_than_one_host_send_across_whether_the_mesh_names_hosts_or_not():
    """16 devices, of which an H200's host has eight: half of an all-to-all takes 50 GB/s, as in a compiled step."""
    one = Buffer.of("rows", 125, 16, SPEC, 4), 10**6, 64.0, 64.0, 2000, 4
    known = Costs(dataclasses.replace(H200, kernels={}))
    size = 16 * 10**6 * 64
    for hosts in (1, 2):
        graph = sketch(sizes([rows_of(*one, 16, hosts)], devices=16, hosts=hosts), DENSE)
        sent = max((w for n in graph.nodes for w in n.works if w.kernel == "all_to_all"), key=lambda w: w.bytes)
        assert sent.sizes.get("hosts") == (None if hosts == 1 else 2)
        assert known.of(sent).us == pytest.approx(size * 8 / 16 / 50e9 * 1e6, rel=0.01)


def test_replica_groups_add_dense_gradients_of_all_and_rows_if_they_agree():
    """Two groups of 4 devices, of which each owner gets 4 x 100 rows of 16 columns."""
    buffer = Buffer.of("rows", 125, 16, SPEC, 4)
    alone = rows_of(buffer, 100, 64.0, 64.0, 2000, 4, 4)
    gathered = told("replica_exchange", 2 * 4 * 100 * (4 + 16 * 4), 4, 1, "all-gather", ACROSS_GROUPS, 2)
    groups = dataclasses.replace(sizes([alone], devices=4), replicas=2)
    agreeing = dataclasses.replace(groups, rows=(dataclasses.replace(alone, events=(*alone.events, gathered)),))
    exact, apart = sketch(agreeing, DENSE), sketch(groups, DENSE)
    for graph in (exact, apart):
        reduced = [w for n in graph.nodes for w in n.works if w.kernel == "all_reduce"]
        assert [w.sizes["devices"] for w in reduced] == [8, 8]
        assert {w.sizes["devices"] for n in graph.nodes for w in n.works if w.kernel == "all_to_all"} == {4}
    assert moved(exact, "all_gather") == [2 * 4 * 100 * (4 + 16 * 4)] and not moved(apart, "all_gather")
    added = [
        [
            w.sizes["rows"]
            for n in graph.nodes
            for w in n.works
            if n.part == "sparse_update" and w.kernel == "scatter.sorted"
        ]
        for graph in (exact, apart)
    ]
    assert added == [[800, 800], [400, 400]]  # values and slots, of the rows of both groups or of one
    far = dataclasses.replace(agreeing, all_hosts=2)  # a host for each group
    over = {w.kernel: w.sizes.get("hosts") for n in sketch(far, DENSE).nodes for w in n.works if n.kind == "collective"}
    assert over == {"all_to_all": None, "all_reduce": 2, "all_gather": 2}
    one_each = dataclasses.replace(groups, devices=1, replicas=8, rows=())
    assert [w.sizes["devices"] for n in sketch(one_each, DENSE).nodes for w in n.works if w.kernel == "all_reduce"] == [
        8,
        8,
    ]


def test_in_float64_dense_gradients_are_twice_as_many_bytes():
    wide = dataclasses.replace(DENSE, dtype="f64")
    double = dataclasses.replace(sizes(), item_bytes=8)
    dense = sum(8 * (k * n + n) for k, n in DENSE.layers)
    assert moved(sketch(double, wide), "all_reduce") == [8, dense]


def test_buckets_are_sent_while_the_backward_pass_goes_on():
    dense = dataclasses.replace(DENSE, layers=((512, 512),) * 4, values=4 * 512 * 513)
    bucketed = dataclasses.replace(dense, bucket_bytes=2**20)
    whole, parts = (moved(sketch(sizes(), d), "all_reduce") for d in (dense, bucketed))
    assert len(whole) == 2 and len(parts) == 5 and sum(whole) == sum(parts)
    free = dataclasses.replace(H200, rates=H200.rates | {"link_latency": Quantity(1e-6, "us", "a test")})
    alone, hidden = (predict(sketch(sizes(), d), free, HOST).exposed_us for d in (dense, bucketed))
    assert hidden < 0.5 * alone  # three of four buckets travel beside products


def test_a_cpu_reads_buckets_and_writes_them_as_one_array():
    graphs = [sketch(sizes(), dataclasses.replace(DENSE, bucket_bytes=size), shared=True) for size in (0, 1024)]
    plain, bucketed = (sum(w.bytes for n in g.nodes if n.kind == "kernel" for w in n.works) for g in graphs)
    assert bucketed - plain == 2 * 4 * sum(k * n + n for k, n in DENSE.layers)


def test_a_larger_batch_never_takes_less():
    times = []
    for b in (64, 512, 4096, 32768):
        rows = rows_of(Buffer.of("rows", 10**6, 16, SPEC, 4), b, 64.0, 64.0, 8 * b, 4)
        found = dataclasses.replace(sizes([rows]), samples=b)
        times.append(predict(sketch(found, DENSE), H200, HOST).step_us)
    assert times == sorted(times) and times[-1] > times[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        "plan=row_wise",
        "plan=row_wise embedding.exchange.kind=rows embedding.exchange.pieces=3",
        "plan=table_wise embedding.exchange.kind=pooled",
        "plan=data_parallel",
    ],
)
def test_the_sketch_comes_near_to_the_compiled_step(tmp_path, plan):
    """On an H200 of data sheets: within a factor of 2 of the compiled step's graph, which is that of the CPU."""
    config = presets.load(write_preset(tmp_path), ["mesh.devices=4", "train.batch_size=2048", *plan.split()])
    compiled = predicted(config, H200)
    trainer = build_trainer(config, weights=False)
    asked = question(trainer.config, trainer.source, H200)
    found = of_plan(trainer.bound, asked.demand.work)
    sketched = predict(sketch(found, asked.dense), H200, compiled.host)
    assert 0.5 < sketched.bounds["devices"] / compiled.bounds["devices"] < 2
    exact, drawn = (moved(p.graph, "all_to_all") for p in (compiled, sketched))
    assert drawn == pytest.approx(exact, rel=0.15)  # capacities: the largest list, with room


@pytest.mark.full
@pytest.mark.parametrize("data", ["data.ids_per_bag=5,7", "data.ids_per_bag=9,0 data.mean_ids=8"])
def test_lists_are_as_long_as_what_the_program_is_compiled_for(data):
    """Two groups whose tables lie on a device each: a list holds the ids of the fuller one, and not of both."""
    tables = "data.rows=3000,3000 data.weighted=false embedding.tables.sparse_0.optimizer=adam"
    settings = f"{tables} {data} plan=table_wise embedding.exchange.kind=pooled mesh.devices=2 train.batch_size=2048"
    trainer = build_trainer(presets.load("synthetic", settings.split()), weights=False)
    (exchange,) = trainer.bound.pooled
    assert len(exchange.groups) == 2
    work = question(trainer.config, trainer.source, H200).demand.work
    (vectors,) = of_plan(trainer.bound, work).vectors
    assert vectors.list_entries == pytest.approx(sample(trainer).capacities[exchange.name], rel=0.1)
