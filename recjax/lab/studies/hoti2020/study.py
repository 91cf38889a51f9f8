"""The experiments of Rashidi et al. (HOTI 2020) on this simulator: two iterations of their DLRM on 128 V100.

"Scalable Distributed Training of Recommendation Models: An ASTRA-SIM + NS3 case-study with TCP/IP transport". Known of
the study are its parameters (the model in `dlrm`; links of 100 or 800 Gb/s and 0.5 us; TCP windows of 0.5 or 0.1 MB;
switch buffers of 64 MB to 1 GB; copies of 0.01 to 100 us; 64 chunks in flight; all-reduce by double binary tree or
all-to-all; LIFO) and two results. ASSUMPTIONS names what we had to choose.

docs/results/hoti2020.md has what it gave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from recjax.errors import ConfigError
from recjax.lab.simulate import report
from recjax.lab.simulate.dlrm import PRESETS, dlrm
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import System
from recjax.lab.simulate.tcp import Tcp
from recjax.lab.simulate.topology import Topology, read_topology
from recjax.lab.simulate.workload import Operation, from_operations
from recjax.lab.studies.finished import Finished

ASSUMPTIONS = [
    "Flat: every GPU is a node at one switch. Hier: 8 GPUs a node at an in-node switch of 800 Gb/s a GPU, and "
    "a 100 Gb/s port of each GPU to a switch that joins the GPUs of the same number in all nodes. HierOpt: the same "
    "network, with collectives that go dimension by dimension (reduce-scatter inside, all-reduce across, all-gather "
    "inside; all-to-all inside, then across). All links have 0.5 us, those inside nodes too.",
    "Chunks: the study has 1024 in flat systems and 128 in hierarchical ones, as --full and the last of the counts "
    "that are compared; else 32 in all, and 16 in iterations with the double binary tree, for which all ranks must be "
    "played.",
    "The study's all-reduce by all-to-all is the direct algorithm: every rank sends its parts to all others at once, "
    "twice.",
    "TCP throughout: segments of 128 KiB, a window of 0.5 MB, 1 us acknowledgement delay, a buffer of 1 GB shared by "
    "all ports of a switch, 10 ms until a lost segment is sent again. Congestion control: a sender's own window begins "
    "with one segment, doubles in a round trip until a loss halves it, and then grows by a segment in a round trip; it "
    "stays between messages.",
    "Buffers are those of switches of 128 GPUs; of fewer or more GPUs they are smaller or larger in proportion.",
    "Gradients of MLPs have 16 bits, as everything that the source sends, except where they are varied.",
    "A memory copy is a latency before the messages of each step, and takes no bandwidth; it is 0.01 us, their least, "
    "where it does not vary.",
    "Analytical: the same messages without waiting for each other (no contention at links and ports) and without TCP; "
    "the bytes of a message count once, whatever the links on its way, as in ASTRA-sim's analytical network.",
    "The model's own assumptions stand in recjax/lab/simulate/dlrm.py. 60 TFLOP/s are reached where they do not vary.",
]
TREE, DIRECT = "double_binary_tree", "direct"
_PER_NODE, _MOST_IN_HIERARCHICAL, _TREE_CHUNKS = 8, 128, 16
_GPUS = 128  # of the source, for whose switches buffers are said
TCP = Tcp(5e5, 1000.0, 1e9, 2.0**17, start_segments=1)
_DEFAULTS: dict[str, Any] = {"scheduling": "lifo", "in_flight": 64, "tcp": TCP, "copy_latency_ns": 10.0}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the study's systems: its network, and how an all-reduce algorithm and the all-to-all run on it."""

    name: str
    topology: Topology
    across: str = "{}"  # the all-reduce, {} being the algorithm
    exchange: str = DIRECT
    flat: bool = False

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
        Setting("Flat100G", read_topology(flat, [slow], latency), flat=True),
        Setting("Flat800G", read_topology(flat, [fast], latency), flat=True),
        Setting("Hier", nodes),
        Setting("HierOpt", nodes, "hierarchical:direct,{}", "hierarchical"),
    ]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Simulations of the study, each of which is kept when it is done.

    Attributes:
      systems: that are compared.
      chunks: of a collective; in hierarchical systems 128 at most.
      full: whether the largest numbers of chunks are tried, too.
      keep: (name, function) -> what the function gives, now or in an earlier run.
    """

    systems: Sequence[Setting]
    chunks: int
    full: bool
    keep: Callable[[str, Callable[[], Any]], Any]

    def chunks_of(self, setting: Setting) -> int:
        """Chunks of a collective in a system."""
        return self.chunks if setting.flat else min(self.chunks, _MOST_IN_HIERARCHICAL)

    def buffered(self, system: dict[str, Any]) -> dict[str, Any]:
        """Options whose buffer, which is said for a switch of the source's GPUs, is that of as many as here."""
        if not (tcp := system["tcp"]):
            return system
        buffer_bytes = tcp.buffer_bytes * self.systems[0].topology.size / _GPUS
        return system | {"tcp": dataclasses.replace(tcp, buffer_bytes=buffer_bytes)}

    def iterations(
        self, setting: Setting, all_reduce: str, flops: float = 60e12, gradient_bytes: int = 0, **system: Any
    ) -> dict[str, Any]:
        """Two iterations: "time_ns", "compute_ns", "exposed_communication_ns", "raw_communication_ns", "layers"."""
        how = _DEFAULTS | {"chunks": self.chunks_of(setting)} | system
        if all_reduce == TREE and not self.full:  # no rank stands for all: minutes each with more chunks
            how["chunks"] = min(self.chunks, _TREE_CHUNKS)
        how = self.buffered(how)

        def run() -> dict[str, Any]:
            shape = dataclasses.replace(PRESETS["hoti2020"], flops_per_s=flops, gradient_bytes=gradient_bytes)
            workload = dlrm(shape, setting.topology.size, 2, "hoti2020")
            found = report.of_workload(
                simulate(workload, setting.topology, System(setting.algorithms(all_reduce), **how))
            )
            keys = ("time_ns", "compute_ns", "exposed_communication_ns", "raw_communication_ns", "layers", "shortcut")
            return {key: found[key] for key in keys} | {"lost_segments": found["lost_segments"]}

        width = f" gradients of {gradient_bytes} bytes" if gradient_bytes else ""
        name = f"iterations {setting.name} {all_reduce} {flops:g}{width} {_name(how)}"
        return cast(dict[str, Any], self.keep(name, run))

    def alone(self, setting: Setting, operation: Operation, all_reduce: str, **system: Any) -> dict[str, float]:
        """One collective: "time_ns" and "lost_segments"."""
        how = self.buffered(_DEFAULTS | system)

        def run() -> dict[str, float]:
            workload = from_operations("alone", [operation])
            result = simulate(workload, setting.topology, System(setting.algorithms(all_reduce), **how))
            return {"time_ns": report.rounded(result.time_ns), "lost_segments": result.lost}

        name = f"alone {setting.name} {operation.name} {operation.bytes:g} {all_reduce} {_name(how)}"
        return cast(dict[str, float], self.keep(name, run))


def _name(how: dict[str, Any]) -> str:
    """Options as a text; equal ones have equal texts."""
    return ", ".join(
        f"{key}={dataclasses.astuple(of) if key == 'tcp' and of else of}" for key, of in sorted(how.items())
    )


def _systems(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"system": setting.name, "all_reduce": all_reduce} | runs.iterations(setting, all_reduce)
        for setting in runs.systems
        for all_reduce in (TREE, DIRECT)
    ]


def _flops(runs: Runs) -> list[dict[str, Any]]:
    """By the FLOP/s that a GPU reaches."""
    return [
        {"system": setting.name, "tflops": tflops}
        | {"time_ns": runs.iterations(setting, DIRECT, tflops * 1e12)["time_ns"]}
        for setting in runs.systems
        for tflops in (15, 30, 45, 60, 90)
    ]


def _gradients(runs: Runs) -> list[dict[str, Any]]:
    """By the bytes of a gradient of the MLPs."""
    return [
        {"system": setting.name, "bytes": size}
        | {"time_ns": runs.iterations(setting, DIRECT, gradient_bytes=size)["time_ns"]}
        for setting in runs.systems
        for size in (2, 4)
    ]


def _in_flight(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"system": setting.name, "scheduling": order, "in_flight": in_flight}
        | {"time_ns": runs.iterations(setting, DIRECT, scheduling=order, in_flight=in_flight)["time_ns"]}
        for setting in runs.systems
        for in_flight in (1, 16, 64, 128)
        for order in (("fifo", "lifo") if in_flight >= 64 else ("lifo",))
    ]


def _chunk_counts(runs: Runs) -> list[dict[str, Any]]:
    """By chunks, with copies of 1 us, which is what a chunk costs beside its bytes.

    Up to the study's numbers, or 32 times as many as elsewhere.
    """
    return [
        {"system": setting.name, "chunks": count}
        | {"time_ns": runs.iterations(setting, DIRECT, chunks=count, copy_latency_ns=1e3)["time_ns"]}
        for setting in runs.systems
        for count in (1, 4, 16, 64, _MOST_IN_HIERARCHICAL, *((1024,) if setting.flat else ()))
        if count <= 32 * runs.chunks
    ]


def _copies(runs: Runs) -> list[dict[str, Any]]:
    """By memory copies; with their double binary tree, which is dear to simulate, only the ends unless `full`."""
    return [
        {"system": setting.name, "all_reduce": all_reduce, "copy_us": copy}
        | {"time_ns": runs.iterations(setting, all_reduce, copy_latency_ns=copy * 1e3)["time_ns"]}
        for setting in runs.systems
        for all_reduce in (TREE, DIRECT)
        for copy in ((0.01, 100.0) if all_reduce == TREE and not runs.full else (0.01, 1.0, 10.0, 100.0))
    ]


def _all_reduce(size_bytes: float) -> Operation:
    return Operation("all_reduce", "collective", collective="all_reduce", bytes=size_bytes)


def _lone_all_reduce(runs: Runs) -> list[dict[str, Any]]:
    rows = []
    setting = runs.systems[0]
    for all_reduce in (TREE, DIRECT):
        for count in sorted({1, min(runs.chunks, 1024 if runs.full else 16)}):
            for size in (2.0**e for e in range(14, 29)):
                how: dict[str, Any] = {"chunks": count, "tcp": None, "copy_latency_ns": 0.0}
                one = _all_reduce(size)
                aware, blind = (
                    runs.alone(setting, one, all_reduce, congestion=c, **how)["time_ns"] for c in (True, False)
                )
                rows.append(
                    {
                        "system": setting.name,
                        "all_reduce": all_reduce,
                        "chunks": count,
                        "bytes": size,
                        "time_ns": aware,
                        "analytical_ns": blind,
                        "ratio": aware / blind,
                    }
                )
    return rows


def _transport(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """The all-reduce of a top layer and a many-to-one exchange, and whole iterations, by window and buffer."""
    alone, iterations = [], []
    ranks = runs.systems[0].topology.size
    gather = [[float(to == 0 != i) * 2**20 for to in range(ranks)] for i in range(ranks)]
    to_one = Operation("to_one", "collective", collective="all_to_all", splits=tuple(map(tuple, gather)))
    count = min(runs.chunks, 16)
    ways = (None, TCP, dataclasses.replace(TCP, buffer_bytes=64e6), dataclasses.replace(TCP, window_bytes=1e5))
    for setting in runs.systems:
        for window in (None, 5e5, 1e5):
            for buffer in (16e6, 64e6, 1e9):
                tcp = dataclasses.replace(TCP, window_bytes=window, buffer_bytes=buffer) if window else None
                where: dict[str, Any] = {"system": setting.name, "window_bytes": window}
                where["buffer_bytes"] = buffer if window else None
                tree = runs.alone(setting, _all_reduce(8 * 2.0**20), TREE, chunks=count, tcp=tcp)
                incast = runs.alone(setting, to_one, TREE, chunks=1, tcp=tcp)
                alone += [where | {"what": "all_reduce"} | tree, where | {"what": "many_to_one"} | incast]
                if not window:
                    break
    for setting in runs.systems:
        for all_reduce in (TREE, DIRECT):
            for how in ways:
                found = runs.iterations(setting, all_reduce, chunks=min(runs.chunks, 32), tcp=how)
                of_tcp = {key: getattr(how, key) if how else None for key in ("window_bytes", "buffer_bytes")}
                results = {key: found[key] for key in ("time_ns", "lost_segments")}
                iterations.append({"system": setting.name, "all_reduce": all_reduce} | of_tcp | results)
    return {"alone": alone, "iterations": iterations}


EXPERIMENTS: dict[str, Callable[[Runs], Any]] = {
    "systems": _systems,
    "flops": _flops,
    "in_flight": _in_flight,
    "chunk_counts": _chunk_counts,
    "copies": _copies,
    "lone_all_reduce": _lone_all_reduce,
    "transport": _transport,
    "gradients": _gradients,
}


def run(
    out: Path,
    ranks: int = 128,
    chunks: int = 32,
    full: bool = False,
    names: Sequence[str] = tuple(EXPERIMENTS),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Experiments of the study; what is done already is not done again.

    Args:
      out: folder of what is done.
      ranks: GPUs.
      chunks: that a collective is cut into, where it is not what varies; in hierarchical systems 128 at most.
      full: whether the largest numbers of chunks are tried, too.
      names: of EXPERIMENTS.
      say: called with the name of each experiment as it starts.

    Returns:
      Plain data: parameters, assumptions, and an entry for each experiment; see `observed`.

    Raises:
      ConfigError: an unknown experiment, a number of ranks that makes no systems, or `out` is another study's.
    """
    systems = settings(ranks)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise ConfigError(f"experiment {unknown[0]!r} is unknown. There are {', '.join(EXPERIMENTS)}.")
    runs = Runs(systems, chunks, full, Finished(out, {"ranks": ranks}, "hoti2020").get)
    found: dict[str, Any] = {"ranks": ranks, "chunks": chunks, "iterations": 2, "assumptions": ASSUMPTIONS}
    for name in names:
        say(name)
        found[name] = EXPERIMENTS[name](runs)
    return found
