"""Systems: how ranks communicate, and the results of simulating it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from recjax.errors import ConfigError
from recjax.lab.simulate.collectives import ALGORITHMS
from recjax.lab.simulate.lower import Network
from recjax.lab.simulate.tcp import Tcp
from recjax.lab.simulate.topology import Topology
from recjax.lab.simulate.workload import Workload

DEFAULT_ALGORITHMS = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "all_to_all": "direct",
    "broadcast": "tree",
    "reduce": "tree",
    "send_recv": "direct",
}


@dataclasses.dataclass(frozen=True)
class System:
    """Way in which ranks communicate.

    Attributes:
      algorithms: collective -> algorithm, as `collectives.phases` reads it; DEFAULT_ALGORITHMS for those left out,
        and in place of a hierarchical one for groups that are given by rank, which have no dimensions.
      chunks: that each collective is cut into.
      in_flight: chunks that a rank works on at a time, in each set of dimensions.
      scheduling: which collective's chunks go first: "fifo", the one issued first, or "lifo", the one issued last.
      endpoint_delay_ns: for every message received (see `collectives`).
      copy_latency_ns: copying between device and network memory, before the messages of each step leave.
      congestion: whether messages wait for each other at links; without, as in analytical models, a message takes its
        bytes over the least bandwidth on its way, once, and the latencies of all its links.
      tcp: a transport in place of whole messages; None for none.
    """

    algorithms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chunks: int = 1
    in_flight: int = 64
    scheduling: Literal["fifo", "lifo"] = "fifo"
    endpoint_delay_ns: float = 0.0
    copy_latency_ns: float = 0.0
    congestion: bool = True
    tcp: Tcp | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for values that mean nothing."""
        if self.chunks < 1 or self.in_flight < 1:
            raise ConfigError(f"chunks {self.chunks}, in flight {self.in_flight}: both must be 1 or more.")
        if self.scheduling not in ("fifo", "lifo"):
            raise ConfigError(f"scheduling {self.scheduling!r}: there are fifo and lifo.")
        if self.tcp and not self.congestion:
            raise ConfigError("without congestion there is no transport to simulate: leave out one of the two.")
        if unknown := set(self.algorithms) - set(ALGORITHMS):
            raise ConfigError(f"algorithm for {sorted(unknown)[0]!r}: there are {', '.join(ALGORITHMS)}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """Events of a simulation. Times in ns, from the start.

    Attributes:
      workload: as given.
      time_ns: when the last rank was done.
      ready, started, finished: float [operations, actors]: all it depended on was done; it began (a collective: its
        first chunk was admitted); it was done.
      waited: float [operations, actors]: how long a rank's stream stood still for this operation (see `stalls`).
      late: likewise, because the rank came late to it.
    """

    workload: Workload
    time_ns: float
    ready: np.ndarray
    started: np.ndarray
    finished: np.ndarray
    waited: np.ndarray
    late: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Result(Played):
    """Result of a simulation on a network.

    Attributes:
      topology, system: as given.
      shortcut: "" if every rank was played; else which rank stands for all.
      refused: why not one rank stood for all, "" if it did or nobody asked.
      bytes_on: link -> bytes, of the links that carried any.
      network: which names the links.
      events: that the engine played.
      lost: segments that TCP lost and sent again.
    """

    topology: Topology
    system: System
    shortcut: str
    refused: str
    bytes_on: dict[int, float]
    network: Network
    events: int
    lost: int
