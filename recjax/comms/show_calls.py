"""Single calls and ranks of a trace for people: how uneven, who came last, who waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recjax.utils.units import size_text


def lines(one: Mapping[str, Any], most: int | None = None) -> list[list[str]]:
    """A table of calls, with its head.

    Args:
      one: of `statistics.figures`.
      most: rows at most, the steps' first ones; None for all.
    """
    rows = [["step", "phase", "collective", "ranks", "sent", "by rank", "received", "by rank", "last rank", "late us",
             "waiting us", "transfer us"]]  # fmt: skip
    for call in one["calls"][:most]:
        row = [str(call["step"]), call["phase"] or "-", call["kind"], str(call["ranks"])]
        for way in ("sent", "received"):
            row += [f"{call[way]['imbalance']:.3f}", str(call[way]["most_rank"])]
        t = call["time"]
        row += [str(t["last_rank"]), *(_us(t[k]) for k in ("late_us", "waiting_us", "transfer_us"))] if t else ["-"] * 4
        rows.append(row)
    if most is not None and len(one["calls"]) > most:
        rows.append(["...", f"{len(one['calls']) - most:,} more", *[""] * (len(rows[0]) - 2)])
    return rows


def ranks(one: Mapping[str, Any]) -> list[list[str]]:
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
    return [
        f"a rank's collectives take {waiting + transfer:.3f} ms: {waiting:.3f} ms it waits for the one that comes "
        f"last, {transfer:.3f} ms are transfer",
        f"last to come: rank {worst['rank']} in {worst['last']} of {worst['calls']} calls ({phases or 'none'}); the "
        f"others waited {worst['kept_waiting_ms']:.3f} ms a step for it",
    ]


def _us(value: float) -> str:
    return f"{value:,.1f}"
