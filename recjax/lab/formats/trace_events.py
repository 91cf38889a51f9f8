"""Events of the trace event format, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def span(
    name: str,
    kind: str,
    place: tuple[int, int],
    start_us: float,
    took_us: float,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A span of time.

    Args:
      name: of it.
      kind: its category.
      place: its process and its thread.
      start_us: when it begins.
      took_us: how long it is.
      about: what else is known of it, if anything.
    """
    process, thread = place
    when = {"ph": "X", "pid": process, "tid": thread, "ts": start_us, "dur": took_us}
    return {"name": name, "cat": kind, **when, **({"args": dict(about)} if about else {})}


def names(process: int, name: str, threads: Mapping[int, str]) -> list[dict[str, Any]]:
    """The events that name a process and its threads."""
    found: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}]
    for thread, called in threads.items():
        found.append({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": called}})
    return found
