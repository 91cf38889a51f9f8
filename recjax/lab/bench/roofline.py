"""Work of a step, counted and not timed: floating-point operations and looked-up bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.routed import Routing
from recjax.planning.work import DENSE_CALLS


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
