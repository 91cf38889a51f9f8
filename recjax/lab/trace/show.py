"""The figures of communication traces for people: as text, and as one page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recjax.lab.trace.draw import picture
from recjax.lab.trace.statistics import labels
from recjax.utils import html
from recjax.utils.text import aligned
from recjax.utils.units import size_text

MOST_CALLS = 500  # on a page


def to_text(found: Sequence[Mapping[str, Any]], calls: bool = False) -> str:
    """Every trace's table; of several first the one that compares them; with `calls` every call and rank, too."""
    parts = ["\n".join(aligned(_compared(found)))] if len(found) > 1 else []
    for name, one in zip(labels(found), found, strict=True):
        parts.append("\n".join([_headline(name, one), "", *aligned(_lines(one), left=(0, 1)), "", *_below(one)]))
        if calls:
            tables = (aligned(call_lines(one), left=(1, 2)), aligned(rank_lines(one), left=(4,)))
            parts += ["\n".join(lines) for lines in tables]
    return "\n\n".join(parts)


def _headline(name: str, one: Mapping[str, Any]) -> str:
    batch = f", batch {one['batch_size']:,}" if one["batch_size"] else ""
    ranks = f"{one['world']} ranks"
    if one["missing"]:
        lacking = ", ".join(map(str, one["missing"][:8])) + (", ..." if len(one["missing"]) > 8 else "")
        ranks = f"{one['ranks']} of {one['world']} ranks (there is no file of rank {lacking})"
    if one.get("counted_ranks"):
        ranks += f" (splits counted of {one['counted_ranks']}, the others taken to be alike)"
    return (
        f"{name}: {one['source'] or 'trace'}, {ranks}, {one['steps']} step(s){batch}; bytes and counts "
        "are those of a rank and step"
    )


def _lines(one: Mapping[str, Any]) -> list[list[str]]:
    rows = ["phase, collective, count, share, bytes, share, useful, message, imbalance, sent, received".split(", ")]
    if one["time"]:
        rows[0] += ["ms", "p50 us", "p95 us", "bus GB/s"]
    for line in one["collectives"]:
        row = [
            line["phase"] or "-",
            line["kind"],
            f"{line['count']:.4g}",
            f"{line['count_share']:.0%}",
            size_text(line["padded_bytes"]),
            f"{line['bytes_share']:.1%}",
            size_text(line["useful_bytes"]),
            size_text(line["smallest"])
            + (f" - {size_text(line['largest'])}" if line["largest"] != line["smallest"] else ""),
            f"{line['imbalance']:.2f}",
            *(f"{line['call_imbalance'][way]:.2f}" for way in ("sent", "received")),
        ]
        if one["time"]:
            t = line["time"] or {}
            row += [f"{t[key]:.{digits}f}" if t else "-" for key, digits in (("ms", 3), ("p50_us", 0), ("p95_us", 0))]
            row.append(f"{t['bus_bytes_per_s'] / 1e9:.3f}" if t.get("bus_bytes_per_s") is not None else "-")
        rows.append(row)
    return rows


def _below(one: Mapping[str, Any]) -> list[str]:
    ratio = one["padded_bytes"] / one["useful_bytes"] if one["useful_bytes"] else 1.0
    lines = [
        f"together: {one['count']:.4g} collectives, {size_text(one['padded_bytes'])}, of which "
        f"{size_text(one['useful_bytes'])} are useful (padded/useful {ratio:.3f})",
        f"a rank sends or receives {size_text(min(one['moved']))} to {size_text(max(one['moved']))} useful bytes, "
        f"imbalance (max/mean) {one['imbalance']:.3f}",
        "imbalance: of a phase's bytes; sent, received: of the most uneven call in it",
    ]
    if one["time"] is None:
        return [*lines, "no times were measured"]
    t = one["time"]
    return [
        *lines,
        f"a step takes {t['step_ms']:.3f} ms on a rank: communication {t['communication_ms']:.3f} ms "
        f"({t['share']:.1%}), of which {t['exposed_ms']:.3f} ms ({t['exposed_share']:.1%} of the step) are exposed, "
        f"nothing being computed; computing {t['computing_ms']:.3f} ms",
        *stragglers(one),
    ]


def call_lines(one: Mapping[str, Any], most: int | None = None) -> list[list[str]]:
    """A table of calls, with its head.

    Args:
      one: of `statistics.figures`.
      most: rows at most, the steps' first ones; None for all.
    """
    head = (
        "step, phase, collective, ranks, sent, by rank, received, by rank, last rank, late us, waiting us, transfer us"
    )
    rows = [head.split(", ")]
    for call in one["calls"][:most]:
        row = [str(call["step"]), call["phase"] or "-", call["kind"], str(call["ranks"])]
        for way in ("sent", "received"):
            uneven = call[way]["imbalance"]
            row += [f"{uneven:.3f}", str(call[way]["most_rank"]) if uneven > 1 else "-"]
        t = call["time"]
        last = "-" if not t or t["last_rank"] is None else str(t["last_rank"])
        row += [last, *(_us(t[k] if t else None) for k in ("late_us", "waiting_us", "transfer_us"))]
        rows.append(row)
    if most is not None and len(one["calls"]) > most:
        rows.append(["...", f"{len(one['calls']) - most:,} more", *[""] * (len(rows[0]) - 2)])
    return rows


def rank_lines(one: Mapping[str, Any]) -> list[list[str]]:
    """A table of ranks, with its head."""
    rows = [["rank", "sent", "received", "last in", "mostly in", "waiting ms", "transfer ms", "kept others ms"]]
    for of in one["by_rank"]:
        row = [str(of["rank"]), size_text(of["sent_bytes"]), size_text(of["received_bytes"])]
        if of["calls"]:
            row += [f"{of['last']} of {of['calls']}", next(iter(of["last_phases"]), "-")]
            row += [f"{of[key]:.3f}" for key in ("waiting_ms", "transfer_ms", "kept_waiting_ms")]
        rows.append(row + ["-"] * (len(rows[0]) - len(row)))
    return rows


def stragglers(one: Mapping[str, Any]) -> Sequence[str]:
    """Ranks that came last most, in which phases, and how the time of collectives splits; nothing without times."""
    timed = [of for of in one["by_rank"] if of["calls"]]
    if not timed or len(timed) < 2:
        return []
    waiting, transfer = (sum(of[key] for of in timed) / len(timed) for key in ("waiting_ms", "transfer_ms"))
    worst = max(timed, key=lambda of: of["kept_waiting_ms"])
    phases = ", ".join(f"{phase} {count}" for phase, count in list(worst["last_phases"].items())[:4])
    whole = (
        f"a rank's collectives take {waiting + transfer:.3f} ms: {waiting:.3f} ms it waits for the one that comes "
        f"last, {transfer:.3f} ms are transfer"
    )
    if not worst["last"]:
        return [whole, "last to come: none, all ranks came to every call at once"]
    return [
        whole,
        f"last to come: rank {worst['rank']} in {worst['last']} of {worst['calls']} calls ({phases or 'none'}); the "
        f"others waited {worst['kept_waiting_ms']:.3f} ms a step for it",
    ]


def _compared(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = (
        "trace, collectives, bytes, useful, all_to_all, all_reduce, gather+scatter, imbalance, step ms, communication, "
        "exposed"
    )
    rows = [head.split(", ")]
    for name, one in zip(labels(found), found, strict=True):
        of = {
            k: sum(c["padded_bytes"] for c in one["collectives"] if c["kind"] in kinds)
            for k, kinds in _GATHERED.items()
        }
        t = one["time"]
        times = [f"{t['step_ms']:.2f}", f"{t['share']:.1%}", f"{t['exposed_share']:.1%}"] if t else ["-"] * 3
        sizes = [size_text(one["padded_bytes"]), size_text(one["useful_bytes"]), *(size_text(of[k]) for k in _GATHERED)]
        rows.append([name, f"{one['count']:.4g}", *sizes, f"{one['imbalance']:.3f}", *times])
    return rows


def replay_text(result: Mapping[str, Any]) -> str:
    """Renders the result of `recjax.lab.replay.replay_report.figures` as a table."""
    head = "phase, collective, ranks, count, message, useful, p50 us, p95 us, last us, bus GB/s, original us, last us"
    rows = [head.split(", ")]
    for line in result["collectives"]:
        times = [line[key] for key in ("p50_us", "p95_us", "last_us")]
        rate = line["bus_bytes_per_s"]
        rows.append(
            [
                line["phase"] or "-",
                line["kind"],
                str(line["group_size"]),
                str(line["count"]),
                size_text(line["padded_bytes"]),
                size_text(line["useful_bytes"]),
                *map(_us, times),
                "-" if rate is None else f"{rate / 1e9:.3f}",
                *(_us(line[key]) for key in ("original_us", "original_last_us")),
            ]
        )
    sums, wall = result["sum_us"], result["wall_us"]
    lines = [
        f"{result['label']}: {result['ranks']} ranks on {result['device']}, {result['repeats']} repeats, "
        f"{result['splits']} splits, {'with' if result['gaps'] else 'without'} computing between",
        *_not_replayed(result),
        "",
        *aligned(rows, left=(0, 1)),
        "",
        "last: of the rank that came last and so waited for none",
        f"sum of the medians: {_us(sums['replayed'])} us replayed, {_us(sums['original'])} us in the trace; of the "
        f"last ranks {_us(sums['replayed_last'])} and {_us(sums['original_last'])} us",
        f"a whole replay: {_us(wall['p50'])} us (p50), {_us(wall['p95'])} us (p95) on the host's clock",
    ]
    return "\n".join(lines)


def _not_replayed(result: Mapping[str, Any]) -> list[str]:
    lines = []
    if result["missing"]:
        ranks = ", ".join(map(str, result["missing"]))
        lines.append(f"the trace has no file of rank {ranks}, which is taken to do what the other ranks' files say")
    if result["left_out"]:
        what = ", ".join(f"{one['count']} {one['kind']} ({one['phase'] or 'no phase'})" for one in result["left_out"])
        lines.append(f"left out by --shrink, since one of their ranks is left: {what}")
    return lines


def sweep_text(result: Mapping[str, Any]) -> str:
    """Renders the result of `recjax.lab.replay.microbenchmark.sweep` as tables."""
    parts = [f"{result['devices']} devices ({result['device']}), {result['processes']} process(es)"]
    for kind, found in result["collectives"].items():
        rows = [[kind, "p50 us", "p95 us", "last us", "algorithm GB/s", "bus GB/s"]]
        for p in found["points"]:
            rates = [f"{p[key] / 1e9:.3f}" for key in ("algorithm_bytes_per_s", "bus_bytes_per_s")]
            rows.append([size_text(p["bytes"]), *(_us(p[key]) for key in ("p50_us", "p95_us", "last_us")), *rates])
        text = "\n".join(aligned(rows))
        if found["alpha_us"] is not None:
            rate = "no end" if found["bytes_per_s"] is None else f"{found['bytes_per_s'] / 1e9:.3f} GB/s"
            text += f"\nfit: {found['alpha_us']:.1f} us + bytes / {rate}, off by {found['fit_error']:.0%} on average"
        parts.append(text)
    if result["left_out_bytes"]:
        parts.append(f"left out, for memory: {', '.join(map(size_text, result['left_out_bytes']))}")
    return "\n\n".join(parts)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


_GATHERED = {"all_to_all": ("all_to_all",), "all_reduce": ("all_reduce",), "rest": ("all_gather", "reduce_scatter")}


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """One page of HTML with everything in it: tables and pictures; it loads nothing."""
    parts = []
    if len(found) > 1:
        parts += [html.heading("Compared"), _table(_compared(found)), _picture(found)]
    for name, one in zip(labels(found), found, strict=True):
        parts += [html.heading(name), html.paragraph(_headline(name, one)), _table(_lines(one))]
        parts += [*map(html.paragraph, _below(one)), _picture([one])]
        for title, rows in (("Ranks", rank_lines(one)), ("Calls", call_lines(one, MOST_CALLS))):
            parts += [html.heading(title, 3), _table(rows)]
    return html.page("Communication", parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return html.table("", rows[0], rows[1:])


def _picture(found: Sequence[Mapping[str, Any]]) -> str:
    return html.picture(picture(found), "message sizes, bytes by phase, balance, time")
