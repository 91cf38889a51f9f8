"""Power of hosts that serve a model, and what kinds of storage allow: calculators whose every input has a name.

Watts cannot be measured here, and there is one disk. A request that misses some rows in the cache reads a block of the
device for each. As many reads are under way as the device takes at once, so that it gives that number over its latency
of them a second, or as many as its bytes a second allow.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Host:
    """A kind of host.

    Attributes:
      name: of it.
      qps: requests a second that one answers within the latency that is asked for.
      power: of one under that load, in watts or in any unit, as long as it is the same one for all.
      helpers: of another kind of hosts for each of this kind, whose power is `helper_power` each: those that hold, in
        their memory, tables that do not fit here.
      helper_power: of one of those.
    """

    name: str
    qps: float
    power: float
    helpers: float = 0.0
    helper_power: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Hosts that serve the same requests without storage beyond memory, and with it.

    Attributes:
      name: of it.
      qps: of all requests.
      without, with_: hosts of each way.
    """

    name: str
    qps: float
    without: Host
    with_: Host


def power(host: Host, qps: float) -> dict[str, Any]:
    """Hosts for a rate, rounded up, and their power; with the arithmetic as text."""
    hosts = math.ceil(qps / host.qps - 1e-9)
    helpers = hosts * host.helpers
    total = hosts * host.power + helpers * host.helper_power
    text = f"{qps:,.0f} / {host.qps:g} = {hosts:,} hosts x {host.power:g}"
    if helpers:
        text += f" + {helpers:,.0f} x {host.helper_power:g}"
    return {"hosts": hosts, "power": total, "arithmetic": f"{text} = {total:,.0f}"}


def saved(scenario: Scenario) -> dict[str, Any]:
    """Both ways of a scenario, and the share of power that the second one saves."""
    without, with_ = power(scenario.without, scenario.qps), power(scenario.with_, scenario.qps)
    return {
        "name": scenario.name,
        "qps": scenario.qps,
        "without": without,
        "with": with_,
        "saved": 1 - with_["power"] / without["power"],
    }


# The deployments of the paper, power in units of its largest host. M1: two sockets with all in memory, or one socket
# with flash. M2: accelerators with a fifth as many hosts beside them for the tables of users, or with Optane. M3: one
# model a host, whose accelerators wait for memory, or several models a host: QPS are the shares of use.
PAPER = (
    Scenario("M1, one socket and flash", 288_000, Host("two sockets", 240, 1.0), Host("one socket, flash", 120, 0.4)),
    Scenario(
        "M2, no hosts beside it",
        675_000,
        Host("accelerators and hosts beside", 450, 1.0, 0.2, 0.25),
        Host("accelerators, Optane", 450, 1.0),
    ),
    Scenario("M3, several models a host", 63_000, Host("63% used", 0.63, 1.0), Host("90% used", 0.9, 1.01)),
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of storage.

    Attributes:
      name: of it.
      block_bytes: least that is read.
      latency_us: of a read.
      outstanding: reads under way at once.
      bytes_per_s: that it reads.
    """

    name: str
    block_bytes: int
    latency_us: float
    outstanding: int
    bytes_per_s: float

    @property
    def reads_per_s(self) -> float:
        """Blocks a second."""
        return min(1e6 * self.outstanding / self.latency_us, self.bytes_per_s / self.block_bytes)

    def requests_per_s(self, misses: float) -> float:
        """Requests a second of so many rows each that are not in the cache; infinite without any."""
        return self.reads_per_s / misses if misses else math.inf

    def request_us(self, misses: float) -> float:
        """Time of a request's reads alone on the device: in as many turns as it takes."""
        return math.ceil(misses / self.outstanding) * self.latency_us


# Latencies and blocks as the paper has them, about; 64 reads at once and bytes a second are chosen from data sheets.
DEVICES = (
    Device("NAND flash", 4096, 100.0, 64, 3.2e9),
    Device("3D XPoint", 512, 10.0, 64, 6.0e9),
)
