"""`recjax study communication`: model A and its smaller kin, variations, and what the report says of them."""

import json
from typing import Any

import numpy as np
import pytest
from support.commands import assert_refused, inside
from support.traces import profile, pytorch

from recjax.embedding.routing.routed import GroupRouting
from recjax.lab.studies.communication import compare, draw, study
from recjax.lab.studies.communication.shape import BASE, FULL, SMALL, Size, cases, config, cut_plan, facts
from recjax.lab.studies.report import Report
from recjax.lab.trace.kineto import read_timed
from recjax.lab.trace.record import repeated
from recjax.lab.trace.statistics import figures

pytestmark = pytest.mark.light_compile

TINY = Size(every=250, width=6, dense=3, samples=4, buckets=(0.0001,), max_rows=50)


def test_what_model_a_is():
    """Golden values of the preset; the published ones stand beside them in the report."""
    found = facts()
    assert found.pop("parameters") == 793_319_155_181
    assert found == {
        "tables": 1000,
        "least_dim": 4,
        "mean_dim": 84.16,
        "most_dim": 384,
        "pooling": 15.0,
        "layers": 20,
        "mean_width": 3375.85,
        "mflop": 638.178912,
        "samples": 512.0,
        "ranks": 128,
    }


def test_a_smaller_model_a_has_every_nth_table(tmp_path):
    whole, small = (config(size, 128, cases(size, 128)[0], tmp_path) for size in (FULL, SMALL))
    kept = [small.embedding.tables[f"sparse_{n}"].dim for n in range(125)]
    assert kept == [whole.embedding.tables[f"sparse_{n}"].dim for n in range(4, 1000, 8)]
    assert small.data.rows == whole.data.rows[4::8]
    assert len(small.model.bottom) + len(small.model.top) == len(whole.model.bottom) + len(whole.model.top) == 20
    assert (whole.train.batch_size, small.train.batch_size) == (65_536, 2048)


def test_the_five_variations():
    found = {case.variation for case in cases(SMALL, 128)}
    assert found == {BASE, "batch", "placement", "buckets", "dense", "precision"}
    assert {case.name: case.overrides for case in cases(SMALL, 128)}["half the batch"] == ("train.batch_size=1024",)


def test_columns_are_cut_evenly_and_go_where_the_fewest_are():
    """Of 70, 32 and 8 columns: pieces of 32, 24, 23, 23 and 8; the widest first, onto two devices: 55 and 55."""
    plan = cut_plan({"a": 70, "b": 32, "c": 8}, 2)
    pieces = [(s.column_range(70), s.owners) for s in plan.tables["a"]]
    assert [of for of, _ in pieces] == [(0, 23), (23, 46), (46, 70)]
    loads = [0, 0]
    for name, dim in (("a", 70), ("b", 32), ("c", 8)):
        for segment in plan.tables[name]:
            first, last = segment.column_range(dim)
            loads[segment.owners] += last - first
    assert loads == [55, 55]
    assert {s.exchange.kind for of in plan.tables.values() for s in of} == {"pooled"}


def test_ranks_that_were_not_counted_ask_as_those_that_were():
    counts = {"g": GroupRouting(None, np.array([[1, 2], [3, 4]]), handed_NxE=np.array([[5], [6]]))}
    found = repeated(counts, 2, 5)["g"]
    assert found.counts_NxO.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]
    assert found.handed_NxE.tolist() == [[5], [6], [5], [6], [5]]
    assert repeated(counts, 2, 2) is counts


def made_up(name: str, **more: object) -> dict[str, object]:
    """Figures of a case: an all-reduce of 4 MiB and one of 8 bytes, and three all-to-alls of two ranks."""
    lines = [("dense_grads", "all_reduce", 1.0, 2.0**22), ("finite_check", "all_reduce", 1.0, 8.0)]
    lines += [(phase, "all_to_all", 1.0, 2.0**20) for phase in ("id_exchange", "pooled_exchange")]
    keys = ("phase", "kind", "count", "padded_bytes")
    both = {"phase": 1.5, "call": 2.5}
    of = {"sent": [3.0, 1.0], "received": [2.0, 2.0], "imbalance": {"sent": both, "received": both}}
    time = {
        "step_ms": 10.0,
        "communication_ms": 4.0,
        "exposed_ms": 3.0,
        "computing_ms": 6.0,
        "share": 0.4,
        "exposed_share": 0.3,
        "phases": {"dense_grads": [2.0, 0.5]},
    }
    return {
        "variation": name,
        "collectives": [
            dict(zip(keys, line, strict=True)) | dict.fromkeys(("useful_bytes", "smallest", "largest"), line[3])
            for line in lines
        ],
        "sizes": {"all_reduce": [[3, 1.0, 8.0], [22, 1.0, 2.0**22]], "all_to_all": [[20, 2.0, 2.0**21]]},
        "phases": {"id_exchange": of, "pooled_exchange": of},
        "time": time,
        "counted_ranks": None,
    } | more


def made_up_result() -> dict[str, Any]:
    """All cases alike."""
    return {
        "full": False,
        "ranks": 2,
        "devices": 2,
        "facts": facts(),
        "compiled": {case.name: made_up(case.variation) for case in cases(SMALL, 2)},
        "measured": {case.name: made_up(case.variation) for case in cases(SMALL, 2)},
        "published": {"rows": [{"what": "fast", "step_ms": 50.0, "samples_per_s": 1.3e6, "exposed_share": 0.9}]},
    }


@pytest.mark.full  # it draws five pictures
def test_the_pictures_of_made_up_figures():
    pictures = draw.pictures(made_up_result())
    names = {picture.name for of in pictures.values() for picture in of}
    assert names == {"all_reduce.png", "all_to_all.png", "bytes.png", "ranks.png", "time.png"}
    assert all(picture.png.startswith(b"\x89PNG") for of in pictures.values() for picture in of)


def test_the_report_of_made_up_figures():
    report = compare.report(made_up_result(), {}, {})
    rows = {(row.figure, row.quantity): row for row in report.rows}
    assert rows["workload", "parameters"].same and not rows["workload", "mean D"].same
    assert rows["time", "samples/s"].same is True
    assert rows["time", "communication that nothing hides, of a step"].same is False  # 90% against 40%
    assert rows["time", "of a step in communication"].ours == "40% (30% exposed)"
    hidden = rows["time", "share of the large all-reduces that computing hides"]
    assert hidden.same is True and "one bucket 75%" in hidden.ours
    by_size = rows["all-reduce by size", "count and share of bytes"].ours
    assert (
        by_size == "from 8 B: 1 (50% of the count, 0.0% of the bytes); from 4.0 MiB: 1 (50% of the count, 100.0% of "
        "the bytes)"
    )
    tables = {table.title: table.rows for section in report.sections for table in section.tables}
    assert tables["all_reduce, by size: bucket size"][2] == ["one bucket", "4.0 MiB", "1", "50.0%", "4.0 MiB", "100.0%"]
    assert tables["max/mean over ranks"][1] == ["base", "ids (alltoallv-1)", "1.500", "2.500", "1.500", "2.500"]


@pytest.mark.full
def test_a_tiny_study_goes_on_where_it_was(tmp_path, monkeypatch):
    """Four tables on two ranks, one case of a kind; what was made once is not made again, and compiled once."""
    programs = []
    compiled = study.compiled
    monkeypatch.setattr(study, "compiled", lambda *how: programs.append(how) or compiled(*how))
    monkeypatch.setattr(study, "SMALL", TINY)
    monkeypatch.setattr(study, "model_a", lambda: {"rows": []})
    monkeypatch.setattr(study, "cases", lambda size, ranks: [c for c in cases(size, ranks) if c.variation in some])
    some = {BASE}
    where = ("study", "communication", "--ranks", 2, "--devices", 0, "--out", tmp_path, "--json")
    monkeypatch.setattr(compare, "report", lambda result, about, pictures: BARE)
    monkeypatch.setattr(draw, "pictures", lambda result: {})
    first = inside(*where)
    base = first.result["compiled"]["base"]
    assert len(programs) == 1 and base["time"]["step_ms"] > 0
    # Tables of 4, 32, 64 and 128 columns or so: all vectors of 4 samples go to the two ranks.
    dims = [t.dim for t in config(TINY, 2, cases(TINY, 2)[0], tmp_path).embedding.tables.values()]
    vectors = base["phases"]["pooled_exchange"]
    assert sum(vectors["sent"]) == sum(vectors["received"]) == sum(dims) * 4 * 4  # half of 8 samples, float32
    some.add("placement")
    again = inside(*where)
    assert "compiling for 2 ranks: column-wise" in again.err and "ranks: base" not in again.err
    assert again.result["compiled"]["base"] == base
    cut = again.result["compiled"]["column-wise"]["phases"]["pooled_exchange"]
    assert sum(cut["sent"]) == sum(vectors["sent"])
    assert len(programs) == 2 and not again.result["compiled"]["column-wise"]["time"]
    assert_refused(inside(*where, "--full"), 2, "other settings .full.")


BARE = Report("communication", "", "", {}, [])


def test_a_trace_of_gpus_stands_beside(monkeypatch, tmp_path):
    """Of the made-up times by hand: the figures of a trace with its profile, and its row in the report."""
    et, profiles = tmp_path / "et", tmp_path / "kineto"
    for folder, content in ((et, pytorch), (profiles, profile)):
        folder.mkdir()
        for rank in (0, 1):
            (folder / f"{rank}.json").write_text(json.dumps(content(rank)))
    traced = figures(read_timed(et, profiles))
    row = next(row for row in compare.report(made_up_result() | {"traced": traced}, {}, {}).rows if "et)" in row.why)
    time = traced["time"]
    assert row.ours == f"{time['share']:.1%} ({time['exposed_share']:.1%} exposed)"
    assert row.same == (0.3 <= time["share"] <= 0.5)
    where = ("study", "communication", "--devices", 0, "--out", tmp_path / "out")
    assert_refused(inside(*where, "--trace", et), 2, "it says what was sent and not when")
    assert_refused(inside(*where, "--kineto", profiles), 2, "give its folder, too")


def test_refusals(tmp_path):
    assert_refused(inside("study", "communication", "--ranks", 1, "--out", tmp_path), 2, "--ranks is 1")
