"""What `recjax plan` prints: where every table goes, what it costs, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from recjax.embedding.bind import bind
from recjax.embedding.plan import OWNED, Plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.utils.text import aligned


def describe_plan(
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    devices: int,
    batch_size: int,
    item_bytes: int = 4,
    hosts: int = 1,
    replicas: int = 1,
) -> dict[str, Any]:
    """A plan bound to `devices` in `hosts`, as JSON values. These are of each of the replica groups.

    Returns:
      "tables": for each its placement, owner (the device of a table-wise one, the host of a table-row-wise one, else
      None), exchange ("forward" and "backward" precision, and "kind"), rows, dim, dtype, optimizer, bytes of rows and
      slots over all devices of one group and on the fullest one, ids looked up per step (a jagged bag counts as one;
      "jagged" says whether there is any), and why; "devices": how many; "hosts": how many; "replicas": how many groups
      of both; "bytes_per_device": what each holds; "lookups_per_device": ids per step that each answers, if all rows
      were looked up equally often, of a column-wise table in proportion to its columns; "imbalance": most bytes over
      mean bytes; "lookup_imbalance": the same of lookups; "groups": names of the groups that exchange together.
      `item_bytes` is the size of a table's element, if that is not bfloat16.
    """
    bound = bind(plan, tables, features, devices, hosts=hosts)
    bytes_N, lookups_N = [0] * devices, [0.0] * devices
    described = {}
    for group in bound.groups:
        for table in group.tables:
            spec = table.spec
            looking = [f for f in features if f.table == spec.name]
            ids = batch_size * sum(f.bag or 1 for f in looking)
            values_bytes = group.width * (2 if spec.dtype == "bfloat16" else item_bytes)
            row_bytes = values_bytes + item_bytes * sum(math.prod(s.shape) for s in group.slots().values())
            held, answered = [0] * devices, [ids / devices / replicas] * devices
            for piece in group.pieces(table):
                for n in group.sharding.holders(piece.part):
                    held[n] = row_bytes * (piece.stop - piece.start)
                if group.spread:
                    cells = (piece.stop - piece.start) * (piece.last - piece.first)
                    answered[piece.part] = ids / replicas * cells / (spec.rows * spec.dim)
            bytes_N = [a + b for a, b in zip(bytes_N, held, strict=True)]
            lookups_N = [a + b for a, b in zip(lookups_N, answered, strict=True)]
            described[spec.name] = {
                "placement": table.placement,
                "owner": table.split.first // table.split.owners if table.placement in OWNED else None,
                "exchange": dataclasses.asdict(plan.tables[spec.name][0].exchange),
                "rows": spec.rows,
                "dim": spec.dim,
                "dtype": spec.dtype,
                "optimizer": spec.optimizer.kind,
                "bytes": sum(held),
                "bytes_on_fullest_device": max(held),
                "ids_per_step": ids,
                "jagged": any(f.bag is None for f in looking),
                "why": plan.tables[spec.name][0].why,
            }
    return {
        "devices": devices,
        "hosts": hosts,
        "replicas": replicas,
        "tables": {t.name: described[t.name] for t in tables},
        "bytes_per_device": bytes_N,
        "lookups_per_device": [round(x) for x in lookups_N],
        "imbalance": max(bytes_N) * devices / sum(bytes_N),
        "lookup_imbalance": max(lookups_N) * devices / sum(lookups_N),
        "groups": [g.name for g in bound.groups],
    }


def plan_table(described: dict[str, Any]) -> str:
    """The same as text: a line a table, then the devices."""
    cells = [["table", "placement", "rows", "D", "bytes/device", "ids/step", "why"]]
    for name, t in described["tables"].items():
        ids = f"{t['ids_per_step']:,}" + ("+" if t["jagged"] else "")
        sizes = [f"{t['rows']:,}", str(t["dim"]), f"{t['bytes_on_fullest_device']:,}", ids]
        where = t["placement"]
        if t["owner"] is not None:
            where += f" on {'host ' if OWNED[t['placement']] == 'host' else ''}{t['owner']}"
        if {t["exchange"]["forward"], t["exchange"]["backward"]} != {"float32"}:
            where += f", {t['exchange']['forward']} / {t['exchange']['backward']}"
        cells.append([name, where, *sizes, t["why"]])
    lines = [*aligned(cells, left=(0, 1, 6)), ""]
    number = f"{described['devices']} device(s)" + (f" in {described['hosts']} hosts" if described["hosts"] > 1 else "")
    number += f" in each of {described['replicas']} replica groups" if described["replicas"] > 1 else ""
    for what, per_device, imbalance in (
        ("bytes of tables and slots", described["bytes_per_device"], described["imbalance"]),
        ("lookups a step", described["lookups_per_device"], described["lookup_imbalance"]),
    ):
        lines.append(
            f"{number}: {min(per_device):,} to {max(per_device):,} {what} each, imbalance (max/mean) {imbalance:.3f}"
        )
    if any(t["jagged"] for t in described["tables"].values()):
        lines.append("+: a jagged bag counts as one id")
    lines.append(f"exchanged in {len(described['groups'])} group(s): {', '.join(described['groups'])}")
    return "\n".join(lines)
