"""Bytes that a compiled training step sends, collective by collective, beside the least that its batch needed."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from recjax.embedding.exchange.kinds import exchanges_of
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.routed import Routing
from recjax.planning.compiled_collectives import collectives, members

# What a ring sends, in units of (N - 1) / N of the result.
_RING = {"all-reduce": lambda size: 2, "reduce-scatter": lambda size: size}


def wire_bytes(
    hlo: str, bound: BoundPlan, routing: Routing, item_bytes: int, hosts: int | None = None, samples: int = 0
) -> list[dict[str, Any]]:
    """The collectives of a compiled step and the bytes that leave a device for another one, the mean over devices.

    Whether they cross hosts is read from the collectives' groups of devices.

    Args:
      hlo: text of the compiled step.
      bound: the bound plan.
      routing: of one batch, which tells what of an exchange is useful; counts of the first devices alone will do.
      item_bytes: size of a table's element, if that is not bfloat16.
      hosts: in which all devices stand; None: the bound plan's, which are those of one replica group.
      samples: b, of one device; exchanges of pooled vectors need it.

    Returns:
      For each phase, kind and number of devices of collectives, and "between" (what they connect: "devices" of one
      host, "hosts", one device of each, or "both"): "phase", "kind", "group_size", "between", "count",
      "padded_bytes" as compiled, "useful_bytes" (equal where nothing is padded), and "across_padded_bytes" and
      "across_useful_bytes", those that leave the host. Reductions count what a ring sends that goes round host by
      host: an all-reduce 2 (N - 1) / N of its result, a reduce-scatter N - 1 times its result, 1/N of what it reduces.
    """
    useful = useful_bytes(bound, routing, item_bytes, samples)
    hosts = hosts or bound.hosts
    per_host = bound.all_devices // hosts
    found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for collective in collectives(hlo):
        group = members(collective.groups, bound.all_devices)[0]  # all are alike
        size, spanned = len(group), 1 if hosts == 1 else len({n // per_host for n in group})
        between = "devices" if spanned == 1 else "hosts" if spanned == size else "both"
        away = (size - 1) / size * _RING.get(collective.kind, lambda size: 1)(size)
        phase = collective.phases[0] if collective.phases else collective.phase  # of a joined one that of most bytes
        key = phase, collective.kind, between, size
        new = {"phase": key[0], "kind": key[1], "group_size": size, "between": between, "count": 0}
        line = found.setdefault(key, new | {"padded_bytes": 0.0, "across_padded_bytes": 0.0})
        line["count"] += 1
        line["padded_bytes"] += collective.result_bytes * away
        if collective.kind in _RING:
            crossing = spanned / size if spanned > 1 else 0.0  # of the ring's links
        else:
            crossing = (size - size // spanned) / max(1, size - 1)  # of the other devices
        line["across_padded_bytes"] += collective.result_bytes * away * crossing
    for (phase, kind, between, _), line in found.items():
        least = useful.get((phase, kind, between))
        if least is None:
            line["useful_bytes"], line["across_useful_bytes"] = line["padded_bytes"], line["across_padded_bytes"]
        else:
            line["useful_bytes"], line["across_useful_bytes"] = least, least if line["between"] == "hosts" else 0.0
    return list(found.values())


def named(line: dict[str, Any]) -> str:
    """Name of a line of `wire_bytes`."""
    across = " across hosts" if line["between"] == "hosts" else ""
    return f"{line['phase'] or 'elsewhere'} ({line['kind']}{across})"


def useful_bytes(
    bound: BoundPlan, routing: Routing, item_bytes: int, samples: int
) -> dict[tuple[str, str, str], float]:
    """Useful bytes of the exchanges that leave a device, by (phase, kind, between): the mean over devices."""
    total: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for exchange in exchanges_of(bound):
        counts: Any = routing.groups.get(exchange.name) or routing.pooled.get(exchange.name)
        for event in exchange.events(collections.defaultdict(int), samples, item_bytes):
            if event.places is None or event.piece == 0:  # all pieces together
                whole = dataclasses.replace(event, places=None)
                sent_NxN = exchange.sent_bytes(whole, counts, samples, item_bytes)
                if sent_NxN is not None:
                    total[event.phase, event.kind, event.between(bound.devices // bound.hosts)] += _leaving(sent_NxN)
    return total


def _leaving(sent_NxN: np.ndarray) -> float:
    """Mean over devices, as far as they were counted, of the bytes that each sends to others or is sent by them."""
    return float(sent_NxN.sum() - np.trace(sent_NxN)) / min(sent_NxN.shape)
