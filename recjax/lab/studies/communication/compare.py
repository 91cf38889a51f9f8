"""Figures of the study beside those that come out here, as a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from recjax.lab.studies.communication.draw import KINDS, VARIATIONS, label, of_variation, phase_title, size_rows
from recjax.lab.studies.communication.shape import BASE, PIECE
from recjax.lab.studies.foresight import published
from recjax.lab.studies.report import Picture, Report, Row, Section, Table
from recjax.lab.trace.draw import time_parts
from recjax.utils.units import size_text

SHARE = published.MODEL_A["exposed_share"]  # of the time in communication
SHOWN = "shown; its numbers are not known here"  # where the publication has a picture
_FACTS = {  # key -> what it is, and its published value
    "parameters": ("parameters", 793e9),
    "least_dim": ("least D", 4),
    "most_dim": ("largest D", 384),
    "mean_dim": ("mean D", 93),
    "pooling": ("ids a bag, mean", 15),
    "layers": ("layers of the MLPs", 20),
    "mean_width": ("their mean width", 3375),
    "mflop": ("MFLOP a sample", 638),
    "samples": ("samples a GPU", 512),
    "ranks": ("GPUs", 128),
}
_ASSUMPTIONS = (
    "Model A is the preset bench_model_a, whose docstring says what is published of it and what is chosen.",
    "Table-wise: each table on the rank that has the least bytes and look-ups so far. Column-wise: tables cut into "
    f"even pieces of at most {PIECE} columns, each whole on the rank that has the fewest columns so far.",
    "Pooled vectors travel, padded so that all ranks send equal blocks; useful bytes are without the padding.",
    "Imbalance is max/mean over ranks of useful bytes; a call is one collective.",
    "Times of V100 are predicted from the compiled step and the data sheet (machine v100).",
)


def report(result: Mapping[str, Any], about: Mapping[str, Any], pictures: Mapping[str, Sequence[Picture]]) -> Report:
    """The report of `study.study`; `about` is of `report.provenance`, and pictures of `draw.pictures`."""
    cases = result["compiled"]
    rows = [*_facts(result["facts"]), *_all_reduces(cases), *_all_to_alls(cases), *_variations(cases), *_times(result)]
    size = "model A" if result["full"] else "a smaller model A (every 8th table, layers of 256, 16 samples a rank)"
    histograms = [
        Table(f"{kind}, by size: {VARIATIONS[variation]}", found)
        for kind in KINDS
        for variation in VARIATIONS
        if len(found := size_rows(cases, [(label(variation, n), n) for n in of_variation(cases, variation)], kind)) > 1
    ]
    sections = [
        Section(
            "Messages by size",
            (
                f"{size}, {result['ranks']} ranks, compiled. Counts and bytes are those of a rank and step, padding "
                "included.",
            ),
            histograms,
            pictures.get("sizes", ()),
        ),
        Section("Bytes by phase", (), [_phase_table(cases)], pictures.get("variations", ())),
        Section(
            "Imbalance",
            ("Of the phase: of each rank's bytes in all calls of a step; of a call: the most uneven one.",),
            [_imbalance_table(cases)],
            pictures.get("ranks", ()),
        ),
    ]
    if result["measured"]:
        notes = (f"Every 32nd table, {result['devices']} devices of this machine, 128 samples a rank.",)
        sections.append(Section("Time", notes, [_time_table(result["measured"])], pictures.get("time", ())))
    counted = {one["counted_ranks"] for one in cases.values()} - {None}
    assumptions = list(_ASSUMPTIONS)
    if counted:
        of = f"first {min(counted)} ranks" if min(counted) > 1 else "first rank"
        assumptions.append(
            f"Splits of ids are those of the {of}, which the others are taken to ask alike: a step has more ids than "
            "are counted."
        )
    return Report(
        "communication",
        "Communication of a large DLRM",
        "C.-H. Chu et al. (Meta): communication in training DLRMs, workload model A on 128 V100",
        about,
        rows,
        assumptions,
        sections,
    )


def _facts(facts: Mapping[str, float]) -> Iterator[Row]:
    for key, (name, theirs) in _FACTS.items():
        ours = facts[key]
        same = abs(ours / theirs - 1) <= 0.02
        why = (
            "only range and mean are published; how many tables have which D is chosen so that the parameters and the "
            "FLOP agree"
        )
        yield Row(
            "workload",
            name,
            f"{theirs:,.4g}" if theirs < 1e6 else f"{theirs / 1e9:,.0f}e9",
            f"{ours:,.4g}" if ours < 1e6 else f"{ours / 1e9:,.1f}e9",
            same,
            "" if same else why,
        )


def _all_reduces(cases: Mapping[str, Any]) -> Iterator[Row]:
    base = cases[BASE]
    bins = base["sizes"].get("all_reduce", [])
    count, total = (sum(one[i] for one in bins) or 1 for i in (1, 2))
    text = "; ".join(
        f"from {size_text(2.0 ** int(b))}: {n:.3g} ({n / count:.0%} of the count, {size / total:.1%} of the bytes)"
        for b, n, size in bins
    )
    large = max((size / total for _, _, size in bins), default=0.0)
    yield Row(
        "all-reduce by size",
        "count and share of bytes",
        SHOWN,
        text,
        None,
        f"{large:.1%} of the bytes are in the largest size: the dense gradients; the rest are sums of a few values",
    )


def _all_to_alls(cases: Mapping[str, Any]) -> Iterator[Row]:
    base = cases[BASE]
    for phase in ("id_exchange", "pooled_exchange", "pooled_grad_exchange"):
        if phase not in base["phases"]:
            continue
        line = next(c for c in base["collectives"] if c["phase"] == phase)
        of = base["phases"][phase]["imbalance"]
        text = f"{size_text(line['padded_bytes'])} ({size_text(line['useful_bytes'])} useful) in {line['count']:.3g}"
        yield Row(
            phase_title(phase),
            "size of a rank's message",
            SHOWN,
            text,
            None,
            "blocks are as large as the largest that any rank has for another",
        )
        uneven = ", ".join(f"{way} {of[way]['phase']:.2f} (call {of[way]['call']:.2f})" for way in of)
        why = "received: every rank has as many samples; sent: owners of wide tables send more"
        if phase == "id_exchange":
            why = "received: owners of tables with long bags get more ids; sent: every rank has as many samples"
        elif phase == "pooled_grad_exchange":
            why = "the other way round: gradients go to the owners"
        yield Row(phase_title(phase), "imbalance over ranks, max/mean", SHOWN, uneven, None, why)


def _bytes(one: Mapping[str, Any], kinds: Sequence[str] = KINDS, phases: Sequence[str] = ()) -> float:
    return float(
        sum(
            c["padded_bytes"] for c in one["collectives"] if c["kind"] in kinds and (not phases or c["phase"] in phases)
        )
    )


def _counted(one: Mapping[str, Any], kind: str, phase: str) -> float:
    return float(sum(c["count"] for c in one["collectives"] if c["kind"] == kind and phase in c["phase"]))


_VECTORS = ("pooled_exchange", "pooled_grad_exchange")


def _variations(cases: Mapping[str, Any]) -> Iterator[Row]:
    base = cases[BASE]

    def over(one: Mapping[str, Any], of: Callable[[Mapping[str, Any]], float]) -> str:
        return f"{of(one) / (of(base) or 1):.3f}x"

    def vectors(one: Mapping[str, Any]) -> float:
        return _bytes(one, ("all_to_all",), _VECTORS)

    def reduced(one: Mapping[str, Any]) -> float:
        return _bytes(one, ("all_reduce",))

    for name in of_variation(cases, "batch")[1:]:
        text = f"vectors {over(cases[name], vectors)}, all-reduce {over(cases[name], reduced)}"
        yield Row(
            "batch size",
            f"bytes, {name}",
            SHOWN,
            text,
            None,
            "one vector a sample and table; dense gradients have the size of the layers",
        )
    for name in of_variation(cases, "placement")[1:]:
        uneven = [cases[n]["phases"]["pooled_exchange"]["imbalance"]["sent"]["phase"] for n in (BASE, name)]
        text = f"{uneven[0]:.2f} table-wise, {uneven[1]:.2f} {name}; padded bytes {over(cases[name], vectors)}"
        yield Row(
            "placement",
            "imbalance of sent vectors",
            SHOWN,
            text,
            None,
            "the widest table bounds what its owner sends; pieces even that out, and blocks need less padding",
        )
        if _counted(cases[name], "all_to_all", "row_statistic"):
            yield Row(
                "placement",
                "price of cutting columns",
                SHOWN,
                f"{_counted(cases[name], 'all_to_all', 'row_statistic'):.3g} all-to-alls of "
                f"{size_text(_bytes(cases[name], ('all_to_all',), ('row_statistic',)))} more, ids "
                f"{over(cases[name], lambda one: _bytes(one, ('all_to_all',), ('id_exchange',)))}",
                None,
                "row-wise Adagrad needs one number a row, so owners of a row's pieces add theirs up; ids go to each of "
                "them",
            )
    names = of_variation(cases, "buckets")
    text = ", ".join(f"{label('buckets', n)} {_counted(cases[n], 'all_reduce', 'dense_grads'):.3g}" for n in names)
    same = all(abs(reduced(cases[n]) / reduced(base) - 1) < 0.01 for n in names)
    yield Row(
        "bucket size",
        "all-reduces of dense gradients",
        SHOWN,
        text,
        None,
        f"their bytes {'stay' if same else 'do not stay'} the same",
    )
    for name in of_variation(cases, "dense")[1:]:
        of = {kind: _bytes(cases[name], (kind,)) for kind in KINDS if kind != "all_to_all"}
        text = ", ".join(f"{kind} {size_text(size)}" for kind, size in of.items())
        yield Row(
            "fully sharded",
            "bytes of the dense part",
            SHOWN,
            text,
            None,
            f"replicated: all_reduce {size_text(reduced(base))}; a ring sends as much",
        )
    for name in of_variation(cases, "precision")[1:]:
        why = "half as many bits"
        if name == "int8":
            why = (
                "a quarter of the bits, and 8 bytes of scale and offset for each block, whose width divides every D: "
                "where the narrowest table has 4 columns, 12 bytes in place of 16"
            )
        ours = over(cases[name], vectors)
        yield Row("quantised exchange", f"bytes of vectors, {name}", SHOWN, ours, None, why)


def _times(result: Mapping[str, Any]) -> Iterator[Row]:
    yield from published.rows("time", result["published"]["rows"])
    names = of_variation(result["compiled"], "buckets")
    hidden = {n: _hidden(result["compiled"][n]["time"], "dense_grads") for n in names}
    text = ", ".join(f"{label('buckets', n)} {share:.0%}" for n, share in hidden.items())
    size = "" if result["full"] else " of the smaller model"
    yield Row(
        "time",
        "share of the large all-reduces that computing hides",
        "hidden",
        f"{text} (predicted)",
        max(hidden.values()) > 0.5,
        f"on V100{size}: one all-reduce at the end has nothing to hide behind; buckets go while earlier layers are "
        "computed, and the last one stays",
    )
    if traced := result.get("traced"):
        waiting, call = (sum(rank[k] for rank in traced["by_rank"]) for k in ("waiting_ms", "transfer_ms"))
        ranks = len(traced["by_rank"])
        yield Row(
            "time",
            "of a step in communication",
            f"about {SHARE:.0%}",
            f"{traced['time']['share']:.1%} ({traced['time']['exposed_share']:.1%} exposed)",
            abs(traced["time"]["share"] / SHARE - 1) <= 0.25,
            f"a step that PyTorch's profiler recorded on {traced['world']} GPUs ({traced['label']}): another model on "
            f"another number of GPUs; of {(waiting + call) / ranks:.2f} ms in collectives a rank waits "
            f"{waiting / ranks:.2f} for the one that comes last",
        )
    if result["measured"]:
        times = {n: one["time"] for n, one in result["measured"].items() if one["time"]}
        base = times[BASE]
        yield Row(
            "time",
            "of a step in communication",
            f"about {SHARE:.0%}",
            f"{base['share']:.0%} ({base['exposed_share']:.0%} exposed)",
            abs(base["share"] / SHARE - 1) <= 0.25,
            f"measured on {result['devices']} devices of this machine, of a smaller model: its exchange is a copy in "
            "memory, and a step computes longer than on a GPU",
        )


def _hidden(time: Mapping[str, Any], phase: str) -> float:
    whole, exposed = (sum(of[i] for name, of in time["phases"].items() if phase in name) for i in (0, 1))
    return 1 - exposed / whole if whole else 0.0


def _phase_table(cases: Mapping[str, Any]) -> Table:
    rows = [["case", "phase", "collective", "count", "padded", "useful", "smallest", "largest"]]
    for name, one in cases.items():
        for c in one["collectives"]:
            sizes = (size_text(c[key]) for key in ("padded_bytes", "useful_bytes", "smallest", "largest"))
            rows.append([name, c["phase"], c["kind"], f"{c['count']:.4g}", *sizes])
    return Table("collectives of a rank in a step", rows, (0, 1, 2))


def _imbalance_table(cases: Mapping[str, Any]) -> Table:
    rows = [["case", "phase", "sent, phase", "sent, call", "received, phase", "received, call"]]
    for name, one in cases.items():
        for phase, of in one["phases"].items():
            values = [of["imbalance"][way][part] for way in ("sent", "received") for part in ("phase", "call")]
            rows.append([name, phase_title(phase), *(f"{value:.3f}" for value in values)])
    return Table("max/mean over ranks", rows, (0, 1))


def _time_table(cases: Mapping[str, Any]) -> Table:
    rows = [
        ["case", "step, ms", "communication", "exposed", "computing alone, ms", "beside computing, ms", "exposed, ms"]
    ]
    for name, one in cases.items():
        t = one["time"]
        of = time_parts(t)
        rows.append(
            [
                name,
                f"{t['step_ms']:.2f}",
                f"{t['share']:.1%}",
                f"{t['exposed_share']:.1%}",
                *(
                    f"{of[key]:.2f}"
                    for key in ("computing alone", "communication beside computing", "exposed communication")
                ),
            ]
        )
    return Table("a step", rows)
