"""Communication traces as workloads, in recjax's format and as Chakra's `.et`."""

import dataclasses

import pytest
from support.commands import assert_refused, inside
from support.simulating import finish, topology, write_trace

from recjax.errors import DataError
from recjax.lab.formats import chakra_protobuf, recjax_json
from recjax.lab.formats.trace import Event
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import System
from recjax.lab.trace.workload import read_workload

FORMATS = pytest.mark.parametrize("format", [recjax_json, chakra_protobuf], ids=["recjax", "et"])


def events(rank, sends=(), computes_us=(3, 3)):
    """Two ranks: a exchange of 4000 bytes beside 3 us of computing, then an all-reduce that waits for both."""
    both = (0, 1)
    return (
        Event(
            0,
            "all_to_all",
            phase="row_exchange",
            group=both,
            in_bytes=4000,
            out_bytes=4000,
            dtype="int8",
            sends=sends,
            receives=sends,
        ),
        Event(1, "compute", duration_ns=computes_us[rank] * 1000, start_ns=0),
        Event(
            2, "all_reduce", phase="dense_grads", group=both, in_bytes=6000, out_bytes=6000, dtype="int8", deps=(0, 1)
        ),
    )


def play(folder, **system):
    where = topology("fully_connected:2")  # a byte a nanosecond
    return simulate(read_workload(folder, where), where, System(**system))


@FORMATS
def test_a_trace_plays_as_its_dependencies_say(tmp_path, format):
    """The exchange takes 2 us, computing 3; then a ring all-reduce of twice 3 us."""
    result = play(write_trace(tmp_path / "trace", format, [events(0), events(1)]))
    ends = [finish(result, operation.name)[0] for operation in result.workload.operations]
    assert ends == [2000, 3000, 9000] and result.shortcut
    assert [operation.layer for operation in result.workload.operations] == ["row_exchange", "compute", "dense_grads"]


@FORMATS
def test_true_splits_and_unequal_computing_are_kept(tmp_path, format):
    """Rank 0 sends 3500 bytes to rank 1, and 100 come back; rank 1 computes for 5 us."""
    ranks = [events(0, (400, 3500), (3, 5)), events(1, (100, 50), (3, 5))]
    ranks = [tuple(dataclasses.replace(e, receives=()) for e in rank) for rank in ranks]
    result = play(write_trace(tmp_path / "trace", format, ranks))
    names = [operation.name for operation in result.workload.operations]
    assert finish(result, names[0]) == [100, 3500] and finish(result, names[1]) == [3000, 5000]
    assert result.time_ns == 5000 + 6000


def test_computing_that_is_cut_unlike_stays_with_its_rank(tmp_path):
    """Rank 1 computes 1 us, and 2 more after the exchange, to 4 us: its all-reduce begins then, rank 0's at 3."""
    exchange, _, reduce = events(1)
    parts = (
        Event(1, "compute", start_ns=0, duration_ns=1000),
        Event(2, "compute", start_ns=2000, duration_ns=2000, deps=(0, 1)),
    )
    second = (exchange, *parts, dataclasses.replace(reduce, id=3, deps=(0, 2)))
    result = play(write_trace(tmp_path / "trace", recjax_json, [events(0), second]))
    reduced = result.workload.operations[-1].name
    assert finish(result, result.workload.operations[0].name) == [2000, 2000]
    assert result.started[-1].tolist() == [3000, 4000] and finish(result, reduced) == [10_000, 10_000]


def test_without_dependencies_each_event_waits_for_the_one_before(tmp_path):
    plain = [tuple(dataclasses.replace(e, deps=()) for e in events(rank)) for rank in (0, 1)]
    assert play(write_trace(tmp_path / "trace", recjax_json, plain)).time_ns == 2000 + 3000 + 6000


def test_a_broadcast_is_simulated(tmp_path):
    """As DDP has one of its buffers at the start: 4000 bytes from rank 0 to rank 1, at a byte a nanosecond."""
    ranks = [(Event(0, "broadcast", group=(0, 1), in_bytes=4000, out_bytes=4000), *events(r)) for r in range(2)]
    ranks = [tuple(dataclasses.replace(e, id=i, deps=(i - 1,) if i else ()) for i, e in enumerate(of)) for of in ranks]
    result = play(write_trace(tmp_path / "trace", recjax_json, ranks))
    assert finish(result, result.workload.operations[0].name) == [0, 4000]
    assert result.time_ns == 4000 + 2000 + 3000 + 6000


def test_groups_are_kept(tmp_path):
    """Ranks 0, 2 and 1, 3 reduce among themselves."""
    ranks = [(Event(0, "all_reduce", group=(r % 2, r % 2 + 2), in_bytes=100, out_bytes=100),) for r in range(4)]
    workload = read_workload(write_trace(tmp_path / "trace", recjax_json, ranks), topology("ring:4"))
    assert workload.operations[0].ranks == ((0, 2), (1, 3))


def test_groups_of_ranks_of_which_one_stands_for_all(tmp_path):
    """As of a run with mesh.hosts=2. Two ranks reduce 4000 bytes: 2000 each way, twice, at a byte a nanosecond."""
    ranks = [(Event(0, "all_reduce", group=(r % 2, r % 2 + 2), in_bytes=4000, out_bytes=4000),) for r in range(4)]
    folder = write_trace(tmp_path / "trace", recjax_json, ranks)
    how = ("simulate", "workload", folder, "--topology", "fully_connected:4", "--bandwidth", "1GB/s", "--json")
    for shortcut in ("always", "never"):
        result = inside(*how, "--shortcut", shortcut, "--out", tmp_path / shortcut).result
        assert bool(result["shortcut"]) == (shortcut == "always")
        assert (result["time_ns"], result["last_communication_ns"]) == (4000, 4000)


def test_collectives_go_one_after_the_other_unless_told(tmp_path):
    """Two all-to-alls of 4000 bytes that nothing orders, in pieces of 2000 to the other rank, on one pair of links.

    On one stream the second begins when the first is done: 2 us and the latency. Two chunks are one collective still.
    """
    sizes = {"group": (0, 1), "in_bytes": 4000, "out_bytes": 4000, "deps": (0,)}
    rank = (Event(0, "compute", duration_ns=0), *(Event(i, "all_to_all", phase=f"p{i}", **sizes) for i in (1, 2)))
    folder = write_trace(tmp_path / "trace", recjax_json, [rank, rank])
    how = (
        "simulate",
        "workload",
        folder,
        "--topology",
        "fully_connected:2",
        "--bandwidth",
        "1GB/s",
        "--latency",
        "1us",
    )

    def queued(*more):
        found = inside(*how, *more, "--json").result
        return found["in_flight"], [layer["collectives"][0]["queued_ns"] for layer in found["layers"][1:]]

    assert queued() == queued("--in-flight", "1") == (1, [0, 3000])
    assert queued("--in-flight", "64") == (64, [0, 0])
    assert queued("--chunks", "2") == (2, [0, 2000])
    assert queued("--chunks", "2", "--in-flight", "4") == (4, [0, 0])


def test_short_names_of_layers_stand_upright(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    folder = write_trace(tmp_path / "trace", recjax_json, [events(0), events(1)])
    inside("simulate", "workload", folder, "--topology", "switch:2", "--bandwidth", "1GB/s", "--out", tmp_path / "out")
    drawn[0].draw_without_rendering()
    layers, raw, line = drawn[0].axes
    for panel in (layers, raw):  # legends hide no bar
        assert panel.get_legend().get_window_extent().x0 > panel.get_window_extent().x1
    assert [label.get_rotation() for label in layers.get_xticklabels()] == [0, 0, 0]
    assert [label.get_text() for label in line.get_yticklabels()] == ["computation", "collectives"]


def test_the_command_takes_a_folder(tmp_path):
    folder = write_trace(tmp_path / "trace", recjax_json, [events(0), events(1)])
    how = ("simulate", "workload", folder, "--bandwidth", "1GB/s")
    assert inside(*how, "--topology", "fully_connected:2", "--json").result["time_ns"] == 9000
    assert_refused(inside(*how, "--topology", "switch:4"), 3, "has 2 ranks, and --topology 4")
    assert_refused(inside(*how, "--topology", "switch:2", "tables=3"), 2, "of presets only")


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda ranks: [ranks[0], ranks[1][:2]], "unequal numbers of collectives"),
        (lambda ranks: [ranks[0], (dataclasses.replace(ranks[1][0], kind="all_gather"), *ranks[1][1:])], "the same"),
        (lambda ranks: [(dataclasses.replace(r[0], kind="gather"), *r[1:]) for r in ranks], "a gather is not"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path, change, why):
    folder = write_trace(tmp_path / "trace", recjax_json, change([events(0), events(1)]))
    with pytest.raises(DataError, match=why):
        read_workload(folder, topology("switch:2"))


def test_a_trace_without_all_its_files_is_refused(tmp_path):
    folder = write_trace(tmp_path / "trace", recjax_json, [events(0), events(1)])
    next(path for path in sorted(folder.iterdir()) if "1" in path.name).unlink()
    with pytest.raises(DataError, match="rank 1"):
        read_workload(folder, topology("switch:2"))
