"""Results of the experiments in `study` beside statements of the source: the rows of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from recjax.lab.studies.hoti2020.study import ASSUMPTIONS, DIRECT, TREE
from recjax.lab.studies.report import Picture, Report, Row, Section, Table
from recjax.utils.units import size_text, time_text

NAMES = {TREE: "double binary tree", DIRECT: "direct"}
_MIB = 2.0**20
_LARGEST_LAYER = 8 * _MIB  # 2048 x 2048 weights of 16 bits
_FLAT = ("Flat100G", "Flat800G")
_QUESTION = "studied; no number is known here"
_DIFFER = "flat and hierarchical systems differ in sensitivity"
_COMPARED_NS = 1_344_177  # of 128 ranks for 8 MiB in one chunk, which was compared with the public simulator
_AGREES = (
    "the public simulator's analytical model says the same as ours: it takes 1,343,955 ns with congestion for 8 MiB in "
    "one chunk, ours 1,344,177"
)


def rows(found: Mapping[str, Any]) -> list[Row]:
    """Every statement of the source whose experiment was run, and what it comes to here.

    A stated number holds if ours is within a quarter of it; an observation if it is so in all systems that it names.
    """
    return [row for name, observe in _OBSERVERS.items() if name in found for row in observe(found[name])]


def _by_system(of: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[Any, float]]:
    found: dict[str, dict[Any, float]] = {}
    for row in of:
        found.setdefault(row["system"], {})[row[key]] = row["time_ns"]
    return found


def _spread(times: Mapping[str, float]) -> float:
    return max(times.values()) / min(times.values())


def _systems(of: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for all_reduce in (TREE, DIRECT):
        own = [row for row in of if row["all_reduce"] == all_reduce]
        times = {row["system"]: row["time_ns"] for row in own}
        ratio = _spread(times)
        text = f"{ratio:.2f}x: " + ", ".join(f"{name} {time_text(time)}" for name, time in times.items())
        computing = own[0]["compute_ns"] / min(times.values())
        same = abs(ratio - 3) <= 0.75
        why = f"computing is {computing:.0%} of the fastest system's time"
        yield Row(
            "systems",
            f"two iterations, slowest over fastest system ({NAMES[all_reduce]})",
            "3x",
            text,
            same,
            why if same else f"it hangs on the FLOP/s that are reached, see below: {why}",
        )


def crossing(by_flops: Mapping[float, float], level: float) -> float | None:
    """The FLOP/s (in any unit) at which a ratio that grows with them reaches a level, on a line between two points."""
    points = sorted(by_flops.items())
    for (x, y), (next_x, next_y) in zip(points, points[1:], strict=False):
        if min(y, next_y) <= level <= max(y, next_y) and y != next_y:
            return x + (next_x - x) * (level - y) / (next_y - y)
    return None


def ratios(of: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """TFLOP/s -> slowest over fastest system."""
    by_flops: dict[float, dict[str, float]] = {}
    for row in of:
        by_flops.setdefault(row["tflops"], {})[row["system"]] = row["time_ns"]
    return {tflops: _spread(times) for tflops, times in sorted(by_flops.items())}


def _flops(of: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    found = ratios(of)
    at = crossing(found, 3.0)
    text = ", ".join(f"{tflops:g}: {ratio:.2f}x" for tflops, ratio in found.items())
    where = "nowhere between them" if at is None else f"3x at {at:.0f} TFLOP/s"
    quantity = "reached TFLOP/s at which 3x holds (direct)"
    same = at is not None and abs(at / 60 - 1) <= 0.25
    why = "the text does not say whether 60 is reached or a peak"
    if not same and at is not None and at < 60:
        why += "; half of it would be usual for such products"
    elif at is None:
        why = "no number of FLOP/s between these gives three times"
    yield Row("systems", quantity, "3x; says 60 TFLOP/s a GPU", f"{where} ({text})", same, why)


def _lone_all_reduce(of: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for all_reduce in (TREE, DIRECT):
        for count in sorted({row["chunks"] for row in of}):
            own = [r for r in of if (r["all_reduce"], r["chunks"]) == (all_reduce, count)]
            within = [r for r in own if r["bytes"] <= _LARGEST_LAYER]
            most, beyond = max(within, key=lambda r: r["ratio"]), max(own, key=lambda r: r["ratio"])
            text = f"{most['ratio']:.1f}x at {size_text(most['bytes'])}, beyond it {beyond['ratio']:.1f}x at "
            text += size_text(beyond["bytes"])
            at = crossing({math.log2(r["bytes"]): r["ratio"] for r in own}, 50.0)
            why = f"never 50 up to {size_text(own[-1]['bytes'])}" if at is None else f"50x at {size_text(2**at)}"
            what = f"time over the analytical one ({NAMES[all_reduce]}, {count} chunk(s))"
            same = abs(most["ratio"] - 50) <= 12.5
            compared = (all_reduce, count) == (DIRECT, 1) and _COMPARED_NS in [round(r["time_ns"]) for r in own]
            model = _AGREES if compared else "against the same analytical model"
            if count > 1 and all_reduce == DIRECT:
                model += ", in which all chunks go at once and each takes its part of the time"
            yield Row("lone all-reduce", what, "up to 50x", text, same, f"{why}; {model}")


def _in_flight(of: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    lifo = _by_system([row for row in of if row["scheduling"] == "lifo"], "in_flight")
    fifo = _by_system([row for row in of if row["scheduling"] == "fifo"], "in_flight")
    both = {(name, n): fifo[name][n] / lifo[name][n] for name in fifo for n in fifo[name]}
    text = ", ".join(f"{name} ({n}) {ratio:.3f}" for (name, n), ratio in both.items())
    yield Row(
        "scheduling",
        "FIFO's time over LIFO's, chunks in flight in brackets",
        _QUESTION,
        text,
        None,
        "the gradients of the last layer are needed last"
        if min(both.values()) >= 1
        else "LIFO is not faster everywhere",
    )
    yield _optimum("chunks in flight", lifo, "more of them under way fill the links, and wait longer")


def _optimum(what: str, times: Mapping[str, Mapping[Any, float]], why: str) -> Row:
    """Returns whether in some system neither the least nor the largest number is the best."""
    best = {name: min(of, key=lambda n: (of[n], n)) for name, of in times.items()}
    inner = [name for name, of in times.items() if of[best[name]] < 0.999 * min(of[min(of)], of[max(of)])]
    text = "; ".join(
        f"{name} best at {best[name]} ({of[min(of)] / of[best[name]]:.3f}x at {min(of)}, "
        f"{of[max(of)] / of[best[name]]:.3f}x at {max(of)})"
        for name, of in times.items()
    )
    return Row(
        what,
        "optimum in between",
        "an optimum between utilised links and queueing",
        text,
        bool(inner),
        f"{why}; in {', '.join(inner)}" if inner else "the fewest or the most are best; nowhere by 0.1% or more",
    )


def _chunk_counts(of: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    yield _optimum(
        "chunks", _by_system(of, "chunks"), "chunks fill both hops of a switch, and each pays its copies, of 1 us here"
    )


def _copies(of: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for all_reduce in (TREE, DIRECT):
        times = _by_system([row for row in of if row["all_reduce"] == all_reduce], "copy_us")
        slower = {name: t[100] / t[0.01] for name, t in times.items()}
        flat, deep = ([ratio for name, ratio in slower.items() if (name in _FLAT) == of] for of in (True, False))
        added = {name: (t[100] - t[0.01]) / 1e6 for name, t in times.items()}
        text = ", ".join(f"{name} {ratio:.2f}x (+{added[name]:.1f} ms)" for name, ratio in slower.items())
        same = max(flat) > max(deep)
        if all_reduce == TREE:
            why = (
                "with their algorithm: a tree across all GPUs pays a copy at each of its steps, one inside a node fewer"
            )
            if not same:
                why = "the steps inside nodes pay copies, too, and hide them no better"
        elif same:
            why = "each chunk pays the copies of its steps, and flat systems have more chunks"
        else:
            why = "direct has 2 steps on a flat system, and a hierarchical one more"
        yield Row(
            "memory copies",
            f"100 us against 0.01 us ({NAMES[all_reduce]})",
            "flat systems are more sensitive",
            text,
            same,
            why,
        )


def _differ(slower: Mapping[str, float]) -> bool:
    """Returns whether flat and hierarchical systems, which slow down so many times, differ by 5% of the slower ones."""
    flat, deep = ([ratio for name, ratio in slower.items() if (name in _FLAT) == of] for of in (True, False))
    return bool(flat and deep) and abs(max(flat) - max(deep)) > 0.05 * max(flat + deep)


def _transport(of: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Row]:
    times: dict[str, dict[float, tuple[float, int]]] = {}
    for row in of["alone"]:
        if row["window_bytes"] == 5e5 and row["what"] == "many_to_one":
            times.setdefault(row["system"], {})[row["buffer_bytes"]] = (row["time_ns"], row["lost_segments"])
    text = ", ".join(
        f"{name} {t[64e6][0] / t[1e9][0]:.2f}x and {t[16e6][0] / t[1e9][0]:.2f}x ({t[64e6][1]:,} and {t[16e6][1]:,} "
        "lost)"
        for name, t in times.items()
    )
    slower = {name: max(t[16e6][0], t[64e6][0]) / t[1e9][0] for name, t in times.items()}
    yield Row(
        "switch buffer",
        "64 and 16 MB against 1 GB, 1 MiB from every GPU to one",
        _DIFFER,
        text,
        _differ(slower),
        "in a flat system all connections share one buffer; in a hierarchical one a switch has fewer ports"
        if _differ(slower)
        else "the port of the one that receives is the narrowest place in either, and its switch loses as much",
    )
    alone = {
        (r["system"], r["window_bytes"]): r["time_ns"]
        for r in of["alone"]
        if r["what"] == "all_reduce" and r["buffer_bytes"] == 1e9
    }
    windows = {name: alone[name, 1e5] / alone[name, 5e5] for name, window in alone if window == 5e5}
    text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in windows.items())
    yield Row(
        "TCP window",
        "0.1 MB against 0.5 MB, a lone all-reduce of 8 MiB (double binary tree)",
        _QUESTION,
        text,
        None,
        _why_window(windows.values(), "a window below bandwidth times round trip bounds the rate"),
    )
    for all_reduce in (TREE, DIRECT):
        own = [row for row in of["iterations"] if row["all_reduce"] == all_reduce]
        wide = _by_system([row for row in own if row["buffer_bytes"] != 64e6], "window_bytes")
        text = ", ".join(f"{name} {t[1e5] / t[5e5]:.3f}x (no TCP {t[None] / t[5e5]:.3f}x)" for name, t in wide.items())
        bound = "a chunk between two neighbours of a tree is as long as a window or longer"
        if all_reduce == DIRECT:
            bound = "what a connection has to send at once is longer than a window"
        why = _why_window([t[1e5] / t[5e5] for t in wide.values()], bound)
        yield Row(
            "TCP window", f"0.1 MB against 0.5 MB, two iterations ({NAMES[all_reduce]})", _QUESTION, text, None, why
        )
        small = {row["system"]: row for row in own if row["buffer_bytes"] == 64e6}
        slower = {name: row["time_ns"] / wide[name][5e5] for name, row in small.items()}
        text = ", ".join(
            f"{name} {ratio:.3f}x ({small[name]['lost_segments']:,} lost)" for name, ratio in slower.items()
        )
        lost = any(row["lost_segments"] for row in small.values())
        why = "all ports are served evenly, and no queue is as long"
        if lost and _differ(slower):
            why = "what is lost waits for a timeout; a switch of all GPUs holds the queues of all ports in one buffer"
        elif lost:
            why = "what is lost waits for a timeout, in systems of both kinds about as long"
        yield Row(
            "switch buffer",
            f"64 MB against 1 GB, two iterations ({NAMES[all_reduce]})",
            _DIFFER,
            text,
            _differ(slower),
            why,
        )


def _why_window(slower: Iterable[float], bound: str) -> str:
    """Returns what makes something so many times slower with a smaller window, in words, or that nothing does."""
    return bound if max(slower) > 1.01 else "what a connection has to send at once is less than a window"


def _gradients(times: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    narrow, wide = ({row["system"]: row["time_ns"] for row in times if row["bytes"] == size} for size in (2, 4))
    ratio = _spread(wide)
    text = ", ".join(f"{name} {time_text(time)} ({time / narrow[name]:.2f}x)" for name, time in wide.items())
    yield Row(
        "systems",
        "two iterations, slowest over fastest system, MLPs' gradients of 32 bits (direct)",
        "3x",
        f"{ratio:.2f}x: {text}",
        abs(ratio - 3) <= 0.75,
        f"{_spread(narrow):.2f}x with 16 bits; in brackets the time over that with 16 bits. The source does not say "
        "how wide they are",
    )


_OBSERVERS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "systems": _systems,
    "flops": _flops,
    "lone_all_reduce": _lone_all_reduce,
    "copies": _copies,
    "transport": _transport,
    "chunk_counts": _chunk_counts,
    "in_flight": _in_flight,
    "gradients": _gradients,
}


def report(found: Mapping[str, Any], about: Mapping[str, Any], pictures: Sequence[Picture]) -> Report:
    """The report of `study.run`; `about` is of `report.provenance`, and pictures of `draw.pictures`."""
    sections = []
    if "systems" in found:
        head = ["system", "all-reduce", "two iterations", "computation", "exposed", "raw communication"]
        keys = ("time_ns", "compute_ns", "exposed_communication_ns", "raw_communication_ns")
        lines = [[row["system"], row["all_reduce"], *(time_text(row[key]) for key in keys)] for row in found["systems"]]
        notes = (f"{found['ranks']} ranks, {found['chunks']} chunks, LIFO.",)
        sections.append(Section("Systems", notes, [Table("", [head, *lines], (0, 1))]))
    sections.append(Section("Pictures", (), (), pictures))
    return Report(
        "hoti2020",
        "Simulated systems of HOTI 2020",
        "S. Rashidi et al., Scalable Distributed Training of Recommendation Models: An ASTRA-SIM + NS3 case-study with "
        "TCP/IP transport (HOTI 2020)",
        about,
        rows(found),
        ASSUMPTIONS,
        sections,
    )
