"""`recjax plan PRESET --devices 8,16,32 --machine NAME`: what a run would be on so many devices, for who buys or rents.

Each number of devices gets the plan that it would train with, and a step predicted from sizes alone; nothing is
compiled, and no device of the kind is needed. The batch is that of the config on any number of devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from recjax import settings
from recjax.config.run import RunConfig
from recjax.data.source import BlockSource
from recjax.errors import ConfigError
from recjax.planning.machine import Machine
from recjax.planning.planner import Planner, answer, exact_sizes
from recjax.planning.predict import Prediction
from recjax.planning.question import GIB, Answer, Question
from recjax.planning.resolve import resolve
from recjax.planning.tier_choice import choose
from recjax.train.planned import does_not_fit, question
from recjax.utils import plots
from recjax.utils.text import aligned


def read_devices(text: str) -> tuple[int, ...]:
    """Reads the numbers of `--devices`, ascending.

    Raises:
      ConfigError: they are no whole numbers from 1 on.
    """
    found = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in found):
        raise ConfigError(f"--devices {text}: give numbers of devices from 1 on, for example 8,16,32,64.")
    return tuple(sorted({int(part) for part in found}))


def offers(config: RunConfig, machine: Machine, devices: Sequence[int], price: float | None) -> dict[str, Any]:
    """Predicts a run on several numbers of devices.

    Args:
      config: of the run; its plan=auto is chosen for the machine.
      machine: of which so many devices are taken.
      devices: how many, ascending.
      price: of a device and hour, in any currency; None leaves costs out.

    Returns:
      JSON values: "machine", "measured_machine", "batch_size", "price"; "offers", for each number of devices "devices",
      "hosts"; "fits", and if not "why"; "samples_per_s", "step_ms", "speedup" over the first that fits and
      "efficiency", that over the devices; "memory_gib" of a device by what they are; "exposed_ms" of collectives that
      nothing hides, and "exposed_share" of the step; "bound_by"; "plan", tables by their ways; "cost_per_million"
      samples, None without a price.

    Raises:
      ConfigError: a price that is not positive, devices that do not fit the mesh, or what the config lacks.
      DataError: the data cannot be read.
    """
    if price is not None and not 0 < price < math.inf:
        raise ConfigError(f"--price {price}: give what a device costs in an hour, for example 3.5.")
    source = config.data.open()
    config = config.for_rows(int(source.row_counts("train").sum()))
    rows = [_offer(config, source, machine, number, price) for number in devices]
    first = next((row for row in rows if row["fits"]), None)
    for row in rows:
        if row["fits"] and first is not None:
            row["speedup"] = row["samples_per_s"] / first["samples_per_s"]
            row["efficiency"] = row["speedup"] * first["devices"] / row["devices"]
    return {
        "machine": machine.name,
        "measured_machine": machine.measured,
        "batch_size": config.train.batch_size,
        "price": price,
        "offers": rows,
    }


def _offer(
    config: RunConfig, source: BlockSource, machine: Machine, devices: int, price: float | None
) -> dict[str, Any]:
    hosts = config.mesh.hosts
    if hosts == 1:
        hosts = max(1, math.ceil(devices / machine.rate("host_devices")))
    of = settings.override(config, [f"mesh.devices={devices}", f"mesh.hosts={hosts}"])
    asked = question(of, source, machine)
    plain_plan, _ = resolve(of, source, asked.demand.tables, asked.demand.features, of.mesh.shape)
    row: dict[str, Any] = {"devices": devices, "hosts": hosts}
    if config.plan == "auto":
        found = answer(asked, plain_plan) or choose(asked, plain_plan, of, source)
        if isinstance(found, str):
            return row | {"fits": False, "why": does_not_fit(of, source, machine, asked, plain_plan, found)}
        prediction, memory, plan = found.prediction, found.memory, _ways(found)
    else:
        exact = exact_sizes(asked.demand, plain_plan)
        prediction, memory = Planner(asked).predicted(exact), asked.memory(exact)
        plan = dict(Counter("+".join(dict.fromkeys(s.placement for s in own)) for own in plain_plan.tables.values()))
        if memory["total"] > asked.budget_bytes:
            why = f"plan={config.plan} needs {memory['total'] / GIB:.3g} GiB a device"
            return row | {"fits": False, "why": f"{why}, and {asked.budget_bytes / GIB:.3g} can be used"}
    return row | {"fits": True} | _figures(prediction, memory, price, asked) | {"plan": plan}


def _ways(found: Answer) -> dict[str, int]:
    cached = {"with caches": len(found.tier.tables)} if found.tier else {}
    return dict(Counter(found.ways.values())) | cached


def _figures(prediction: Prediction, memory: dict[str, float], price: float | None, asked: Question) -> dict[str, Any]:
    devices = asked.host.devices
    return {
        "samples_per_s": prediction.samples_per_s,
        "step_ms": prediction.step_us / 1e3,
        "memory_gib": {name: size / GIB for name, size in memory.items()},
        "usable_gib": asked.budget_bytes / GIB,
        "exposed_ms": prediction.exposed_us / 1e3,
        "exposed_share": prediction.exposed_us / prediction.step_us,
        "bound_by": prediction.bound_by,
        "missing": [name.removeprefix("host_") for name in prediction.missing],
        "cost_per_million": None if price is None else price * devices / 3600 / prediction.samples_per_s * 1e6,
    }


def to_text(result: dict[str, Any]) -> str:
    """The table for people."""
    kind = "measured" if result["measured_machine"] else "NOT measured: data sheets and assumptions"
    lines = [f"{result['machine']} ({kind}); {result['batch_size']:,} samples a step; predicted, nothing was run", ""]
    priced = result["price"] is not None
    head = [
        "devices",
        "hosts",
        "samples/s",
        "ms a step",
        "of ideal",
        "GiB a device",
        "exposed comm.",
        "bound by",
        "tables",
    ]
    table = [head[:7] + (["per million samples"] if priced else []) + head[7:]]
    refused = []
    for row in result["offers"]:
        if not row["fits"]:
            table.append([str(row["devices"]), str(row["hosts"]), "does not fit", *[""] * (len(table[0]) - 3)])
            refused.append(f"{row['devices']} device(s): {row['why']}")
            continue
        plan = ", ".join(f"{count} {way}" for way, count in sorted(row["plan"].items()))
        cells = [
            str(row["devices"]),
            str(row["hosts"]),
            f"{row['samples_per_s']:,.0f}",
            f"{row['step_ms']:,.3g}",
            f"{row['efficiency']:.0%}",
            f"{row['memory_gib']['total']:,.3g}",
            f"{row['exposed_ms']:,.3g} ms ({row['exposed_share']:.0%})",
        ]
        cells += [f"{row['cost_per_million']:.4g}"] if priced else []
        table.append([*cells, row["bound_by"], plan])
    lines += aligned(table)
    lines += ["", *refused] if refused else []
    missing = {name for row in result["offers"] if row["fits"] for name in row["missing"]}
    if missing:
        lines += ["", f"the machine file says nothing of {', '.join(sorted(missing))}: the host is taken to keep up"]
    lines.append("of ideal: samples/s over those of the first row times the devices")
    return "\n".join(lines)


def picture(result: dict[str, Any]) -> bytes | None:
    """The PNG: samples/s, the parts of a step's time, memory and cost over the devices; None if nothing fits."""
    rows = [row for row in result["offers"] if row["fits"]]
    if not rows:
        return None
    names = [str(row["devices"]) for row in rows]
    priced = result["price"] is not None
    with plots.literal():
        drawn = plots.figure(4 * (3 + priced), 4.2)
        panels = drawn.subplots(1, 3 + priced)
        kind = "" if result["measured_machine"] else ", from data sheets"
        drawn.suptitle(f"predicted on {result['machine']}{kind}: {result['batch_size']:,} samples a step", fontsize=11)
        speed, time, memory = panels[:3]
        for panel in panels:
            plots.plain(panel)
            panel.set_xlabel("devices")
        first = rows[0]
        ideal = [first["samples_per_s"] * row["devices"] / first["devices"] / 1e6 for row in rows]
        speed.plot(names, ideal, color=plots.GREY, linestyle="--", label="if it scaled perfectly")
        speed.plot(names, [row["samples_per_s"] / 1e6 for row in rows], color=plots.BLUE, marker="o", label="predicted")
        plots.logarithmic(speed, ["y"])
        speed.set_ylabel("million samples a second")
        exposed = [row["exposed_ms"] for row in rows]
        time.bar(names, [row["step_ms"] - row["exposed_ms"] for row in rows], color=plots.BLUE, label="computing")
        time.bar(
            names,
            exposed,
            bottom=[row["step_ms"] - row["exposed_ms"] for row in rows],
            color=plots.ORANGE,
            label="waiting for others",
        )
        time.set_ylabel("ms a step")
        colours = {"tables": plots.BLUE, "dense": plots.GREEN, "batch": plots.GREY, "temporaries": plots.ORANGE}
        if any("rows" in row["memory_gib"] for row in rows):
            colours["rows"] = plots.PALETTE[4]
        sizes = {part: [row["memory_gib"].get(part, 0.0) for row in rows] for part in colours}
        plots.stacked(memory, names, sizes, colours.values(), upright=True)
        usable = rows[0]["usable_gib"]
        if usable < 3 * max(map(sum, zip(*sizes.values(), strict=True))):
            memory.axhline(usable, color=plots.PALETTE[5], linestyle="--", label="what can be used")
        memory.set_ylabel("GiB a device")
        for panel in panels[:3]:
            plots.legend_below(panel)
        if priced:
            cost = panels[3]
            cost.bar(names, [row["cost_per_million"] for row in rows], color=plots.GREEN)
            cost.set_ylabel("cost per million samples")
        return plots.png(drawn)
