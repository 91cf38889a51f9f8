"""Short ways to simulate, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recjax.lab.formats.trace import Event, Trace
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import Result, System
from recjax.lab.simulate.topology import read_topology
from recjax.lab.simulate.workload import Operation, Workload, from_operations

GIB = 2.0**30


def topology(text: str, bandwidth: Any = 1e9, latency: Any = 0.0) -> Any:
    """With 1e9 bytes/s, the default, a byte takes a nanosecond."""
    rates = [bandwidth] if isinstance(bandwidth, (int, float)) else bandwidth
    times = [latency] if isinstance(latency, (int, float)) else latency
    return read_topology(text, rates, times)


def collective(
    name: str,
    algorithm: str,
    text: str,
    size: float,
    *,
    bandwidth: Any = 1e9,
    latency: Any = 0.0,
    shortcut: Any = "auto",
    **system: Any,
) -> Result:
    """One collective by itself."""
    how = System({name: algorithm}, **system)
    workload = from_operations(name, [Operation(name, "collective", collective=name, bytes=size)])
    return simulate(workload, topology(text, bandwidth, latency), how, shortcut)


def exchange(sizes: dict[tuple[int, int], float], ranks: int, name: str = "exchange", **more: Any) -> Operation:
    """An all-to-all of these sizes alone: (from, to) -> bytes."""
    splits = tuple(tuple(sizes.get((i, j), 0.0) for j in range(ranks)) for i in range(ranks))
    return Operation(name, "collective", collective="all_to_all", splits=splits, **more)


def play(operations: list[Operation], where: Any, shortcut: Any = "auto", **system: Any) -> Result:
    """Operations on a topology."""
    return simulate(workload(operations), where, System(**system), shortcut)


def workload(operations: list[Operation]) -> Workload:
    """A workload of these."""
    return from_operations("test", operations)


def write_trace(folder: Path, format: Any, ranks: Sequence[Sequence[Event]]) -> Path:
    """A new folder with a trace of these events, by rank; `format` is a module of `recjax.lab.formats`."""
    folder.mkdir()
    for name, content in format.write(Trace(len(ranks), {r: tuple(of) for r, of in enumerate(ranks)})).items():
        (folder / name).write_bytes(content)
    return folder


def finish(result: Result, name: str) -> list[float]:
    """When an operation was done, on every rank that was played."""
    names = [operation.name for operation in result.workload.operations]
    return result.finished[names.index(name)].tolist()
