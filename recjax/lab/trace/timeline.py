"""The picture of one step: what every rank did when, and where it waited for another one."""

from __future__ import annotations

from recjax.errors import ConfigError, DataError
from recjax.lab.formats.calls import waiting_of
from recjax.lab.formats.trace import COMPUTE, Event, Trace
from recjax.utils import plots

MOST_RANKS = 32  # that a picture shows
_WAITING = 0.35  # how much of its colour waiting keeps


def spans_of(trace: Trace) -> dict[int, dict[int, list[Event]]]:
    """Step -> rank -> its events that have times; only steps that all ranks have."""
    found: dict[int, dict[int, list[Event]]] = {}
    for rank, events in trace.ranks.items():
        for event in events:
            if event.start_ns is not None and event.duration_ns is not None:
                found.setdefault(event.step, {}).setdefault(rank, []).append(event)
    return {step: of for step, of in sorted(found.items()) if len(of) == len(trace.ranks)}


def middle_step(trace: Trace) -> int:
    """The step whose length is the median of all.

    Raises:
      DataError: no step has times on all ranks.
    """
    lengths = {step: max(_length_ns(events) for events in of.values()) for step, of in spans_of(trace).items()}
    if not lengths:
        raise DataError("no step of the trace has times on all of its ranks, so there is no timeline of it.")
    return sorted(lengths, key=lambda step: (lengths[step], step))[(len(lengths) - 1) // 2]


def _length_ns(events: list[Event]) -> int:
    return max(e.end_ns or 0 for e in events) - min(e.start_ns or 0 for e in events)


@plots.literal()
def timeline(trace: Trace, label: str, step: int | None = None) -> bytes:
    """A PNG of a step.

    Args:
      trace: with times.
      label: what to call it.
      step: which; None for the one of median length.

    Raises:
      ConfigError: no such step.
      DataError: as `middle_step`.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    step = middle_step(trace) if step is None else step
    by_rank = spans_of(trace).get(step)
    if by_rank is None:
        known = ", ".join(map(str, list(spans_of(trace))[:12])) or "none"
        raise ConfigError(f"--step {step}: the trace has no times of it on all ranks. There are: {known}.")
    waits = waiting_of(trace)
    shown = sorted(by_rank)[:MOST_RANKS]
    zero = min(e.start_ns or 0 for rank in shown for e in by_rank[rank])
    phases = list(dict.fromkeys(e.phase or e.kind for r in shown for e in by_rank[r] if e.kind != COMPUTE))
    colors = {phase: plots.PALETTE[1:][i % (len(plots.PALETTE) - 1)] for i, phase in enumerate(phases)}
    figure = plots.figure(12, 1.8 + 0.42 * len(shown))
    panel = figure.subplots()
    plots.plain(panel, "x")
    for row, rank in enumerate(shown):
        for event in by_rank[rank]:
            left, width = ((event.start_ns or 0) - zero) / 1e6, (event.duration_ns or 0) / 1e6
            if event.kind == COMPUTE:
                panel.barh(row + 0.2, width, 0.32, left=left, color=plots.BLUE, linewidth=0)
                continue
            color, waited = colors[event.phase or event.kind], waits.get((rank, event.id), 0) / 1e6
            panel.barh(row - 0.2, waited, 0.36, left=left, color=to_rgba(color, _WAITING), linewidth=0)
            panel.barh(row - 0.2, width - waited, 0.36, left=left + waited, color=color, linewidth=0)
    panel.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown], fontsize=8)
    panel.set(ylim=(len(shown) - 0.4, -0.6), xlabel="ms")
    more = f", the first {len(shown)} of {len(by_rank)} ranks" if len(shown) < len(by_rank) else ""
    panel.set_title(f"{label}: step {step}{more}; pale: waiting for the rank that came last", fontsize=10)
    handles = [Patch(color=plots.BLUE, label="computing"), *(Patch(color=c, label=p) for p, c in colors.items())]
    panel.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    return plots.png(figure)
