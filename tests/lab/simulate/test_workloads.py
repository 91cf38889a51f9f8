"""What a model's shapes and ASTRA-sim's text become: operations, bytes and times counted by hand."""

import dataclasses

import pytest
from support.simulating import finish, topology

from recjax.errors import ConfigError, DataError
from recjax.lab.simulate.astra_text import read_text
from recjax.lab.simulate.dlrm import DlrmShape, dlrm
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.layers import Comm, Layer, training_loop
from recjax.lab.simulate.report import of_workload
from recjax.lab.simulate.system import System

# Two tables of dimension 4, one bottom and one top layer. 1 flop and 1 byte take a nanosecond.
SMALL = DlrmShape(
    batch_per_rank=10,
    tables=2,
    dim=4,
    pooling=3,
    dense_features=5,
    bottom=(4,),
    top=(1,),
    flops_per_s=1e9,
    memory_bytes_per_s=1e9,
)


def by_name(workload):
    return {operation.name: operation for operation in workload.operations}


def test_a_small_dlrm_by_hand():
    """Interaction: 3 vectors, 3 products of pairs; the top layer has 3 + 4 inputs."""
    found = by_name(dlrm(SMALL, ranks=8))
    assert list(found) == [
        "iteration 0/embedding/forward",
        "iteration 0/embedding/forward/all_to_all",
        "iteration 0/bottom_0/forward",
        "iteration 0/top_0/forward",
        "iteration 0/top_0/weight_gradient",
        "iteration 0/top_0/weight_gradient/all_reduce",
        "iteration 0/top_0/input_gradient",
        "iteration 0/embedding/input_gradient/all_to_all",
        "iteration 0/bottom_0/weight_gradient",
        "iteration 0/bottom_0/weight_gradient/all_reduce",
        "iteration 0/bottom_0/input_gradient",
        "iteration 0/embedding/input_gradient",
        "iteration 0/embedding/weight_gradient",
    ]
    short = {name.removeprefix("iteration 0/"): operation for name, operation in found.items()}
    # 10 samples, 2 tables, 4 values of 2 bytes
    for name in ("embedding/forward/all_to_all", "embedding/input_gradient/all_to_all"):
        assert (short[name].bytes, short[name].priority) == (160, 1)
    assert short["embedding/forward"].duration_ns == pytest.approx(160 * 3)
    assert short["embedding/weight_gradient"].duration_ns == pytest.approx(2 * 160 * 3)
    assert short["bottom_0/forward"].duration_ns == pytest.approx(2 * 10 * 5 * 4)
    assert short["bottom_0/input_gradient"].duration_ns == 0  # the data need no gradient
    dots = 2 * 10 * 3 * 3 * 4
    assert short["top_0/forward"].duration_ns == pytest.approx(2 * 10 * 7 * 1 + dots)
    assert short["top_0/weight_gradient"].duration_ns == pytest.approx(2 * 10 * 7 * 1)
    assert short["bottom_0/weight_gradient/all_reduce"].bytes == (5 * 4 + 4) * 2
    assert short["top_0/weight_gradient/all_reduce"].bytes == (7 + 1) * 2

    def waits(name):
        return {d.removeprefix("iteration 0/") for d in short[name].depends_on}

    assert waits("top_0/forward") == {"bottom_0/forward", "embedding/forward/all_to_all"}
    assert waits("embedding/input_gradient/all_to_all") == {"top_0/input_gradient"}
    assert waits("bottom_0/weight_gradient") == {"top_0/input_gradient"}
    assert waits("embedding/input_gradient") == {"embedding/input_gradient/all_to_all"}


def test_the_next_iteration_waits_layer_by_layer():
    found = by_name(dlrm(SMALL, ranks=8, iterations=2))
    assert found["iteration 1/bottom_0/forward"].depends_on == ("iteration 0/bottom_0/weight_gradient/all_reduce",)
    assert found["iteration 1/embedding/forward"].depends_on == ("iteration 0/embedding/weight_gradient",)
    assert "iteration 0/top_0/weight_gradient/all_reduce" in found["iteration 1/top_0/forward"].depends_on


def test_the_model_of_the_study():
    """64 tables of D=64 in 16 bits: 512 samples a rank make 4 MiB; 53.4 million weights are all-reduced."""
    operations = dlrm(DlrmShape(), ranks=128).operations
    assert [o.bytes for o in operations if o.collective == "all_to_all"] == [4 * 2**20] * 2
    weights = [o.bytes / 2 for o in operations if o.collective == "all_reduce"]
    widths = [1600, *[1024] * 6, 64], [65 * 64 // 2 + 64, *[2048] * 11, 1]
    by_hand = [(a + 1) * b for part in widths for a, b in zip(part, part[1:], strict=False)]
    assert sorted(weights) == sorted(by_hand) and len(weights) == 7 + 12
    assert sum(weights) == pytest.approx(53.4e6, rel=0.01)


def test_data_parallelism_gathers_what_every_copy_of_a_table_needs():
    found = by_name(dlrm(dataclasses.replace(SMALL, parallelism="data"), ranks=8))
    gathered = found["iteration 0/embedding/input_gradient/all_gather"]
    assert gathered.bytes == 8 * (160 + 10 * 2 * 3 * 8)  # of all ranks: pooled gradients, and ids of 8 bytes
    assert not any(o.collective == "all_to_all" for o in found.values())
    assert found["iteration 0/bottom_0/weight_gradient/all_reduce"].bytes == (5 * 4 + 4) * 2


def test_model_parallelism_moves_activations():
    found = by_name(dlrm(dataclasses.replace(SMALL, parallelism="model"), ranks=8))
    samples = 8 * 10 * 2  # of all ranks, in bytes a feature
    assert found["iteration 0/embedding/forward/all_gather"].bytes == 8 * 160
    assert found["iteration 0/bottom_0/forward/all_gather"].bytes == samples * 4
    assert found["iteration 0/top_0/input_gradient/all_reduce"].bytes == samples * 7
    assert not any("weight_gradient" in o.name for o in found.values() if o.kind == "collective")
    # The next layer needs the activations: nothing of it overlaps.
    assert "iteration 0/bottom_0/forward/all_gather" in found["iteration 0/top_0/forward"].depends_on


@pytest.mark.parametrize(
    "shape, why",
    [({"bottom": (8,)}, "must end in dim=4"), ({"tables": 0}, "1 or more"), ({"flops_per_s": 0.0}, "above 0")],
)
def test_shapes_that_make_no_model(shape, why):
    with pytest.raises(ConfigError, match=why):
        dlrm(dataclasses.replace(SMALL, **shape), ranks=8)


def test_an_iteration_by_hand():
    """Two ranks, fully connected, a byte a nanosecond. An all-to-all of M takes M/2, a direct all-reduce 2 M/2.

    Data parallel, layers a and b: forward 10 + 10; b's weight gradient 20-30, its all-reduce of 100 bytes 30-130; its
    input gradient 30-40; a's weight gradient 40-50, its all-reduce behind b's on the link: 80-180 for the first half,
    of which more below. The next iteration's a waits for it.
    """
    layers = [Layer(n, 10, None, 10, None, 10, Comm("all_reduce", 100)) for n in "ab"]
    loop = training_loop("two", layers, iterations=2)
    result = simulate(loop, topology("fully_connected:2"), System({"all_reduce": "direct"}))

    def end(name):
        return finish(result, name)[0]

    assert end("iteration 0/b/forward") == 20 and end("iteration 0/b/weight_gradient") == 30
    assert end("iteration 0/a/weight_gradient") == 50 and end("iteration 0/a/input_gradient") == 60
    # The link: b's first half 30-80, a's first (ready at 50) 80-130, b's second (ready at 80) 130-180, a's 180-230.
    assert end("iteration 0/b/weight_gradient/all_reduce") == 180
    assert end("iteration 0/a/weight_gradient/all_reduce") == 230
    assert end("iteration 1/a/forward") == 240 and end("iteration 1/b/forward") == 250
    # Exposed: from 60, when the stream has nothing left to do, until a's all-reduce is done.
    names = [operation.name for operation in loop.operations]
    assert result.waited[names.index("iteration 0/a/weight_gradient/all_reduce"), 0] == 230 - 60


@pytest.mark.parametrize("parallelism", ["data", "model", "hybrid"])
@pytest.mark.parametrize("scheduling", ["fifo", "lifo"])
@pytest.mark.parametrize(
    "where, all_reduce",
    [
        ("switch:8", "ring"),
        ("switch:8", "halving_doubling"),
        ("fully_connected:4,switch:2", "hierarchical:direct,ring"),
    ],
)
def test_one_rank_for_all_gives_the_same_iterations(parallelism, scheduling, where, all_reduce):
    """Every time of every operation, and the bytes on the links."""
    shape = DlrmShape(parallelism=parallelism, batch_per_rank=16, bottom=(256, 64), top=(512, 1))
    loop = dlrm(shape, ranks=8, iterations=2)
    algorithms = {"all_reduce": all_reduce, "all_gather": "hierarchical"}
    system = System(algorithms, chunks=3, in_flight=2, scheduling=scheduling, endpoint_delay_ns=10)
    one, all_ranks = (simulate(loop, topology(where, 1e10, 500), system, how) for how in ("always", "never"))
    for name in ("ready", "started", "finished", "waited"):
        assert (getattr(one, name) == getattr(all_ranks, name)).all()
    assert 8 * sum(one.bytes_on.values()) == pytest.approx(sum(all_ranks.bytes_on.values()))


DLRM_TEXT = """HYBRID_DLRM\t2
4
Embedding -1 300 ALLTOALL 98304 300 ALLTOALL 98304 300 NONE 0 98
Bottom_0\t-1\t1280\tNONE\t0\t794\tNONE\t0\t896\tALLREDUCE\t13312\t13
Bottom_1 -1 2560 NONE 0 2560 NONE 0 1792 ALLREDUCE 524288 524
Top_0 -1 6400 NONE 0 6400 NONE 0 4480 ALLREDUCE 1064960 1065
"""


def written(tmp_path, text):
    path = tmp_path / "workload.txt"
    path.write_text(text)
    return path


def test_a_text_workload_of_a_dlrm(tmp_path):
    found = by_name(read_text(written(tmp_path, DLRM_TEXT), topology("switch:8"), iterations=2))
    assert found["iteration 0/Embedding/forward/all_to_all"].bytes == 98304
    assert found["iteration 0/Bottom_1/weight_gradient"].duration_ns == 1792
    assert found["iteration 0/Top_0/weight_gradient/all_reduce"].bytes == 1064960
    assert found["iteration 0/Top_0/forward"].depends_on == (
        "iteration 0/Bottom_1/forward",
        "iteration 0/Embedding/forward/all_to_all",
    )
    assert found["iteration 0/Embedding/input_gradient/all_to_all"].depends_on == ("iteration 0/Top_0/input_gradient",)
    # The update comes before the layer's next forward pass, when its all-reduce is done; and once more at the end.
    assert found["iteration 1/Top_0/update"].duration_ns == 1065
    assert "iteration 1/Top_0/update" in found["iteration 1/Top_0/forward"].depends_on
    assert found["iteration 1/Top_0/update"].depends_on == ("iteration 0/Top_0/weight_gradient/all_reduce",)


@pytest.mark.parametrize(
    "header, shape, activations, weights",
    [
        ("DATA", "ring:4,switch:2", (None, ()), (None, ())),
        ("MODEL", "ring:4,switch:2", (None, ()), (None, ())),
        ("HYBRID_DATA_MODEL", "ring:4,switch:2", ((0,), ()), ((1,), ())),
        ("HYBRID_MODEL_DATA", "ring:4,switch:2", ((1,), ()), ((0,), ())),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 4", "ring:4,switch:2", ((0,), ()), ((1,), ())),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 8", "ring:4,switch:2", ((0, 1), ()), ((), ())),
        (
            "HYBRID_TRANSFORMER model_parallel_NPU_group: 2",
            "ring:4",
            (None, ((0, 1), (2, 3))),
            (None, ((0, 2), (1, 3))),
        ),
    ],
)
def test_who_takes_part_under_each_parallelism(tmp_path, header, shape, activations, weights):
    text = f"{header}\n1\nlayer -1 5 ALLGATHER 100 6 ALLREDUCE 200 7 ALLREDUCE 300 8\n"
    where = topology(shape)
    found = by_name(read_text(written(tmp_path, text), where))
    forward = found["iteration 0/layer/forward/all_gather"]
    assert (forward.group, forward.ranks) == activations
    assert (
        found["iteration 0/layer/weight_gradient/all_reduce"].group,
        found["iteration 0/layer/weight_gradient/all_reduce"].ranks,
    ) == weights
    group = activations[0] if activations[0] is not None else range(len(where.dims))
    members = len(activations[1][0]) if activations[1] else where.groups(tuple(group)).shape[1]
    assert forward.bytes == 100 * members  # an all-gather's bytes are a rank's input there
    assert simulate(read_text(written(tmp_path, text), where), where, System()).time_ns > 5 + 6 + 7


def test_groups_within_a_switch_are_reported(tmp_path):
    """Model parallel in fours: activations are gathered there (300 = 3/4 of 400 come to each), weights across them."""
    text = "HYBRID_TRANSFORMER model_parallel_NPU_group: 4\n1\nlayer -1 5 ALLGATHER 100 6 NONE 0 7 ALLREDUCE 300 8\n"
    where = topology("switch:8")
    found = of_workload(simulate(read_text(written(tmp_path, text), where), where, System()))
    (layer,) = found["layers"]
    assert {one["collective"] for one in layer["collectives"]} == {"all_gather", "all_reduce"}
    assert found["bytes_on_links"] == 8 * 2 * (300 + 300)


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "line 1: .* starts with its parallelism"),
        ("PIPELINE\n1\n", "line 1: .*not 'PIPELINE'"),
        ("DATA\nmany\n", "line 2: 'many' stands where a whole number should"),
        ("DATA\n2\nlayer -1 5 NONE 0 6 NONE 0 7 NONE 0 8\n", "line 2: it announces 2 layers; 1 lines follow"),
        ("DATA\n1\n\nlayer -1 5 NONE 0\n", "line 4: a layer has 12 fields"),
        ("DATA\n1\nlayer -1 5 NONE 0 6 NONE 0 7 SUM 9 8\n", "line 3: collective 'SUM' is unknown"),
        ("DATA\n1\nlayer -1 x NONE 0 6 NONE 0 7 NONE 0 8\n", "line 3: 'x' stands where"),
        ("HYBRID_DLRM 9\n1\nlayer -1 5 NONE 0 6 NONE 0 7 NONE 0 8\n", "line 1: the last bottom layer is 9"),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 3\n1\nl -1 5 NONE 0 6 NONE 0 7 NONE 0 8\n", "groups of 3 ranks"),
    ],
)
def test_a_broken_text_workload_names_the_line(tmp_path, text, why):
    with pytest.raises(DataError, match=why):
        read_text(written(tmp_path, text), topology("switch:8"))
