"""The result of `recjax plan PRESET --tiers` for a terminal."""

from __future__ import annotations

from typing import Any

from recjax.utils.text import aligned
from recjax.utils.units import size_text


def to_text(result: dict[str, Any]) -> str:
    """The result of `tier_plan` for a terminal."""
    head = ["table", "rows", "bytes each", "on the devices", "in memory", "on disk", "never touched"]
    lines = [head]
    for of in result["tables"]:
        places = [of[name] * of["row_bytes"] for name in ("device", "dram", "disk")]
        cells = [
            f"{of[name]:,.0f} ({size_text(round(size))})" if size else "-"
            for name, size in zip(("device", "dram", "disk"), places, strict=True)
        ]
        if of["copies"] > 1:
            cells[0] += f" on each of {of['copies']}"
        lines.append([of["table"], f"{of['rows']:,}", f"{of['row_bytes']}", *cells, f"{of['untouched']:,.0f}"])
    table = "\n".join(aligned(lines))
    if not result["cached"]:
        return f"{table}\nall rows fit into tier.device_bytes"
    steps, replayed = result["steps"], result["replayed"]
    if replayed == steps:
        origin = f"its {steps:,} steps, replayed with their own batches"
    elif replayed:
        origin = f"{steps:,} steps, of which the first {replayed:,} were replayed, and the others modelled"
    else:
        origin = f"{steps:,} steps, all modelled: the directories of a replay would not fit into memory"
    when = "after the replay" if replayed else "at the end"
    step, costs, nodes = result["step"], result["costs"], result["nodes"]
    short = "\nthey take more than tier.dram_bytes, where such a run stops: raise it, or set tier.disk=DIR"
    paragraphs = [
        f"{table}\nrows {when}; those in memory or on disk are in no cache{short * result['memory_too_small']}",
        f"hits {result['hit_rate']:.2%} over {origin}; {result['steady_hit_rate']:.2%} in the long run, by the "
        f"model, and {result['belady_hit_rate']:.2%} if all batches were in sight (Belady's rule)",
        "\n".join(
            aligned(
                [
                    ["a step in the later half" if replayed else "a step in the long run", "rows", "bytes"],
                    ["hits", f"{step['hits']:,.0f}", ""],
                    ["misses", f"{step['misses']:,.0f}", f"{costs['bytes']['to_devices']:,.0f}"],
                    ["  touched for the first time", f"{step['first']:,.0f}", ""],
                    ["  read from disk", f"{step['reads']:,.0f}", f"{costs['bytes']['disk_read']:,.0f}"],
                    ["leaving", f"{step['leaves']:,.0f}", f"{costs['bytes']['to_host']:,.0f}"],
                    ["written to disk", f"{step['writes']:,.0f}", f"{costs['bytes']['disk_written']:,.0f}"],
                ]
            )
        ),
        _cost_text(costs),
        f"each process finds the rows of its devices by {size_text(result['directory_bytes'])} of memory",
        _nodes_text(nodes),
    ]
    return "\n\n".join(paragraphs)


def _cost_text(costs: dict[str, Any]) -> str:
    rates = "; ".join(
        f"{_RATES[name]} {q['value']:,.3g} {q['unit']} ({q['source']})" for name, q in costs["rates"].items()
    )
    times = ", ".join(f"{name} {ms:,.3g} ms" for name, ms in costs["ms"].items())
    text = f"beside a step go on: {times}. Rates: {rates}.\nA step of {costs['hides_from_ms']:,.3g} ms or more hides it"
    if costs["step_ms"] is None:
        return f"{text}; how long one takes is not known: give --step-ms MS or --machine FILE."
    work = (
        ""
        if costs.get("moving", 1.0) <= 1
        else f" The work of moving rows makes it {costs['moving']:.2f} times as long."
    )
    if not costs["exposed_ms"]:
        return f"{text}: one takes {costs['step_ms']:,.3g} ms, and waits for nothing.{work}"
    return (
        f"{text}, but one takes {costs['step_ms']:,.3g} ms: it waits {costs['exposed_ms']:,.3g} ms more for "
        f"{costs['bound_by']}, and is {costs['slowdown']:,.3g} times as long."
    )


_RATES = {
    "host_link": "link",
    "disk_reads": "disk reads",
    "disk_write": "disk writes in order",
    "disk_writes": "disk writes anywhere",
}


def _nodes_text(nodes: dict[str, Any]) -> str:
    node = nodes["node"]
    rate = f"{nodes['samples_per_s']:,.0f} samples/s" if nodes["samples_per_s"] else "any rate"

    def words(found: dict[str, Any]) -> str:
        if found["nodes"] is None:
            return "not to be had"
        return f"{found['nodes']:,} (bound by {found['bound_by']}, {found['used'][found['bound_by']]:.0%} used)"

    sizes = ", ".join(
        f"{size_text(round(node[name]))} {words_}"
        for name, words_ in (("device_bytes", "on devices"), ("dram_bytes", "memory"), ("disk_bytes", "disk"))
    )
    text = (
        f"hosts like this one for {size_text(round(nodes['bytes']))} of rows at {rate}: {words(nodes['without'])} with "
        f"all rows on the devices, {words(nodes['with'])} with tiers"
    )
    if nodes["times"] and nodes["times"] > 1:
        text += f", {nodes['times']:.2g} times fewer"
    return f"{text}. A host has {sizes}."
