"""What a step has to do, counted and not timed: floating-point operations, looked-up bytes, bytes on the wire."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recjax.comms.compiled import collectives
from recjax.embedding.bound import BoundPlan
from recjax.embedding.route import Routing


def matmul_flops(jaxpr: Any) -> int:
    """Operations of all matrix products in a jaxpr, on one device where it is mapped over a mesh: 2 m n k each.

    A loop's body counts once for each turn of a scan, and once for a while loop, whose turns are not known.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
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
    for group in bound.groups:
        for feature in group.features:
            inverse = np.asarray(routing.features[feature.name].inverse)
            nothing = routing.groups[group.name].slots_NxOxC.shape[2] * group.owners
            total += (int(np.count_nonzero(inverse < nothing)) + samples) * group.dim * 4
    return total


def wire_bytes(hlo: str, bound: BoundPlan, routing: Routing, item_bytes: int) -> list[dict[str, Any]]:
    """The collectives of a compiled step and the bytes that leave a device for another one, the mean over devices.

    Args:
      hlo: text of the compiled step.
      bound: the bound plan.
      routing: of one batch, which tells what of an exchange is useful; counts of the first devices alone will do.
      item_bytes: size of a table's element.

    Returns:
      For each phase, kind and number of devices of collectives: "phase", "kind", "group_size", "count",
      "padded_bytes" as compiled, and "useful_bytes" (equal where nothing is padded). An all-reduce counts what a ring
      sends: 2 (N - 1) / N of its result.
    """
    useful = _useful(bound, routing, item_bytes)
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for collective in collectives(hlo):
        size = collective.group_size or bound.devices
        away = (size - 1) / size * (2 if collective.kind == "all-reduce" else 1)
        key = collective.phase, collective.kind, size
        new = {"phase": key[0], "kind": key[1], "group_size": size, "count": 0, "padded_bytes": 0.0}
        line = found.setdefault(key, new)
        line["count"] += 1
        line["padded_bytes"] += collective.result_bytes * away
    for (phase, kind, _), line in found.items():
        line["useful_bytes"] = line["padded_bytes"] if kind == "all-reduce" else useful.get(phase, line["padded_bytes"])
    return list(found.values())


def _useful(bound: BoundPlan, routing: Routing, item_bytes: int) -> dict[str, float]:
    """Useful bytes of the exchanges by phase, that leave a device: the mean over devices."""
    ids = rows = 0.0
    for group in bound.groups:
        counts_NxO = np.asarray(routing.groups[group.name].counts_NxO, np.int64)
        counted = len(counts_NxO)
        if group.sharding == "rows":
            away = int(counts_NxO.sum() - np.trace(counts_NxO))
            ids, rows = ids + away * 4 / counted, rows + away * group.dim * item_bytes / counted
        elif group.sharding == "columns":  # every device sends all others its ids, and gets their columns
            away = int(counts_NxO.sum()) * (bound.devices - 1)
            ids, rows = ids + away * 4 / counted, rows + away * group.dim * item_bytes / bound.devices / counted
    return {"id_exchange": ids, "row_exchange": rows, "grad_exchange": rows}
