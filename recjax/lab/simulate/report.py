"""Results as plain data for `--json`, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.lab.simulate.calibrated import Sweep
from recjax.lab.simulate.system import DEFAULT_ALGORITHMS, Played, Result
from recjax.lab.simulate.workload import Operation
from recjax.utils.text import aligned
from recjax.utils.units import bus_factor, size_text, time_text


def of_collective(result: Result) -> dict[str, Any]:
    """Report of a simulation of one collective.

    Returns:
      time_ns, the busiest link, bandwidths in bytes/s (see `units.bus_factor`), and how it was simulated.
    """
    (operation,) = result.workload.operations
    name = operation.collective
    algorithmic = operation.bytes / result.time_ns * 1e9 if result.time_ns else 0.0
    return {
        "collective": name,
        "algorithm": result.system.algorithms.get(name, DEFAULT_ALGORITHMS[name]),
        "bytes": operation.bytes,
        "time_ns": rounded(result.time_ns),
        "algorithm_bytes_per_s": algorithmic,
        "bus_bytes_per_s": algorithmic * bus_factor(name, result.topology.size),
        **_on_network(result),
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
        *_chunks_text(found),
    ]
    return "\n".join(lines)


def of_workload(result: Result) -> dict[str, Any]:
    """Report of a simulation of a workload on a network: `of_played`, and how busy the links were."""
    system = result.system
    return {
        **of_played(result),
        "in_flight": system.in_flight,
        "scheduling": system.scheduling,
        "algorithms": DEFAULT_ALGORITHMS | dict(system.algorithms),
        "links": links(result),
        **_on_network(result),
    }


def _on_network(result: Result) -> dict[str, Any]:
    """The network and its load; and whether one rank stood for all, and how many events the simulation took.

    "bytes_on_links" are those that all links together carried; a message counts once on each link that it crosses.
    """
    return {
        "topology": ",".join(f"{dim.kind}:{dim.size}" for dim in result.topology.dims),
        "ranks": result.topology.size,
        "chunks": result.system.chunks,
        "busiest_link": busiest_link(result),
        "bytes_on_links": sum(size * result.network.stands_for for size in result.bytes_on.values()),
        "shortcut": result.shortcut or None,
        "no_shortcut": result.refused or None,
        "events": result.events,
        "lost_segments": result.lost,
    }


def of_calibrated(played: Played, sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Report of a simulation with measured times: `of_played`, and which sweeps it took them from."""
    return {
        **of_played(played),
        "topology": "measured collectives",
        "ranks": played.finished.shape[1],
        "calibration": [{"file": sweep.source, "ranks": sweep.ranks} for sweep in sweeps],
    }


def of_played(result: Played) -> dict[str, Any]:
    """Times of a workload and its layers.

    Of every rank's time, computation, lateness and exposed communication make up the whole: a rank's stream either
    computes, or comes late to its next operation, or stands still for the end of a collective. Shown is the rank that
    ends last. A collective's raw latency is from the moment when a rank could start it until it is done there, lateness
    and waiting for other collectives' chunks included; of the ranks the longest. Its `last_ns` is from its beginning on
    a rank, of the ranks the shortest: that of the one that came last, and so waited for none.
    """
    operations = result.workload.operations
    last = int(result.finished.max(axis=0, initial=0).argmax()) if operations else 0
    computes = np.array([operation.kind == "compute" for operation in operations], bool)
    spans = result.finished - result.started
    layers: dict[str, dict[str, Any]] = {}
    for i, operation in enumerate(operations):
        layer = layers.setdefault(
            operation.layer or operation.name, {"compute_ns": 0.0, "late_ns": 0.0, "exposed_ns": 0.0, "collectives": []}
        )
        layer["exposed_ns"] += float(result.waited[i, last])
        layer["late_ns"] += float(result.late[i, last])
        if operation.kind == "compute":
            layer["compute_ns"] += float(spans[i, last])
            continue
        latency = float((result.finished[i] - result.ready[i]).max())
        layer["collectives"].append(
            {
                "name": operation.name,
                "collective": operation.collective,
                "phase": operation.phase,
                "bytes": operation.bytes or max((sum(row) for row in operation.splits), default=0.0),
                "raw_latency_ns": rounded(latency),
                "last_ns": rounded(float(spans[i, _members(operation, spans.shape[1])].min())),
                "queued_ns": rounded(float((result.started[i] - result.ready[i]).max())),
                "exposed_ns": rounded(float(result.waited[i, last])),
            }
        )
    compute = float(spans[computes, last].sum())
    exposed = float(result.waited[:, last].sum())
    late = sum(layer["late_ns"] for layer in layers.values())
    collectives = [c for layer in layers.values() for c in layer["collectives"]]
    return {
        "workload": result.workload.name,
        "time_ns": rounded(result.time_ns),
        "compute_ns": rounded(compute),
        "late_ns": rounded(late),
        "exposed_communication_ns": rounded(exposed),
        "raw_communication_ns": rounded(sum(c["raw_latency_ns"] for c in collectives)),
        "last_communication_ns": rounded(sum(c["last_ns"] for c in collectives)),
        "layers": [{"layer": name, **layer} for name, layer in layers.items()],
    }


def _members(operation: Operation, actors: int) -> Any:
    """The ranks that take part, as an index of the actors, of which a single one stands for all ranks."""
    return np.array(operation.ranks).ravel() if operation.ranks and actors > 1 else slice(None)


def workload_text(found: dict[str, Any]) -> str:
    """`of_workload` for people."""
    busy = [["links", "count", "bytes on all", "busy: mean", "most"]]
    for row in found["links"]:
        shares = [f"{row['mean_utilisation']:.1%}", f"{row['most_utilisation']:.1%}"]
        busy.append([f"{row['dimension']}: {row['links']}", f"{row['count']:,}", size_text(row["bytes"]), *shares])
    how_played = f"{found['chunks']} chunk(s), {found['in_flight']} in flight, {found['scheduling']}; " + ", ".join(
        f"{collective} {name}" for collective, name in found["algorithms"].items()
    )
    ends = [table(busy), link_text(found["busiest_link"]), how_text(found), *_chunks_text(found)]
    return "\n".join([_whole_text(found), how_played, "", _layers_text(found), "", *ends])


def calibrated_text(found: dict[str, Any]) -> str:
    """`of_calibrated` for people."""
    last = time_text(found["last_communication_ns"])
    files = ", ".join(f"{sweep['file']} ({sweep['ranks']} ranks)" for sweep in found["calibration"])
    alone = f"its collectives take {last} together once their last rank is there; measured in {files}"
    return "\n".join([_whole_text(found), alone, "", _layers_text(found)])


def _chunks_text(found: dict[str, Any]) -> list[str]:
    """A word where the default of one chunk costs half the bandwidth."""
    several_hops = "switch" in found["topology"] or "," in found["topology"]
    if found["chunks"] > 1 or not found["busiest_link"] or not several_hops:
        return []
    what = "each message is one chunk, stored whole at every hop before it goes on; --chunks 8 sends smaller ones, "
    return [f"{what}one right after the other, as libraries do"]


def _whole_text(found: dict[str, Any]) -> str:
    total = found["time_ns"] or 1.0
    parts = {"computation": "compute_ns", "lateness": "late_ns", "exposed communication": "exposed_communication_ns"}
    shown = [
        f"{name} {time_text(found[key])} ({found[key] / total:.0%})"
        for name, key in parts.items()
        if found[key] or key != "late_ns"
    ]
    return f"{found['workload']} on {found['topology']}: {time_text(found['time_ns'])} = {' + '.join(shown)}"


def _layers_text(found: dict[str, Any]) -> str:
    parts = {"compute": "compute_ns", "late": "late_ns", "exposed": "exposed_ns"}
    if not found["late_ns"]:
        del parts["late"]
    rows = [["layer", *parts, "collective", "phase", "bytes", "raw latency", "last rank", "queued"]]
    for layer in found["layers"]:
        row = [layer["layer"], *(time_text(layer[key]) for key in parts.values())]
        for c in layer["collectives"] or [None]:
            cells = [""] * 6
            if c:
                cells = [
                    c["collective"],
                    c["phase"],
                    size_text(c["bytes"]),
                    time_text(c["raw_latency_ns"]),
                    time_text(c["last_ns"]),
                    time_text(c["queued_ns"]),
                ]
            rows.append([*row, *cells])
            row = [""] * len(row)
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; the first row is their heads. Words stand to the left, numbers to the right."""
    left = [i for i in range(len(rows[0])) if i == 0 or not any(row[i][:1].isdigit() for row in rows[1:])]
    lines = aligned(rows, left)
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _busy(result: Result) -> dict[int, float]:
    """Shares of time in which links that carried anything are busy."""
    shares = {link: size / result.network.bandwidth[link] * 1e9 for link, size in result.bytes_on.items()}
    return {link: ns / result.time_ns if result.time_ns else 0.0 for link, ns in shares.items()}


def links(result: Result) -> list[dict[str, Any]]:
    """Shares of time in which links of each dimension and kind are busy: those that carried anything."""
    kinds: dict[tuple[int, str], list[tuple[float, float]]] = {}
    each = result.network.stands_for
    for link, busy in _busy(result).items():
        where = result.topology.link_kind(result.network.one_of(link))
        kinds.setdefault(where, []).append((result.bytes_on[link], busy))
    found = []
    for (dimension, kind), used in sorted(kinds.items()):
        count = len(used) * each
        found.append(
            {
                "dimension": dimension,
                "links": kind,
                "count": count,
                "bytes": sum(size * each for size, _ in used),
                "mean_utilisation": sum(busy * each for _, busy in used) / count,
                "most_utilisation": max(busy for _, busy in used),
            }
        )
    return found


def rounded(time_ns: float) -> float:
    """To the femtosecond, which times are multiples of."""
    return round(time_ns, 6)


def busiest_link(result: Result) -> dict[str, Any] | None:
    """The link that was busy for the largest share of the time, and how many are as busy; None without messages."""
    if not result.bytes_on or not result.time_ns:
        return None
    busy = _busy(result)
    most = max(busy.values())
    alike = [link for link, share in busy.items() if share > most * (1 - 1e-9)]
    return {
        "link": result.topology.link_name(result.network.one_of(alike[0])),
        "bytes": result.bytes_on[alike[0]],
        "utilisation": most,
        "links_alike": len(alike) * result.network.stands_for,
    }


def link_text(link: dict[str, Any] | None) -> str:
    """The busiest link for people."""
    if link is None:
        return "no message was sent"
    others = f" (and {link['links_alike'] - 1} more)" if link["links_alike"] > 1 else ""
    return (
        f"busiest link: {link['link']}{others}, {size_text(link['bytes'])}, busy {link['utilisation']:.1%} of the time"
    )


def how_text(found: dict[str, Any]) -> str:
    """Describes the simulation for people: whether one rank stood for all, and how many events it took."""
    lost = f"TCP lost {found['lost_segments']:,} segments and sent them again\n" if found["lost_segments"] else ""
    if found["shortcut"]:
        return f"{lost}simulated with {found['events']:,} events; {found['shortcut']}, which is exact here"
    why = f" ({found['no_shortcut']})" if found["no_shortcut"] else ""
    return f"{lost}simulated with {found['events']:,} events, every rank by itself{why}"
