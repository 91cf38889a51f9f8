"""Output of `recjax plan`: where every table goes, what it costs, and why."""

from __future__ import annotations

from typing import Any

import numpy as np

from recjax.embedding.bind import bind
from recjax.embedding.group import Group
from recjax.embedding.plan import Plan, kind_in_words
from recjax.embedding.segment import OWNED
from recjax.embedding.sharding import BoundSegment
from recjax.embedding.spec import FeatureSpec, TableSpec, by_table
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
      "tables": for each its placement (those of its segments, if there are several; "segments" then lists them with
      rows, columns, owners, bytes and reasons), owner (the device of a table-wise one, the host of a table-row-wise
      one, else None), exchange ("forward" and "backward" precision, and "kind"), "exchanged" (what travels, in words),
      rows, dim, dtype, optimizer, bytes of rows and slots over all devices of one group and on the fullest one, ids
      looked up per step (of jagged bags their mean; "jagged" says whether there is any), and why; "devices": how many;
      "hosts": how many; "replicas": how many groups of both;
      "bytes_per_device": what each holds; "buffer_bytes_per_device": what each allocates, in every
      group as much as its fullest device needs; "lookups_per_device": ids per step that each answers, if all rows were
      looked up equally often, of a column-wise table in proportion to its columns; "imbalance": most bytes over mean
      bytes; "lookup_imbalance": the same of lookups; "groups": names of the groups that exchange together.
      `item_bytes` is the size of a table's element, if that is not bfloat16.
    """
    bound = bind(plan, tables, features, devices, hosts=hosts)
    bytes_N, lookups_N = np.zeros(devices, np.int64), np.zeros(devices)
    described = {}
    looking_up = by_table(features)
    for spec in tables:
        looking = looking_up[spec.name]
        ids = batch_size * sum(f.ids for f in looking)
        parts = [
            _describe_segment(group, segment, ids / replicas, item_bytes)
            for group, segment in bound.segments(spec.name)
        ]
        of_table_N = np.sum([held for _, held, _ in parts], axis=0)
        bytes_N = bytes_N + of_table_N
        lookups_N = lookups_N + np.sum([answered for _, _, answered in parts], axis=0)
        first = plan.tables[spec.name][0]
        first_spread = next((s for s in plan.tables[spec.name] if s.placement != "data_parallel"), first)
        described[spec.name] = {
            "placement": "+".join(dict.fromkeys(str(part["placement"]) for part, _, _ in parts)),
            "owner": parts[0][0]["owner"] if len(parts) == 1 else None,
            "exchange": first_spread.exchange.to_json(),
            "exchanged": kind_in_words(first_spread),
            "rows": spec.rows,
            "dim": spec.dim,
            "dtype": spec.dtype,
            "optimizer": spec.optimizer.kind,
            "bytes": int(of_table_N.sum()),
            "bytes_on_fullest_device": int(of_table_N.max()),
            "ids_per_step": ids,
            "jagged": any(f.bag is None for f in looking),
            "why": first.why,
        }
        if len(parts) > 1:
            described[spec.name]["segments"] = [
                {**part, "why": plan.tables[spec.name][segment.number].why}
                for (part, _, _), (_, segment) in zip(parts, bound.segments(spec.name), strict=True)
            ]
    return {
        "devices": devices,
        "hosts": hosts,
        "replicas": replicas,
        "tables": {t.name: described[t.name] for t in tables},
        "bytes_per_device": bytes_N.tolist(),
        "buffer_bytes_per_device": bound.buffer_bytes(item_bytes),
        "lookups_per_device": [round(x) for x in lookups_N.tolist()],
        "imbalance": float(bytes_N.max() * devices / bytes_N.sum()),
        "lookup_imbalance": float(lookups_N.max() * devices / lookups_N.sum()),
        "groups": [g.name for g in bound.groups],
    }


def _describe_segment(
    group: Group, segment: BoundSegment, ids: float, item_bytes: int
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """A segment as JSON values, the bytes of it that each device holds, [N], and the ids that each answers, [N].

    `ids` are those of a step that look its table up.
    """
    spec = segment.spec
    rows_N, columns_N = group.counts(segment)
    held = group.row_bytes(item_bytes) * rows_N
    used_N = rows_N * (segment.band.members / segment.band.size)
    answered = ids * (used_N * columns_N) / (spec.rows * spec.dim) / (1 if group.spread else group.devices)
    described = {
        "placement": segment.placement,
        "owner": segment.split.first // segment.split.owners if segment.placement in OWNED else None,
        "owners": list(segment.split.named),
        "rows": segment.band.members,
        "columns": [segment.first, segment.last],
        "bytes": int(held.sum()),
        "bytes_on_fullest_device": int(held.max()),
    }
    return described, held, answered


def plan_table(described: dict[str, Any]) -> str:
    """The same as text: a line a table, then the devices."""
    cells = [["table", "placement", "rows", "D", "bytes/device", "ids/step", "why"]]
    for name, t in described["tables"].items():
        ids = f"{round(t['ids_per_step']):,}" + ("+" if t["jagged"] else "")
        sizes = [f"{t['rows']:,}", str(t["dim"]), f"{t['bytes_on_fullest_device']:,}", ids]
        where = t["placement"]
        if t["owner"] is not None:
            where += f" on {'host ' if OWNED[t['placement']] == 'host' else ''}{t['owner']}"
        if {t["exchange"]["forward"], t["exchange"]["backward"]} != {"float32"}:
            where += f", {t['exchange']['forward']} / {t['exchange']['backward']}"
        where += f", {t['exchanged']}" if t["exchange"]["kind"] == "pooled" else ""
        cells.append([name, where, *sizes, "" if "segments" in t else t["why"]])
        for part in t.get("segments", ()):
            first, last = part["columns"]
            on = f" on {'host ' if OWNED.get(part['placement']) == 'host' else ''}{part['owner']}"
            on = on if part["owner"] is not None else ""
            on += f" on {', '.join(map(str, part['owners']))}" if part["owners"] else ""
            sizes = [f"{part['rows']:,}", f"{first}:{last}", f"{part['bytes_on_fullest_device']:,}", ""]
            cells.append(["", part["placement"] + on, *sizes, part["why"]])
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
    buffers = described["buffer_bytes_per_device"]
    if buffers > 1.1 * max(described["bytes_per_device"]):
        lines.append(
            f"but the buffers of each device take {buffers:,} bytes: in every group they are as large as the fullest "
            "device needs; place tables of equal D more evenly, or row_wise, or with plan=balanced"
        )
    if any(t["jagged"] for t in described["tables"].values()):
        lines.append("+: with the mean of jagged bags in the first block of the data, or one id each if there is none")
    lines.append(f"exchanged in {len(described['groups'])} group(s): {', '.join(described['groups'])}")
    return "\n".join(lines)
