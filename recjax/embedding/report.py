"""What `recjax plan` prints: where every table goes, what it costs, and why."""

from __future__ import annotations

import math
from typing import Any

from recjax.embedding.bound import bind
from recjax.embedding.plan import Plan
from recjax.embedding.spec import FeatureSpec, TableSpec

ITEM_BYTES = 4  # tables are float32


def describe_plan(
    plan: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], devices: int, batch_size: int
) -> dict[str, Any]:
    """A plan bound to `devices`, as JSON values.

    Returns:
      "tables": for each its placement, rows, dim, optimizer, bytes of rows and slots over all devices
      and on the fullest one, ids looked up per step (None if a jagged feature uses it), and why;
      "devices": how many; "bytes_per_device": what each holds; "imbalance": most bytes over mean bytes;
      "groups": names of the groups that exchange together. Bytes are those of float32 tables.
    """
    bound = bind(plan, tables, features, devices)
    per_device = [0] * devices
    rows = {}
    for group in bound.groups:
        for table in group.tables:
            spec, split = table.spec, table.split
            row_bytes = ITEM_BYTES * (spec.dim + sum(math.prod(s.shape) for s in group.slots().values()))
            held = [
                row_bytes * (split.start(owner + 1) - split.start(owner))
                for owner in (range(devices) if group.owners > 1 else [0] * devices)
            ]
            per_device = [a + int(b) for a, b in zip(per_device, held, strict=True)]
            bags = [f.bag for f in features if f.table == spec.name]
            rows[spec.name] = {
                "placement": group.placement,
                "rows": spec.rows,
                "dim": spec.dim,
                "optimizer": spec.optimizer.kind,
                "bytes": int(sum(held)),
                "bytes_on_fullest_device": int(max(held)),
                "ids_per_step": None if None in bags else batch_size * sum(b for b in bags if b),
                "why": plan.tables[spec.name][0].why,
            }
    return {
        "devices": devices,
        "tables": {t.name: rows[t.name] for t in tables},
        "bytes_per_device": per_device,
        "imbalance": max(per_device) * devices / sum(per_device),
        "groups": [g.name for g in bound.groups],
    }


def plan_table(described: dict[str, Any]) -> str:
    """The same as text: a line a table, then the devices."""
    head = ["table", "placement", "rows", "D", "bytes/device", "ids/step", "why"]
    cells = [head]
    for name, t in described["tables"].items():
        ids = "jagged" if t["ids_per_step"] is None else f"{t['ids_per_step']:,}"
        sizes = [f"{t['rows']:,}", str(t["dim"]), f"{t['bytes_on_fullest_device']:,}", ids]
        cells.append([name, t["placement"], *sizes, t["why"]])
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    left = (0, 1, 6)
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    per_device = described["bytes_per_device"]
    lines += [
        "",
        f"{described['devices']} device(s): {min(per_device):,} to {max(per_device):,} bytes of tables and slots each, "
        f"imbalance (max/mean) {described['imbalance']:.3f}",
        f"exchanged in {len(described['groups'])} group(s): {', '.join(described['groups'])}",
    ]
    return "\n".join(line.rstrip() for line in lines)
