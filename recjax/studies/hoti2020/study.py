"""The experiments of Rashidi et al. (HOTI 2020) on this simulator: two iterations of their DLRM on 128 V100.

"Scalable Distributed Training of Recommendation Models: An ASTRA-SIM + NS3 case-study with TCP/IP transport". Known of
the study are its parameters (the model in `dlrm`; links of 100 or 800 Gb/s and 0.5 us; TCP windows of 0.5 or 0.1 MB;
switch buffers of 64 MB to 1 GB; copies of 0.01 to 100 us; 64 chunks in flight; all-reduce by double binary tree or
all-to-all; LIFO) and two results. ASSUMPTIONS names what we had to choose.

`recjax study hoti2020 --out hoti2020` takes about 8 minutes of CPU. What it gave, two iterations in ms:

    all-reduce           Flat100G  Flat800G   Hier  HierOpt
    double binary tree      37.86      7.11  37.33     7.98     computation 7.11; slowest over fastest 5.3
    direct                  36.48      7.11  34.54     7.88     5.1 (2.2 with memory copies of 100 us)

The study's "3x" between systems does not come out, nor does its "up to 50x" between congestion-aware and analytical for
a lone all-reduce: up to the largest layer (8 MiB) the direct algorithm is off by 108 in one chunk (at most N = 128) and
320 with 128 chunks at once, the tree by 2.9 and 9.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from recjax.errors import ConfigError
from recjax.simulate import report
from recjax.simulate.dlrm import PRESETS, dlrm
from recjax.simulate.execution import simulate
from recjax.simulate.system import System
from recjax.simulate.tcp import Tcp
from recjax.simulate.topology import Topology, read_topology
from recjax.simulate.workload import Operation, from_operations

ASSUMPTIONS = [
    "Flat: every GPU is a node behind one switch. Hier: 8 GPUs a node behind an in-node switch of 800 Gb/s a GPU, and "
    "a 100 Gb/s port of each GPU to a switch that joins the GPUs of the same number in all nodes. HierOpt: the same "
    "network, with collectives that go dimension by dimension (reduce-scatter inside, all-reduce across, all-gather "
    "inside; all-to-all inside, then across). All links have 0.5 us, those inside nodes too.",
    "Chunks: 128 in all systems. (The study has 1024 in flat ones; `chunk_counts` shows what they change.)",
    "The study's all-reduce by all-to-all is the direct algorithm: every rank sends its parts to all others at once, "
    "twice.",
    "Chunks' messages are stored and forwarded whole; all experiments but `transport` run without TCP.",
    "A memory copy is a latency before the messages of each step, and takes no bandwidth.",
    "TCP: fixed window, segments of 64 KiB, 1 us acknowledgement delay, a buffer shared by all ports of a "
    "switch, 10 ms until a lost segment is sent again. No slow start.",
    "Analytical: the same messages without waiting for each other (no contention at links and ports); the bytes of a "
    "message count once, whatever the links on its way, as in ASTRA-sim's analytical network.",
    "The model's own assumptions stand in recjax/simulate/dlrm.py.",
]
TREE, DIRECT = "double_binary_tree", "direct"
_PER_NODE = 8
_DEFAULTS: dict[str, Any] = {"scheduling": "lifo", "in_flight": 64}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the study's systems: its network, and how an all-reduce algorithm and the all-to-all run on it."""

    name: str
    topology: Topology
    across: str = "{}"  # the all-reduce, {} being the algorithm
    exchange: str = DIRECT

    def algorithms(self, all_reduce: str) -> dict[str, str]:
        """For `System`."""
        return {"all_reduce": self.across.format(all_reduce), "all_to_all": self.exchange}


def settings(ranks: int) -> list[Setting]:
    """The study's four systems at some number of ranks, a multiple of 16.

    Raises:
      ConfigError: another number.
    """
    if ranks < 2 * _PER_NODE or ranks % _PER_NODE or ranks & (ranks - 1):
        raise ConfigError(f"--ranks {ranks}: it takes a power of two from {2 * _PER_NODE}; the study has 128.")
    flat, deep = f"switch:{ranks}", f"switch:{_PER_NODE},switch:{ranks // _PER_NODE}"
    slow, fast, latency = 12.5e9, 100e9, [500.0]
    nodes = read_topology(deep, [fast, slow], latency)
    return [
        Setting("Flat100G", read_topology(flat, [slow], latency)),
        Setting("Flat800G", read_topology(flat, [fast], latency)),
        Setting("Hier", nodes),
        Setting("HierOpt", nodes, "hierarchical:direct,{}", "hierarchical"),
    ]


def _iterations(setting: Setting, all_reduce: str, **system: Any) -> dict[str, Any]:
    workload = dlrm(PRESETS["hoti2020"], setting.topology.size, 2, "hoti2020")
    how = System(setting.algorithms(all_reduce), **_DEFAULTS | system)
    return report.of_workload(simulate(workload, setting.topology, how))


def _systems(systems: Sequence[Setting], chunks: int) -> list[dict[str, Any]]:
    rows = []
    for setting in systems:
        for all_reduce in (TREE, DIRECT):
            found = _iterations(setting, all_reduce, chunks=chunks)
            keys = ("time_ns", "compute_ns", "exposed_communication_ns", "raw_communication_ns", "layers", "links",
                    "events", "shortcut")  # fmt: skip
            rows.append({"system": setting.name, "all_reduce": all_reduce} | {key: found[key] for key in keys})
    return rows


def _scheduling(systems: Sequence[Setting], chunks: int) -> list[dict[str, Any]]:
    return [
        {"system": setting.name, "scheduling": order, "in_flight": in_flight}
        | {"time_ns": _iterations(setting, DIRECT, chunks=chunks, scheduling=order, in_flight=in_flight)["time_ns"]}
        for setting in systems
        for in_flight in (1, 64)
        for order in ("fifo", "lifo")
    ]


def _chunk_counts(systems: Sequence[Setting], chunks: int) -> list[dict[str, Any]]:
    return [
        {"system": setting.name, "chunks": count, "time_ns": _iterations(setting, DIRECT, chunks=count)["time_ns"]}
        for setting in systems
        for count in (1, 4, 16, 64, 256, 1024)
        if count <= 8 * chunks
    ]


def _copies(systems: Sequence[Setting], chunks: int) -> list[dict[str, Any]]:
    return [
        {"system": setting.name, "copy_us": copy}
        | {"time_ns": _iterations(setting, DIRECT, chunks=chunks, copy_latency_ns=copy * 1e3)["time_ns"]}
        for setting in systems
        for copy in (0.01, 0.1, 1.0, 10.0, 100.0)
    ]


def _alone(setting: Setting, operation: Operation, all_reduce: str, **system: Any) -> dict[str, float]:
    how = System(setting.algorithms(all_reduce), **_DEFAULTS | system)
    result = simulate(from_operations("alone", [operation]), setting.topology, how)
    return {"time_ns": report.rounded(result.time_ns), "lost_segments": result.lost}


def _all_reduce(size_bytes: float) -> Operation:
    return Operation("all_reduce", "collective", collective="all_reduce", bytes=size_bytes)


def _lone_all_reduce(systems: Sequence[Setting], chunks: int) -> list[dict[str, Any]]:
    rows = []
    for setting in systems[:1]:
        for all_reduce in (TREE, DIRECT):
            for count in sorted({1, chunks}):
                for size in (2.0**e for e in range(14, 29)):
                    aware, blind = (
                        _alone(setting, _all_reduce(size), all_reduce, chunks=count, congestion=c)["time_ns"]
                        for c in (True, False)
                    )
                    rows.append({"system": setting.name, "all_reduce": all_reduce, "chunks": count, "bytes": size,
                                 "time_ns": aware, "analytical_ns": blind, "ratio": aware / blind})  # fmt: skip
    return rows


def _transport(systems: Sequence[Setting], chunks: int) -> dict[str, list[dict[str, Any]]]:
    """The all-reduce of a top layer and a many-to-one exchange by window and buffer; iterations by window."""
    alone, iterations = [], []
    ranks = systems[0].topology.size
    gather = [[float(to == 0 != i) * 2**20 for to in range(ranks)] for i in range(ranks)]
    to_one = Operation("to_one", "collective", collective="all_to_all", splits=tuple(map(tuple, gather)))
    for setting in systems[:2]:
        for window in (None, 5e5, 1e5):
            for buffer in (16e6, 64e6, 1e9):
                tcp = Tcp(window, 1000.0, buffer) if window else None
                where: dict[str, Any] = {
                    "system": setting.name,
                    "window_bytes": window,
                    "buffer_bytes": buffer if window else None,
                }
                tree = _alone(setting, _all_reduce(8 * 2.0**20), TREE, chunks=chunks, tcp=tcp)
                incast = _alone(setting, to_one, TREE, tcp=tcp)
                alone += [where | {"what": "all_reduce"} | tree, where | {"what": "many_to_one"} | incast]
                if not window:
                    break
    for setting in systems:
        for window in (None, 5e5, 1e5, 2e4, 4e3):
            tcp = Tcp(window, 1000.0) if window else None
            time = _iterations(setting, DIRECT, chunks=min(chunks, 32), tcp=tcp)["time_ns"]
            iterations.append({"system": setting.name, "window_bytes": window, "time_ns": time})
    return {"alone": alone, "iterations": iterations}


EXPERIMENTS = {
    "systems": _systems,
    "scheduling": _scheduling,
    "chunk_counts": _chunk_counts,
    "copies": _copies,
    "lone_all_reduce": _lone_all_reduce,
    "transport": _transport,
}


def run(
    ranks: int = 128, chunks: int = 128, names: Sequence[str] = tuple(EXPERIMENTS), say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Experiments of the study.

    Args:
      ranks: GPUs.
      chunks: that a collective is cut into, where it is not what varies.
      names: of EXPERIMENTS.
      say: called with the name of each experiment as it starts.

    Returns:
      Plain data: parameters, assumptions, and an entry for each experiment; see `observed`.

    Raises:
      ConfigError: an unknown experiment, or a number of ranks that makes no systems.
    """
    systems = settings(ranks)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise ConfigError(f"experiment {unknown[0]!r} is unknown. There are {', '.join(EXPERIMENTS)}.")
    found: dict[str, Any] = {"ranks": ranks, "chunks": chunks, "iterations": 2, "assumptions": ASSUMPTIONS}
    for name in names:
        say(name)
        found[name] = EXPERIMENTS[name](systems, chunks)
    return found
