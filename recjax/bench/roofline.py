"""Work of a step, counted and not timed: floating-point operations, looked-up bytes, bytes on the wire."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np

from recjax.comms.compiled import collectives, members
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.routed import Routing
from recjax.embedding.traffic import EXCHANGES, POOLED_EXCHANGES, pooled_sent_bytes, sent_bytes
from recjax.planning.work import DENSE_CALLS

# What a ring sends, in units of (N - 1) / N of the result.
_RING = {"all-reduce": lambda size: 2, "reduce-scatter": lambda size: size}


def matmul_flops(jaxpr: Any) -> int:
    """Operations of all matrix products in a jaxpr, on one device where it is mapped over a mesh: 2 m n k each.

    Dense layers of the optional kernels count as their products do; the kernels' interactions do not count.

    A loop's body counts once for each turn of a scan, and once for a while loop, whose turns are not known.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        if eqn.primitive.name == "ffi_call" and eqn.params["target_name"] in DENSE_CALLS:
            batch, kernel = DENSE_CALLS[eqn.params["target_name"]]
            shapes = [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
            total += 2 * shapes[batch][0] * math.prod(shapes[kernel])
        turns = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += turns * matmul_flops(inner)
    return total


def lookup_bytes(bound: BoundPlan, routing: Routing, samples: int) -> int:
    """Bytes that a pooled lookup without dedup moves: a row for each id, a result for each bag.

    A backward pass counts twice that. Here each device reads a distinct row once, so the true traffic is less.

    Args:
      bound: the bound plan.
      routing: of one batch, as the step takes it.
      samples: B.
    """
    total = 0
    for pool in bound.pools:
        groups = [bound.group(fetched.group) for fetched in pool.rows]
        nothing = sum(routing.groups[group.name].fetched_rows(group) for group in groups)
        item_bytes = 2 if groups[0].dtype == "bfloat16" else 4
        for lookup in pool.lookups:
            inverse = np.asarray(routing.features[lookup.name].inverse)
            total += (int(np.count_nonzero(inverse < nothing)) * item_bytes + samples * 4) * pool.width
    for exchange in bound.pooled:
        of_exchange = routing.pooled[exchange.name]
        b = -(-samples // bound.all_devices)
        lists = np.asarray(of_exchange.ids_NxOxC)
        for owner, of_groups in enumerate(exchange.of_owner):
            row = 0
            for group, streams in zip(exchange.groups, of_groups, strict=True):
                item_bytes = 2 if group.dtype == "bfloat16" else 4
                for stream in streams:
                    ids = samples * (stream.feature.bag or 0)
                    if stream.counted:
                        ids = int(lists[:, owner, row * b : (row + 1) * b].sum())
                        row += 1
                    total += (ids * item_bytes + samples * 4) * group.dim
    return total


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
    useful = _useful(bound, routing, item_bytes, samples)
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


def _useful(bound: BoundPlan, routing: Routing, item_bytes: int, samples: int) -> dict[tuple[str, str, str], float]:
    """Useful bytes of the exchanges that leave a device, by (phase, kind, between): the mean over devices."""
    total: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for exchange in bound.pooled:
        ids = (routing.groups.get(exchange.name) or routing.pooled[exchange.name]).counts_NxO
        outer = "both" if 1 < bound.hosts < bound.devices else "hosts" if bound.hosts > 1 else "devices"
        for phase in POOLED_EXCHANGES:
            total[phase, "all-to-all", outer] += _leaving(pooled_sent_bytes(exchange, ids, samples, phase, item_bytes))
            if exchange.shared_blocks and phase != "id_exchange":
                of_hosts = pooled_sent_bytes(exchange, ids, samples, phase, item_bytes, shared=True)
                total[phase, "all-to-all", "hosts"] += _leaving(of_hosts)
    for group in bound.fetching:
        if not group.spread:
            continue
        counts = routing.groups[group.name]
        outer = "hosts" if group.hosts > 1 else "devices"
        for phase in EXCHANGES:
            kind = group.sharding.id_collective if phase == "id_exchange" else "all-to-all"
            total[phase, kind, outer] += _leaving(sent_bytes(group, counts, phase, item_bytes))
            if group.two_step and phase != "id_exchange":
                total[phase, "all-to-all", "devices"] += _leaving(
                    sent_bytes(group, counts, phase, item_bytes, inside=True)
                )
    return total


def _leaving(sent_NxN: np.ndarray) -> float:
    """Mean over devices, as far as they were counted, of the bytes that each sends to others or is sent by them."""
    return float(sent_NxN.sum() - np.trace(sent_NxN)) / min(sent_NxN.shape)
