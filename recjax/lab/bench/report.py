"""The result of `recjax bench` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recjax.planning.compiled_collectives import named
from recjax.utils.text import aligned

_OPS = 8  # operations to name


def to_text(result: dict[str, Any]) -> str:
    """Speeds and ratios, then what each precision's step consists of."""
    s = result["setup"]
    busy = s["cpu_share_of_others"]
    versions = s["versions"]
    lines = [
        f"{s['model']}, {s['tables']} tables with {s['rows']:,} rows in all, D={s['dim']}, {s['ids_per_sample']:g} ids "
        f"a sample, batch {s['batch_size']:,}, {s['devices']} device(s) ({s['device']}), {s['threads']} thread(s)",
        f"Python {versions['python']}, JAX {versions['jax']}, kernels: {versions['kernels']}, dense products: "
        + s["products"]
        + f", routing by the {s['routing']}, rows {s['reading']}"
        + ("" if busy is None else f"; other processes took {busy:.0%} of the CPU meanwhile"),
    ]
    if "peer" in result:
        p = result["peer"]
        dense = ", ".join(f"{way} ({name})" for name, way in p["dense"].items())
        apart = p["losses"]["largest_relative_difference"]
        lines += [
            f"peer: torch {p['torch']}, {p['tables']}, dense part {dense}, {p['threads']} thread(s), "
            f"{p['device']}; its batches lie ready in memory, ours come through the pipeline",
            f"losses of the first steps differ by at most {apart:.1e} of themselves",
        ]
    rows = [["samples/s", "median", "quartiles", "rounds"]]
    rows += [[name, *_spread(v, "{:,.0f}")] for name, v in result["speed"].items()]
    if "ratio" in result:
        rows.append(["ratio", "", "", ""])
        rows += [[name, *_spread(v, "{:.2f}")] for name, v in result["ratio"].items()]
    lines += ["", *aligned(rows, left=(0, 3))]
    for name, step in result["steps"].items():
        lines += ["", _step(name, step)]
    m = result["machine"]
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in m["flops_per_s"].items())
    lines += ["", f"measured here: copying {m['copy_bytes_per_s'] / 1e9:.1f} GB/s, products {rates}"]
    return "\n".join(lines)


def _step(name: str, step: dict[str, Any]) -> str:
    found = step["profile"]
    total = sum(found["device_ms"].values())
    rows = [[f"{name}: ms a step, on the device", "ms", "share"]]
    rows += [[part, f"{ms:.2f}", f"{ms / total:.1%}"] for part, ms in found["device_ms"].items()]
    rows.append(["all, under the profiler", f"{total:.2f}", f"{step['step_ms']:.2f} without it"])
    lines = [*aligned(rows), ""]
    hidden = found["host_hidden"]
    host = ", ".join(f"{part} {ms:.2f} ({hidden.get(part, 1):.0%})" for part, ms in found["host_ms"].items())
    lines.append(f"host, and the share of it while a device was at work: {host}")
    lines.append("(route is within place; count is in worker threads)")
    lines.append(f"from a profile of {found['steps']} steps; where operations overlap, a moment is split among them")
    lines.append("")
    ops = [["longest operations", "ms", "part", "scope"]]
    ops += [
        [o["op"], f"{o['ms']:.2f}", o["part"], o["scope"].removeprefix("jit(train_step)/")] for o in found["ops"][:_OPS]
    ]
    lines += [*aligned(ops, left=(0, 3)), ""]
    wire = [["collective", "number", "useful bytes", "padded bytes", "ratio"]]
    for w in step["wire"]:
        ratio = w["padded_bytes"] / w["useful_bytes"] if w["useful_bytes"] else None
        sizes = [f"{w['useful_bytes']:,.0f}", f"{w['padded_bytes']:,.0f}", "-" if ratio is None else f"{ratio:.3f}"]
        wire.append([named(w), str(w["count"]), *sizes])
    across = [sum(w[key] for w in step["wire"]) for key in ("across_useful_bytes", "across_padded_bytes")]
    if across[0]:
        wire.append(
            ["all that leaves the host", "", *(f"{size:,.0f}" for size in across), f"{across[1] / across[0]:.3f}"]
        )
    lines += [*aligned(wire), ""] if len(wire) > 1 else []
    if any(flight["asynchronous"] for flight in step["flights"]):
        lines += [flights(step["flights"]), ""]
    sparse, matmul = step["sparse"], step["matmul"]
    counts = {"forward": "a row for each id and a sum for each bag", "backward": "twice that"}
    for what, counted in counts.items():
        rate, share = sparse[f"{what}_bytes_per_s"], sparse[f"{what}_share_of_copy"]
        if rate is not None:
            lines.append(f"sparse {what}: {rate / 1e9:.1f} GB/s, {share:.0%} of copying ({counted})")
    share = "" if matmul["share_of_matmul"] is None else f", {matmul['share_of_matmul']:.0%} of a plain product's rate"
    lines.append(
        f"products: {matmul['flops'] / 1e9:.1f} GFLOP a step, {matmul['flops_per_s'] / 1e9:.0f} GFLOP/s{share}"
    )
    return "\n".join(lines)


def flights(found: Sequence[dict[str, Any]]) -> str:
    """A table of `recjax.lab.bench.overlap.flights`."""
    rows = [["collective, in order", "operations scheduled beside it"]]
    for f in found:
        beside = ", ".join(f"{count} {part}" for part, count in f["beside"].items()) or "none"
        rows.append([f"{f['phase']} ({f['kind']})", beside if f["asynchronous"] else "none: it is synchronous"])
    return "\n".join(aligned(rows))


def _spread(values: dict[str, Any], form: str) -> list[str]:
    quartiles = f"{form.format(values['q1'])} - {form.format(values['q3'])}"
    return [form.format(values["median"]), quartiles, str(len(values["rounds"]))]
