"""A machine as text, and as JSON values."""

from __future__ import annotations

import dataclasses
from typing import Any

from recjax.planning.machine import Machine
from recjax.utils.text import aligned

_RATES = {
    "flops_f32": (1e9, "GFLOP/s"),
    "flops_bf16": (1e9, "GFLOP/s"),
    "memory": (1e9, "GB/s"),
    "cache": (1e9, "GB/s"),
    "link": (1e9, "GB/s"),
    "disk_reads": (1.0, "reads/s"),
    "disk_write": (1e9, "GB/s"),
    "disk_writes": (1.0, "writes/s"),
}


def with_note(machine: Machine, others: float | None, quick: bool) -> Machine:
    """The machine with a note on how it was measured: what other processes took, and whether it was done quickly."""
    notes = ["--quick: few and small sizes"] if quick else []
    if others is not None:
        notes.append(f"other processes took {others:.0%} of the CPU")
    return dataclasses.replace(machine, where=machine.where | ({"note": "; ".join(notes)} if notes else {}))


def figures(machine: Machine) -> dict[str, Any]:
    """JSON values: name, where, rates, overheads, and of each class the number of points and both errors."""
    return {
        "name": machine.name,
        "measured": machine.measured,
        "where": machine.where,
        "rates": {name: rate.value for name, rate in machine.rates.items()},
        "overheads": {name: overhead.value for name, overhead in machine.overheads.items()},
        "kernels": {
            name: {
                "points": len(kernel.points),
                "repeat": kernel.repeat,
                "held_out": None if kernel.held_out is None else dataclasses.asdict(kernel.held_out),
            }
            for name, kernel in machine.kernels.items()
        },
    }


def to_text(machine: Machine) -> str:
    """For people: rates and overheads, then the error of predictions for sizes that were held out."""
    where = ", ".join(machine.where[key] for key in ("versions", "date", "note") if key in machine.where)
    lines = [f"{machine.name}, {machine.cores} cores ({where})"]
    rates = [
        f"{name} {machine.rates[name].value / unit:,.1f} {text}"
        for name, (unit, text) in _RATES.items()
        if name in machine.rates
    ]
    overheads = [f"{name} {q.value:.2f} {q.unit}" for name, q in machine.overheads.items()]
    lines += [f"at most: {', '.join(rates)}", f"overheads: {', '.join(overheads)}", ""]
    rows = [["kernel class", "points", "repeat", "held out", "ratio, mean", "p50", "p90", "GMAE"]]
    for name, kernel in machine.kernels.items():
        held = kernel.held_out
        error = ["-"] * 4
        if held is not None:
            error = [f"{held.ratio_mean:.2f}", f"{held.ratio_p50:.2f}", f"{held.ratio_p90:.2f}", f"{held.gmae:.1%}"]
        repeat = "-" if kernel.repeat is None else f"{kernel.repeat:.2f}"
        rows.append([name, str(len(kernel.points)), repeat, str(held.points) if held else "0", *error])
    lines += aligned(rows)
    lines.append("ratio: max(predicted, measured) / min of them, of sizes that are no points; its mean is geometric")
    lines.append("repeat: by how many times two halves of the passes differ, the geometric mean over a class's sizes")
    return "\n".join(lines)
