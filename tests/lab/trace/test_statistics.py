"""Figures of traces worked out by hand; what waits for what, read from HLO."""

import dataclasses

import pytest
from support.traces import by_hand

from recjax.lab.formats.calls import imbalance
from recjax.lab.formats.trace import COMPUTE, Event, Trace
from recjax.lab.trace import show
from recjax.lab.trace.draw import picture
from recjax.lab.trace.record import dependencies
from recjax.lab.trace.statistics import figures, labels, ordered

ALL = (0, 1)


def two_ranks() -> Trace:
    """An all-to-all of 100 us, half of it beside computing, and an all-reduce of 50 us; rank 1 sends three times."""
    ranks = {}
    for rank in ALL:
        sends = (10, 30) if rank == 0 else (90, 10)
        receives = (10, 90) if rank == 0 else (30, 10)
        ranks[rank] = (
            Event(
                0,
                "all_to_all",
                "row_exchange",
                dtype="uint8",
                group=ALL,
                in_bytes=256,
                out_bytes=256,
                sends=sends,
                receives=receives,
                start_ns=0,
                duration_ns=100_000,
            ),
            Event(1, COMPUTE, start_ns=50_000, duration_ns=100_000),
            Event(
                2,
                "all_reduce",
                "dense_grads",
                dtype="float32",
                group=ALL,
                in_bytes=64,
                out_bytes=64,
                deps=(0, 1),
                start_ns=150_000,
                duration_ns=50_000,
            ),
        )
    return Trace(2, ranks, {"label": "t"})


def test_sizes_shares_and_balance():
    found = figures(two_ranks())
    exchange, reduce = found["collectives"]
    assert (exchange["kind"], exchange["phase"], exchange["count"]) == ("all_to_all", "row_exchange", 1)
    assert exchange["padded_bytes"] == 256 and exchange["bytes_share"] == pytest.approx(256 / 320)
    assert exchange["useful_bytes"] == 100  # max(40, 100) and max(100, 40)
    # 90 bytes come to rank 0 and leave rank 1: both move as much
    assert exchange["imbalance"] == 1.0
    assert reduce["count_share"] == 0.5 and reduce["imbalance"] == 1.0
    assert found["sizes"] == {"all_reduce": [[6, 1, 64]], "all_to_all": [[8, 1, 256]]}
    assert found["moved"] == [90 + 64, 90 + 64]  # an all-reduce of two moves 2 (2 - 1) / 2 of itself
    assert (found["count"], found["padded_bytes"], found["useful_bytes"]) == (2, 320, 164)


def test_time_and_what_is_exposed():
    """0-100 all-to-all, 50-150 computing, 150-200 all-reduce: of 200 us 150 communicate, 100 of them exposed."""
    time = figures(two_ranks())["time"]
    assert {k: time[k] for k in ("step_ms", "communication_ms", "exposed_ms", "computing_ms")} == {
        "step_ms": 0.2,
        "communication_ms": 0.15,
        "exposed_ms": 0.1,
        "computing_ms": 0.1,
    }
    assert (time["share"], time["exposed_share"]) == (0.75, 0.5)
    assert time["phases"] == {"row_exchange": [0.1, 0.05], "dense_grads": [0.05, 0.05]}
    exchange = figures(two_ranks())["collectives"][0]["time"]
    assert exchange["p50_us"] == 100 and exchange["bus_bytes_per_s"] == pytest.approx(256 * 0.5 / 100e-6)


def test_uneven_ranks():
    assert imbalance([1, 2, 3]) == 1.5
    trace = two_ranks()
    idle = tuple(dataclasses.replace(e, sends=(10, 0), receives=(10, 0)) for e in trace.ranks[0][:1])
    more = tuple(dataclasses.replace(e, sends=(30, 10), receives=(0, 10)) for e in trace.ranks[1][:1])
    found = figures(Trace(2, {0: idle, 1: more}))
    assert found["moved"] == [0, 30] and found["imbalance"] == 2


def four_calls() -> Trace:
    """Three ranks. An all-to-all of 10, 30 and 90 us: rank 0 waited for none. Then it is last again, then rank 2."""
    group = (0, 1, 2)
    sends = {0: (0, 0, 300), 1: (100, 0, 200), 2: (0, 300, 0)}  # received: 100, 300, 500
    durations_us = {0: (10, 20, 50), 1: (30, 30, 40), 2: (90, 25, 5)}
    ranks = {}
    for rank in group:
        receives = tuple(sends[other][rank] for other in group)
        heads = [("all_to_all", "row_exchange"), ("all_reduce", "dense_grads"), ("all_reduce", "dense_grads")]
        ranks[rank] = tuple(
            Event(
                i,
                kind,
                phase,
                group=group,
                in_bytes=300,
                out_bytes=900,
                sends=sends[rank] if i == 0 else (),
                receives=receives if i == 0 else (),
                start_ns=10**7 * rank + i * 100_000,
                duration_ns=us * 1000,
            )
            for i, ((kind, phase), us) in enumerate(zip(heads, durations_us[rank], strict=True))
        )
        half = Event(9, "all_gather", group=(0, 1), in_bytes=8, out_bytes=16)
        ranks[rank] += (half,) if rank < 2 else ()
    return Trace(3, ranks)


def test_single_calls_sent_and_received_and_who_came_last():
    """Clocks of their own: only durations are compared."""
    found = figures(four_calls())
    exchange, reduce, again, gather = found["calls"]
    assert (exchange["phase"], exchange["ranks"]) == ("row_exchange", 3)
    assert exchange["sent"] == {"imbalance": 1.0, "most_rank": 0}  # 300 each
    assert exchange["received"] == {"imbalance": pytest.approx(500 / 300), "most_rank": 2}
    assert exchange["time"] == {"last_rank": 0, "late_us": 80, "waiting_us": pytest.approx(100 / 3), "transfer_us": 10}
    assert (reduce["time"]["last_rank"], reduce["time"]["late_us"]) == (0, 10)
    assert (again["time"]["last_rank"], again["time"]["late_us"], again["time"]["transfer_us"]) == (2, 45, 5)
    assert (gather["ranks"], gather["time"]) == (2, None)
    line = next(line for line in found["collectives"] if line["phase"] == "row_exchange")
    assert line["call_imbalance"] == {"sent": 1.0, "received": pytest.approx(500 / 300)}
    waits = next(line for line in found["collectives"] if line["phase"] == "dense_grads")["waits"]
    assert (waits["count"], waits["late_us"], waits["transfer_us"]) == (2, 45, 12.5)


def test_ranks_that_keep_others_waiting():
    found = figures(four_calls())
    zero, one, two = found["by_rank"]
    assert [of["sent_bytes"] for of in (zero, one, two)] == [300 + 2 * 1200 + 8, 300 + 2 * 1200 + 8, 300 + 2 * 1200]
    assert [of["received_bytes"] - of["sent_bytes"] for of in (zero, one, two)] == [-200, 0, 200]
    assert (zero["last"], zero["calls"], zero["last_phases"]) == (2, 3, {"row_exchange": 1, "dense_grads": 1})
    # rank 0 kept the others (20 + 80) / 2 and (10 + 5) / 2 us, rank 2 (45 + 35) / 2
    assert zero["kept_waiting_ms"] == pytest.approx((100 + 15) / 2e3)
    assert two["kept_waiting_ms"] == pytest.approx(0.04)
    assert (zero["waiting_ms"], zero["transfer_ms"]) == (pytest.approx(0.045), pytest.approx(0.035))
    text = show.to_text([found], calls=True)
    assert "last to come: rank 0 in 2 of 3 calls (row_exchange 1, dense_grads 1)" in text
    assert "2 of 3" in text and "1.667" in text


def test_where_all_come_at_once_none_comes_last():
    """As in a trace with predicted times, which are those of every rank."""
    trace = four_calls()
    together = {
        rank: tuple(dataclasses.replace(e, duration_ns=e.duration_ns and 20_000) for e in events)
        for rank, events in trace.ranks.items()
    }
    found = figures(dataclasses.replace(trace, ranks=together))
    assert [call["time"] and call["time"]["last_rank"] for call in found["calls"]] == [None] * 4
    assert [(of["last"], of["calls"], of["kept_waiting_ms"]) for of in found["by_rank"]] == [(0, 3, 0)] * 3
    waits = next(line for line in found["collectives"] if line["phase"] == "dense_grads")["waits"]
    assert (waits["last_rank"], waits["last_count"], waits["transfer_us"]) == (None, 0, 20)
    text = show.to_text([found], calls=True)
    assert "last to come: none" in text and "0 of 3" in text


def test_a_trace_that_lacks_ranks_says_so():
    trace = four_calls()
    found = figures(Trace(3, {rank: trace.ranks[rank] for rank in (0, 2)}))
    assert found["missing"] == [1] and found["calls"][0]["time"] is None
    assert "2 of 3 ranks (there is no file of rank 1)" in show.to_text([found])
    assert figures(trace)["missing"] == [] and "3 ranks, " in show.to_text([figures(trace)])


def test_traces_are_called_after_what_differs():
    one, other = ({"label": n, "config": {"train.batch_size": n, "seed": "0"}} for n in ("64", "128"))
    assert labels([one, other]) == ["train.batch_size=64", "train.batch_size=128"]
    assert labels([one, {"label": "foreign", "config": None}]) == ["64", "foreign"]
    assert labels([one]) == ["64"]


@pytest.mark.full
def test_text_picture_and_page():
    found = [figures(by_hand()), figures(two_ranks())]
    text = show.to_text(found)
    assert "exposed" in text and "row_exchange" in text
    png = picture(found)
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    page = show.page(found)
    assert page.count("<table>") == 3 + 2 * 2 and page.count("data:image/png;base64") == 3
    assert "http" not in page and "<script" not in page  # it loads nothing
    hostile = dataclasses.replace(two_ranks(), about={"label": "<script>alert(1)</script>"})
    assert "<script" not in show.page([figures(hostile)])
    formula = dataclasses.replace(two_ranks(), about={"label": r"a $\frac{1$"})  # which is no formula
    assert picture([figures(formula)]).startswith(b"\x89PNG")


def drawn(found, monkeypatch):
    """The figure that `picture` makes a PNG of, laid out."""
    from matplotlib.figure import Figure

    made = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: made.append(self))
    picture(found)
    made[0].draw_without_rendering()
    return made[0]


def test_the_picture_of_one_trace(monkeypatch):
    sizes, phases, ranks, _ = drawn([figures(two_ranks())], monkeypatch).axes
    assert set(ranks.get_xticks()) <= set(range(-1, 4)) and ranks.lines[0].get_linestyle() == "None"
    assert ranks.get_ylim()[1] > 1.05 * max(ranks.lines[0].get_ydata())  # the highest marker is whole
    most = sum(c["padded_bytes"] for c in figures(two_ranks())["collectives"])
    assert (phases.get_xlabel().split()[0] == "bytes") == (most < 1024) and "MiB" not in phases.get_xlabel()
    for panel in (sizes, phases, ranks):
        assert panel.get_legend().get_window_extent().y1 < panel.get_window_extent().y0


@pytest.mark.parametrize("keys", [("train.bucket_mib",), ("embedding.exchange.backward", "train.batch_size", "seed")])
def test_several_traces_are_told_apart_and_no_label_is_cut(keys, monkeypatch):
    several = [
        figures(dataclasses.replace(two_ranks(), about={"config": {key: f"{n}.0" for key in keys}})) for n in range(4)
    ]
    shown = drawn(several, monkeypatch)
    sizes, phases, ranks, times = shown.axes
    assert len({tuple(line.get_xdata()) for line in ranks.lines}) == 4  # equal values, side by side
    whole = shown.bbox
    for panel in shown.axes:
        texts = [panel.title, panel.xaxis.label, panel.yaxis.label, panel.get_legend()]
        texts += panel.get_yticklabels() if panel in (phases, times) else []
        boxes = [text.get_window_extent() for text in texts]
        assert all(whole.x0 <= b.x0 and b.x1 <= whole.x1 and whole.y0 <= b.y0 and b.y1 <= whole.y1 for b in boxes)
        assert panel.get_legend().get_window_extent().y1 < panel.get_window_extent().y0
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in sizes.patches}
    assert len(looks) == 4 * 2  # a colour for each trace, a hatch for each kind
    entries = [text.get_text() for text in sizes.get_legend().get_texts()]
    assert len(entries) == 4 + 2 and entries[4:] == ["all_reduce", "all_to_all"]


def test_a_picture_says_that_it_shows_only_some(monkeypatch):
    many = [figures(dataclasses.replace(two_ranks(), about={"label": f"t{n}"})) for n in range(12)]
    assert drawn(many, monkeypatch).get_suptitle() == "the first 10 of 12 traces"


def test_traces_stand_in_the_order_of_numbers():
    def found(*values):
        return [{"label": v, "config": {"train.bucket_mib": v, "seed": "0"}} for v in values]

    assert [one["label"] for one in ordered(found("0.0", "1.0", "25.0", "4.0"))] == ["0.0", "1.0", "4.0", "25.0"]
    assert [one["label"] for one in ordered(found("row_wise", "auto"))] == ["row_wise", "auto"]
    assert [one["label"] for one in ordered([{"label": "b"}, {"label": "a", "config": {"x": "1"}}])] == ["b", "a"]


HLO = """
HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="x"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %a2a = f32[4]{0} all-to-all(%x), replica_groups={{0,1}}, metadata={op_name="%ar.1"}
  %mul = f32[4]{0} multiply(%a2a, %x)
  %ar.1 = f32[4]{0} all-reduce(%mul), replica_groups={{0,1}}, to_apply=%add
  %ar.2 = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %both = f32[4]{0} add(%ar.1, %ar.2)
  %called = f32[4]{0} call(%both), to_apply=%body
  %ag-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%a2a), replica_groups={{0,1}}, dimensions={0}
  %ag-done = f32[8]{0} all-gather-done(%ag-start)
  ROOT %last = f32[8]{0} all-reduce(%ag-done, %called), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_what_waits_for_what_in_a_program():
    assert dependencies(HLO) == {
        "a2a": (),
        "ar.1": ("a2a",),
        "ar.2": (),
        "inner": ("ar.1", "ar.2"),
        "ag-start": ("a2a",),
        "last": ("inner", "ag-start"),
    }
