"""`recjax simulate`: its JSON, text, files and refusals."""

import errno
import json
import os

import pytest
from support.commands import assert_refused, inside

RING = tuple(
    """
    simulate collective --collective all_reduce --algorithm ring --topology switch:8 --bytes 1048576 --bandwidth 50GiB/s
    --latency 500ns --endpoint-delay 10ns
    """.split()
)


def test_one_collective_as_json():
    """2 (N-1) (2 (alpha + s) + e) + e with s = 1 MiB / 8 / 50 GiB/s = 2441.40625 ns."""
    result = inside(*RING, "--json").result
    assert result["time_ns"] == 2 * 7 * (2 * (500 + 2441.40625) + 10) + 10
    busiest = result["busiest_link"]
    assert busiest["link"] == "switch:8, rank 0 -> switch" and busiest["links_alike"] == 16
    assert busiest["bytes"] == 2 * 7 / 8 * 2**20  # what a rank sends
    assert busiest["utilisation"] == pytest.approx(14 * 2441.40625 / result["time_ns"])
    assert result["bytes_on_links"] == 16 * busiest["bytes"]
    assert result["bus_bytes_per_s"] == pytest.approx(2 * 7 / 8 * 2**20 / result["time_ns"] * 1e9)
    assert result["ranks"] == 8 and result["shortcut"]
    whole = inside(*RING, "--json", "--shortcut", "never").result
    assert whole["shortcut"] is None and whole["time_ns"] == result["time_ns"]
    assert whole["busiest_link"] == busiest and whole["bytes_on_links"] == result["bytes_on_links"]


def test_one_collective_as_text():
    text = inside(*RING).out
    assert "82.51 us (82,509 ns)" in text and "busiest link: switch:8, rank 0 -> switch (and 15 more)" in text


def test_one_chunk_through_a_switch_is_explained():
    """It is stored whole at the switch, so it takes twice as long as what is cut small enough."""
    assert "--chunks 8" in inside(*RING).out and "--chunks 8" not in inside(*RING, "--chunks", "4").out
    help_text = " ".join(inside("simulate", "collective", "--help").out.split())
    assert "stored whole at every hop" in help_text
    ring = [*RING]
    ring[ring.index("switch:8")] = "ring:8"
    assert "--chunks 8" not in inside(*ring).out


def test_options_vary_in_all_combinations():
    how = [*RING, "--vary", "chunks=1,8", "--vary", "bytes=64KiB,1MiB"]
    runs = inside(*how, "--json").result["runs"]
    assert [run["varied"] for run in runs] == [f"chunks={c},bytes={b}" for c in (1, 8) for b in ("64KiB", "1MiB")]
    assert runs[1]["time_ns"] == inside(*RING, "--json").result["time_ns"]
    assert runs[3]["time_ns"] == inside(*RING, "--chunks", "8", "--json").result["time_ns"] < runs[1]["time_ns"]
    lines = inside(*how).out.splitlines()
    assert len(lines) == 2 + 4 and lines[3].split()[:3] == ["chunks=1,bytes=1MiB", "82.51", "us"]


@pytest.mark.full
def test_shapes_and_topologies_vary(tmp_path):
    how = ("simulate", "workload", "hoti2020", "tables=8", "--topology", "switch:8", "--bandwidth", "100Gb/s")
    vary = ("--vary", "batch_per_rank=32,64", "--vary", "topology=switch:8;switch:4,switch:2")
    runs = inside(*how, *vary, "--json", "--out", tmp_path).result["runs"]
    assert [run["topology"] for run in runs] == ["switch:8", "switch:4,switch:2"] * 2
    assert runs[0]["compute_ns"] < runs[2]["compute_ns"]
    alone = inside(*how, "batch_per_rank=64", "--json").result
    assert {key: runs[2][key] for key in ("time_ns", "compute_ns")} == {k: alone[k] for k in ("time_ns", "compute_ns")}
    assert {p.name for p in tmp_path.iterdir()} == {run["varied"] for run in runs}
    for wrong, why in ((["out=a,b"], "cannot vary"), (["chunks"], "write KEY=A,B"), (["tabels=1,2"], "tables")):
        assert_refused(inside(*how, "--vary", *wrong), 2, why)
    assert_refused(inside(*RING, "--vary", "tables=1,2"), 2, "a collective has no option --tables")
    assert_refused(inside(*RING, "--vary", "chunks=many"), 2, "chunks")


def test_two_dimensions_take_a_value_each_or_one_for_all():
    how = [*RING]
    how[how.index("switch:8")] = "fully_connected:8,switch:4"
    how[how.index("ring")] = "hierarchical"
    one = inside(*how, "--json").result
    how[how.index("500ns")] = "0.5us,500ns"
    how[how.index("50GiB/s")] = "50GiB/s,53687091200B/s"
    assert inside(*how, "--json").result["time_ns"] == one["time_ns"] and one["ranks"] == 32
    how[how.index("50GiB/s,53687091200B/s")] = "50GiB/s,429496729600b/s"
    assert inside(*how, "--json").result["time_ns"] == one["time_ns"]
    how[how.index("50GiB/s,429496729600b/s")] = "50GiB/s,10GB/s"
    assert inside(*how, "--json").result["time_ns"] > one["time_ns"]


def test_a_torus_is_rings():
    how = [*RING, "--json"]
    times = []
    for text in ("torus:4x2", "ring:4,ring:2"):
        how[how.index("--topology") + 1] = text
        times.append(inside(*how).result["time_ns"])
    assert times[0] == times[1]


WORKLOAD = tuple(
    """
    simulate workload hoti2020 batch_per_rank=64 --topology switch:8 --bandwidth 100Gb/s --latency 500ns --chunks 4
    --scheduling lifo --iterations 2
    """.split()
)


def test_a_workload_with_its_files(tmp_path):
    result = inside(*WORKLOAD, "--out", tmp_path / "out", "--json").result
    assert result["time_ns"] == pytest.approx(result["compute_ns"] + result["exposed_communication_ns"])
    assert result["compute_ns"] == pytest.approx(sum(layer["compute_ns"] for layer in result["layers"]))
    assert result["exposed_communication_ns"] == pytest.approx(sum(layer["exposed_ns"] for layer in result["layers"]))
    assert [layer["layer"] for layer in result["layers"]][:2] == ["embedding", "bottom_0"]
    assert len(result["layers"]) == 1 + 7 + 12
    embedding = result["layers"][0]["collectives"]
    assert [c["phase"] for c in embedding] == ["forward", "input_gradient"] * 2
    assert all(c["raw_latency_ns"] >= c["queued_ns"] >= 0 and c["bytes"] == 64 * 64 * 64 * 2 for c in embedding)
    assert {row["links"] for row in result["links"]} == {"switch:8, uplinks", "switch:8, downlinks"}
    # Bytes on an uplink: two iterations, 7/8 of each all-to-all and twice 7/8 of each all-reduce.
    sent = sum(
        c["bytes"] * 7 / 8 * (2 if c["collective"] == "all_reduce" else 1)
        for layer in result["layers"]
        for c in layer["collectives"]
    )
    assert result["busiest_link"]["bytes"] == pytest.approx(sent)
    assert (tmp_path / "out" / "simulation.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "simulation.json").read_text()) == result
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"compute", "all_reduce", "all_to_all"}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(result["time_ns"] / 1e3)
    # Within a row nothing overlaps.
    for row in {event["tid"] for event in spans}:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(times, times[1:], strict=False))
    text = inside(*WORKLOAD).out
    assert "exposed communication" in text and "bottom_6" in text and "2 in flight" not in text


@pytest.mark.full
def test_a_full_disk_leaves_the_file_of_the_run_before(tmp_path, monkeypatch):
    assert inside(*WORKLOAD, "--out", tmp_path).status == 0
    sync = os.fsync
    for name in ("simulation.png", "simulation.json", "trace.json"):
        before = (tmp_path / name).read_bytes()

        def full(handle: int, name: str = name) -> None:
            if name in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(handle)

        monkeypatch.setattr(os, "fsync", full)
        assert_refused(inside(*WORKLOAD, "tables=64", "--out", tmp_path), 1, name)
        assert (tmp_path / name).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_every_rank_is_played_where_they_differ(tmp_path):
    text = "DATA\n1\nlayer -1 5 NONE 0 6 NONE 0 7 ALLREDUCE 4096 8\n"
    (tmp_path / "work.txt").write_text(text)
    how = "--topology switch:8 --bandwidth 1GB/s --all-reduce double_binary_tree --json".split()
    result = inside("simulate", "workload", tmp_path / "work.txt", *how).result
    assert result["shortcut"] is None and "tree" in result["no_shortcut"]
    assert result["compute_ns"] == 5 + 6 + 7 + 8
    assert result["time_ns"] == pytest.approx(result["compute_ns"] + result["exposed_communication_ns"])


def test_a_transport(tmp_path):
    how = [*RING, "--json"]
    tcp = inside(*how, "--tcp-window", "1000B", "--segment", "500", "--ack-delay", "10us").result
    assert tcp["time_ns"] > inside(*how).result["time_ns"] and tcp["lost_segments"] == 0
    how[how.index("ring")] = "double_binary_tree"
    full = inside(*how, "--tcp-window", "1MB", "--switch-buffer", "1MB", "--tcp-timeout", "1ms").result
    assert full["lost_segments"] > 0


@pytest.mark.parametrize(
    "change, why",
    [
        (("switch:8", "mesh:8"), "'mesh:8' is no dimension"),
        (("switch:8", "switch:0"), "'0' is no number of ranks"),
        (("switch:8", "switch:8,"), "'' is no dimension"),
        (("50GiB/s", "50GiB"), "--bandwidth '50GiB' is no quantity"),
        (("50GiB/s", "0GB/s"), "nothing would ever arrive"),
        (("50GiB/s", "1GB/s,1GB/s"), "--bandwidth has 2 values for the 1 dimension"),
        (("500ns", "fast"), "--latency 'fast' is no quantity"),
        (("1048576", "-5"), "expected one argument|no quantity"),
        (("ring", "tree"), "all_reduce has no algorithm 'tree'"),
        (("ring", "ring,ring"), "2 names for 1 dimension"),
        (("switch:8", "switch:6", "ring", "halving_doubling"), "a power of two of them, not 6"),
    ],
)
def test_refusals(change, why):
    how = [*RING]
    for old, new in zip(change[::2], change[1::2], strict=True):
        how[how.index(old)] = new
    done = inside(*how)
    assert done.status == 2 and "Traceback" not in done.err
    if "expected one argument" not in done.err:
        assert_refused(done, 2, why)


@pytest.mark.parametrize(
    "arguments, status, why",
    [
        (["nothing.txt"], 2, "neither a file or folder nor one of the presets hoti2020"),
        (["hoti2020", "tabels=3"], 2, "tables"),
        (["hoti2020", "tables=0"], 2, "1 or more"),
        (["hoti2020", "--chunks", "0"], 2, "1 or more"),
        (["hoti2020", "--switch-buffer", "1MB"], 2, "--switch-buffer is one of the transport's: give --tcp-window"),
        (["hoti2020", "--ack-delay", "1us"], 2, "--ack-delay is one of the transport's: give --tcp-window"),
        (["hoti2020", "--segment", "64KiB"], 2, "--segment is one of the transport's: give --tcp-window"),
        (["hoti2020", "--tcp-timeout", "0"], 2, "--tcp-timeout is one of the transport's: give --tcp-window"),
        (["hoti2020", "--tcp-window", "1MB", "--no-congestion"], 2, "leave out one of the two"),
    ],
)
def test_refusals_of_workloads(arguments, status, why):
    done = inside("simulate", "workload", *arguments, "--topology", "switch:8", "--bandwidth", "1GB/s")
    assert_refused(done, status, why)


def test_a_broken_file_is_bad_data(tmp_path):
    (tmp_path / "work.txt").write_text("hello\n")
    done = inside("simulate", "workload", tmp_path / "work.txt", "--topology", "switch:8", "--bandwidth", "1GB/s")
    assert_refused(done, 3, "line 1")
