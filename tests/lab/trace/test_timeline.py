"""A measured trace as a picture of a step and for ui.perfetto.dev; traces in other formats."""

import dataclasses
import json

import pytest
from support.commands import assert_refused, inside
from support.traces import by_hand, save

from recjax.errors import ConfigError, DataError
from recjax.lab.formats import read_trace
from recjax.lab.formats.trace import COMPUTE, Event, Trace
from recjax.lab.trace import perfetto
from recjax.lab.trace.timeline import middle_step, timeline


def two_steps() -> Trace:
    """Two ranks: 10 us of computing beside an all-to-all of 40 on rank 0 and 10 on rank 1; a second, longer step."""
    ranks = {}
    for rank, took_us in enumerate((40, 10)):
        one = (
            Event(0, COMPUTE, start_ns=0, duration_ns=10_000),
            Event(
                1,
                "all_to_all",
                "row_exchange",
                group=(0, 1),
                in_bytes=80,
                out_bytes=80,
                sends=(8, 24),
                receives=(8, 24),
                start_ns=5000,
                duration_ns=took_us * 1000,
            ),
            Event(
                2, "all_reduce", "dense_grads", group=(0, 1), in_bytes=8, out_bytes=8, start_ns=6000, duration_ns=1000
            ),
        )
        other = (
            Event(
                3,
                "all_reduce",
                "dense_grads",
                step=1,
                group=(0, 1),
                in_bytes=8,
                out_bytes=8,
                start_ns=100_000,
                duration_ns=90_000,
            ),
        )
        ranks[rank] = one + other
    return Trace(2, ranks, {"label": "two"})


def test_events_for_perfetto():
    found = json.loads(perfetto.write(two_steps())["timeline.json"])["traceEvents"]
    spans = [e for e in found if e["ph"] == "X" and e["pid"] == 0]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("compute", 0, 0, 10),
        ("row_exchange", 1, 5, 40),
        ("dense_grads", 2, 6, 1),
        ("dense_grads", 1, 100, 90),
    ]
    args = spans[1]["args"]
    assert (args["bytes"], args["useful_bytes"], args["waiting_us"], args["step"]) == (80, 32, 30, 0)
    names = {e["args"]["name"] for e in found if e["ph"] == "M" and e["pid"] == 1}
    assert names == {"rank 1", "computing", "collectives 1", "collectives 2"}
    untimed = {rank: tuple(dataclasses.replace(e, start_ns=None) for e in es) for rank, es in two_steps().ranks.items()}
    with pytest.raises(DataError, match="no timeline"):
        perfetto.write(Trace(2, untimed))


def test_the_picture_of_a_step(monkeypatch):
    from matplotlib.figure import Figure

    assert middle_step(two_steps()) == 0  # 45 and 90 us long
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    timeline(two_steps(), "two")
    (panel,) = drawn[0].axes
    bars = [(round(b.get_x() * 1e3, 6), round(b.get_width() * 1e3, 6)) for b in panel.patches if b.get_y() < 0.4]
    # rank 0: computing, 30 of waiting and 10 of transfer, and a collective for which nobody waits
    assert bars == [(0, 10), (5, 30), (35, 10), (6, 0), (6, 1)]
    assert [t.get_text() for t in panel.get_yticklabels()] == ["rank 0", "rank 1"]
    with pytest.raises(ConfigError, match="--step 7: .* There are: 0, 1"):
        timeline(two_steps(), "two", 7)
    lacking = Trace(2, {0: two_steps().ranks[0], 1: two_steps().ranks[1][:3]})
    with pytest.raises(ConfigError, match="There are: 0."):
        timeline(lacking, "two", 1)


def test_the_options_of_the_picture(tmp_path):
    folder = save(two_steps(), tmp_path / "two")
    done = inside("trace", "report", folder, "--timeline", tmp_path / "step.png", "--step", 1)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG") and "step.png" in done.out
    for name in ("page.html", "other.png"):  # links of the user, which stay
        (tmp_path / name).symlink_to(tmp_path / f"there-{name}")
    pages = ("--out", tmp_path / "page.html", "--timeline", tmp_path / "other.png")
    assert inside("trace", "report", folder, *pages).status == 0
    assert (tmp_path / "page.html").is_symlink() and (tmp_path / "there-page.html").stat().st_size > 100
    assert (tmp_path / "other.png").is_symlink() and (tmp_path / "there-other.png").stat().st_size > 100
    assert_refused(inside("trace", "report", folder, "--step", 1), 2, "give --timeline FILE.png, too")
    assert_refused(inside("trace", "report", folder, "--timeline", tmp_path / "step.svg"), 2, "the .png of one trace")
    plain = save(by_hand(), tmp_path / "plain", "param")
    assert_refused(inside("trace", "report", plain, "--timeline", tmp_path / "x.png"), 3, "no timeline of it")


def test_a_trace_is_converted(tmp_path):
    folder = save(by_hand(), tmp_path / "first")
    every = [word for name in ("recjax", "chakra-et", "param", "perfetto") for word in ("--format", name)]
    done = inside("trace", "convert", folder, *every, "--out", tmp_path / "all")
    assert "param carries no durations and no computing" in done.out
    for name in ("recjax", "chakra-et", "param"):
        read = read_trace(tmp_path / "all" / name)
        assert read.about["format"] == name and sorted(read.ranks) == [0, 1, 2, 3]
    assert read_trace(tmp_path / "all" / "recjax").ranks == by_hand().ranks
    assert json.loads((tmp_path / "all" / "perfetto" / "timeline.json").read_text())["traceEvents"]
    one = ("trace", "convert", folder, "--format", "chakra-et", "--out", tmp_path / "one")
    assert inside(*one, "--json").result["out"] == {"chakra-et": str(tmp_path / "one")}
    assert_refused(inside(*one), 2, "holds a trace already")
    assert inside(*one, "--overwrite").status == 0
    same = ("trace", "convert", folder, "--format", "chakra-et", "--out", folder, "--overwrite")
    assert_refused(inside(*same), 2, "where the trace lies")
    assert read_trace(folder).ranks == by_hand().ranks
