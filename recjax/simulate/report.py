"""Results as plain data for `--json`, and as text."""

from __future__ import annotations

from typing import Any

from recjax.simulate.system import DEFAULT_ALGORITHMS, Result
from recjax.simulate.units import size_text, time_text

# bus bandwidth = bytes / time * factor(ranks), as nccl-tests defines it
BUS_FACTORS = {"all_reduce": lambda n: 2 * (n - 1) / n} | dict.fromkeys(
    ("all_to_all", "all_gather", "reduce_scatter"), lambda n: (n - 1) / n
)


def of_collective(result: Result) -> dict[str, Any]:
    """What a simulation of one collective found.

    Returns:
      time_ns, the busiest link, bandwidths in bytes/s (see BUS_FACTORS), and how it was simulated.
    """
    (operation,) = result.workload.operations
    name = operation.collective
    algorithmic = operation.bytes / result.time_ns * 1e9 if result.time_ns else 0.0
    return {
        "collective": name,
        "algorithm": result.system.algorithms.get(name, DEFAULT_ALGORITHMS[name]),
        "topology": _topology(result),
        "ranks": result.topology.size,
        "bytes": operation.bytes,
        "chunks": result.system.chunks,
        "time_ns": rounded(result.time_ns),
        "algorithm_bytes_per_s": algorithmic,
        "bus_bytes_per_s": algorithmic * BUS_FACTORS[name](result.topology.size),
        "busiest_link": busiest_link(result),
        "bytes_on_links": bytes_on_links(result),
        **how(result),
    }


def collective_text(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{found['collective']} ({found['algorithm']}) of {size_text(found['bytes'])} on {found['topology']}, "
        f"{found['chunks']} chunk(s): {time_text(found['time_ns'])} ({found['time_ns']:,.0f} ns)",
        f"algorithm bandwidth {found['algorithm_bytes_per_s'] / 1e9:.2f} GB/s, "
        f"bus bandwidth {found['bus_bytes_per_s'] / 1e9:.2f} GB/s",
        link_text(found["busiest_link"]),
        how_text(found),
    ]
    return "\n".join(lines)


def rounded(time_ns: float) -> float:
    """To the femtosecond, which times are multiples of."""
    return round(time_ns, 6)


def busiest_link(result: Result) -> dict[str, Any] | None:
    """The link that was busy for the largest share of the time, and how many are as busy; None without messages."""
    if not result.bytes_on or not result.time_ns:
        return None
    busy = {
        link: size / result.network.bandwidth[link] * 1e9 / result.time_ns for link, size in result.bytes_on.items()
    }
    most = max(busy.values())
    alike = [link for link, share in busy.items() if share > most * (1 - 1e-9)]
    return {
        "link": result.network.link_name(alike[0]),
        "bytes": result.bytes_on[alike[0]],
        "utilisation": most,
        "links_alike": sum(result.network.ranks_of(link) for link in alike),
    }


def link_text(link: dict[str, Any] | None) -> str:
    """The busiest link for people."""
    if link is None:
        return "no message was sent"
    others = f" (and {link['links_alike'] - 1} more)" if link["links_alike"] > 1 else ""
    return (
        f"busiest link: {link['link']}{others}, {size_text(link['bytes'])}, busy {link['utilisation']:.1%} of the time"
    )


def bytes_on_links(result: Result) -> float:
    """Bytes that all links together carried; a message counts once on each link that it crosses."""
    return sum(size * result.network.ranks_of(link) for link, size in result.bytes_on.items())


def how(result: Result) -> dict[str, Any]:
    """How it was simulated: whether one rank stood for all, and how many events it took."""
    return {"shortcut": result.shortcut or None, "no_shortcut": result.refused or None, "events": result.events}


def how_text(found: dict[str, Any]) -> str:
    """The same for people."""
    if found["shortcut"]:
        return f"simulated with {found['events']:,} events; {found['shortcut']}, which is exact here"
    why = f" ({found['no_shortcut']})" if found["no_shortcut"] else ""
    return f"simulated with {found['events']:,} events, every rank by itself{why}"


def _topology(result: Result) -> str:
    return ",".join(f"{dim.kind}:{dim.size}" for dim in result.topology.dims)
