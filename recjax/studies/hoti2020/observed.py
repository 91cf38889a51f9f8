"""What came of the experiments in `study`: which observations hold, and which do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recjax.simulate.report import table
from recjax.studies.hoti2020.study import DIRECT, TREE
from recjax.utils.units import time_text

_NAMES = {TREE: "double binary tree", DIRECT: "direct"}
_MIB = 2.0**20
_LARGEST_LAYER = 8 * _MIB  # 2048 x 2048 weights of 16 bits
_Add = Callable[[str, str, bool, str], None]


def observations(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What the study states, and what its questions come to here.

    Returns:
      For each: the statement; its source, "stated" by the study or "question" (which it studies, without a number that
      we know); what was found; whether that holds: a stated number if ours is within a quarter of it.
    """
    made: list[dict[str, Any]] = []

    def add(source: str, statement: str, holds: bool, text: str) -> None:
        made.append({"source": source, "statement": statement, "holds": bool(holds), "found": text})

    for name, observe in _OBSERVERS.items():
        if name in found:
            observe(found[name], add)
    return made


def _systems(found: list[dict[str, Any]], add: _Add) -> None:
    for all_reduce in (TREE, DIRECT):
        times = {row["system"]: row["time_ns"] for row in found if row["all_reduce"] == all_reduce}
        ratio = max(times.values()) / min(times.values())
        text = f"{ratio:.2f}x: " + ", ".join(f"{name} {time_text(time)}" for name, time in times.items())
        add("stated", f"3x difference in total iteration time between systems ({_NAMES[all_reduce]} all-reduce)",
            abs(ratio - 3) <= 0.75, text)  # fmt: skip


def _lone_all_reduce(found: list[dict[str, Any]], add: _Add) -> None:
    for all_reduce in (TREE, DIRECT):
        for count in sorted({row["chunks"] for row in found}):
            rows = [r for r in found if (r["all_reduce"], r["chunks"]) == (all_reduce, count)]
            most = max((r for r in rows if r["bytes"] <= _LARGEST_LAYER), key=lambda row: row["ratio"])
            beyond = max(rows, key=lambda row: row["ratio"])
            what = f"{_NAMES[all_reduce]}, {count} chunk(s)"
            text = f"{most['ratio']:.1f}x at {most['bytes'] / _MIB:g} MiB, up to the model's largest layer; beyond it "
            text += f"{beyond['ratio']:.1f}x at {beyond['bytes'] / _MIB:g} MiB"
            add("stated", f"a lone all-reduce up to 50x off an analytical model ({what})",
                abs(most["ratio"] - 50) <= 12.5, text)  # fmt: skip


def _scheduling(found: list[dict[str, Any]], add: _Add) -> None:
    orders: dict[tuple[str, int], dict[str, float]] = {}
    for row in found:
        orders.setdefault((row["system"], row["in_flight"]), {})[row["scheduling"]] = row["time_ns"]
    text = ", ".join(f"{s} ({n} in flight) {t['fifo'] / t['lifo']:.3f}" for (s, n), t in orders.items())
    add("question", "LIFO is as fast as FIFO or faster in every system",
        all(t["lifo"] <= t["fifo"] for t in orders.values()),
        f"FIFO's time over LIFO's: {text}")  # fmt: skip


def _chunk_counts(found: list[dict[str, Any]], add: _Add) -> None:
    counts = _by_system(found, "chunks")
    text = "; ".join(f"{s} {t[1] / min(t.values()):.2f}x at {min(t, key=lambda n: t[n])}" for s, t in counts.items())
    add("question", "chunks shorten the iterations in every system",
        all(min(t.values()) < t[1] for t in counts.values()),
        f"one chunk against the best number of chunks: {text}")  # fmt: skip


def _copies(found: list[dict[str, Any]], add: _Add) -> None:
    copies = _by_system(found, "copy_us")
    text = ", ".join(f"{s} {t[1] / t[0.01]:.2f}x and {t[100] / t[0.01]:.2f}x" for s, t in copies.items())
    add("question", "a memory-copy latency of 1 us costs less than 5%, one of 100 us more",
        all(t[1] / t[0.01] < 1.05 < t[100] / t[0.01] for t in copies.values()),
        f"1 us and 100 us against 0.01 us: {text}")  # fmt: skip
    apart = {copy: [times[copy] for times in copies.values()] for copy in next(iter(copies.values()))}
    ratios = {copy: max(times) / min(times) for copy, times in apart.items()}
    text = ", ".join(f"{ratio:.2f}x at {copy:g} us" for copy, ratio in ratios.items())
    add("question", "the slower memory copies are, the less systems differ", ratios[100] < ratios[0.01],
        f"slowest over fastest system: {text}")  # fmt: skip


def _transport(found: dict[str, list[dict[str, Any]]], add: _Add) -> None:
    lost = [row for row in found["alone"] if row["lost_segments"]]
    text = "; ".join(
        f"{r['system']} {r['what']}, window {r['window_bytes'] / 1e6:g} MB, buffer {r['buffer_bytes'] / 1e6:g} MB: "
        f"{r['lost_segments']:,} segments" for r in lost
    )  # fmt: skip
    add("question", "a switch buffer of 64 MB loses segments where 1 GB does not",
        {64e6} <= {row["buffer_bytes"] for row in lost} <= {16e6, 64e6}, f"lost: {text or 'none'}")  # fmt: skip

    alone = {(r["system"], r["window_bytes"]): r["time_ns"] for r in found["alone"]
             if r["what"] == "all_reduce" and r["buffer_bytes"] == 1e9}  # fmt: skip
    slower = {name: alone[name, 1e5] / alone[name, 5e5] for name, window in alone if window == 5e5}
    add("question", "a window of 0.1 MB instead of 0.5 MB slows down a lone all-reduce (8 MiB, double binary tree)",
        all(ratio > 1 for ratio in slower.values()),
        ", ".join(f"{name} {ratio:.2f}x" for name, ratio in slower.items()))  # fmt: skip

    windows = _by_system(found["iterations"], "window_bytes")
    text = ", ".join(f"{s} " + ", ".join(f"{t[w] / t[5e5]:.2f}x" for w in (1e5, 2e4, 4e3)) for s, t in windows.items())
    add("question", "a window of 0.1 MB instead of 0.5 MB lengthens the iterations (direct all-reduce)",
        any(t[1e5] > 1.01 * t[5e5] for t in windows.values()),
        f"0.1 MB, 20 kB and 4 kB against 0.5 MB: {text}")  # fmt: skip


_OBSERVERS: dict[str, Callable[[Any, _Add], None]] = {
    "systems": _systems,
    "lone_all_reduce": _lone_all_reduce,
    "scheduling": _scheduling,
    "chunk_counts": _chunk_counts,
    "copies": _copies,
    "transport": _transport,
}


def _by_system(rows: list[dict[str, Any]], key: str) -> dict[str, dict[Any, float]]:
    found: dict[str, dict[Any, float]] = {}
    for row in rows:
        found.setdefault(row["system"], {})[row[key]] = row["time_ns"]
    return found


def to_text(found: dict[str, Any]) -> str:
    """The systems and the observations for people."""
    rows = [["system", "all-reduce", "two iterations", "computation", "exposed", "raw communication"]]
    for row in found.get("systems", []):
        times = [time_text(row[key]) for key in
                 ("time_ns", "compute_ns", "exposed_communication_ns", "raw_communication_ns")]  # fmt: skip
        rows.append([row["system"], row["all_reduce"], *times])
    lines = [f"{found['ranks']} ranks, {found['chunks']} chunks, LIFO, two iterations", ""]
    if len(rows) > 1:
        lines += [table(rows), ""]
    for o in found["observations"]:
        lines.append(f"[{'holds' if o['holds'] else 'does not hold'}] ({o['source']}) {o['statement']}: {o['found']}")
    return "\n".join(lines)
