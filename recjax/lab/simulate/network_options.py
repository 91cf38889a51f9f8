"""The options of a network, of its ranks and of its transport, and what they make. Light to import."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from recjax.errors import ConfigError

if TYPE_CHECKING:
    from recjax.lab.simulate.system import System
    from recjax.lab.simulate.tcp import Tcp
    from recjax.lab.simulate.topology import Topology

NAMES = tuple(  # of all but --vary, as the parsed options have them
    """
    topology bandwidth latency endpoint_delay copy_latency chunks in_flight no_congestion tcp_window ack_delay
    switch_buffer segment tcp_timeout tcp_start shortcut
    """.split()
)
_OF_TCP = {  # defaults
    "ack_delay": "0ns",
    "switch_buffer": "",
    "segment": "64KiB",
    "tcp_timeout": "10ms",
    "tcp_start": "0",
}


def add(to: argparse.ArgumentParser, required: bool, in_flight: str) -> None:
    """Adds the options to a parser.

    Args:
      to: the parser.
      required: whether there is nothing without a network.
      in_flight: the help of --in-flight.
    """
    to.add_argument(
        "--topology",
        required=required,
        metavar="KIND:SIZE,...",
        help="dimensions of the network, the innermost first, each ring, fully_connected, switch or torus: switch:8, "
        "fully_connected:8,switch:4, torus:4x4",
    )
    to.add_argument(
        "--bandwidth",
        required=required,
        metavar="RATE,...",
        help="bandwidth of a link in one direction, one for all dimensions or one for each: 50GiB/s (2^30), 12.5GB/s "
        "(10^9), 100Gb/s (bits)",
    )
    to.add_argument(
        "--latency",
        default="0ns",
        metavar="TIME,...",
        help="latency of a link, one for all dimensions or one for each (default: 0ns)",
    )
    to.add_argument(
        "--endpoint-delay",
        default="0ns",
        metavar="TIME",
        help="delay of a rank for every message that it receives (default: 0ns)",
    )
    to.add_argument(
        "--copy-latency",
        default="0ns",
        metavar="TIME",
        help="delay of the copies between device and network memory, before the messages of a step leave (default: "
        "0ns)",
    )
    to.add_argument(
        "--chunks",
        type=int,
        default=1,
        metavar="N",
        help="number of chunks that each collective is cut into (default: 1). A chunk is stored whole at every hop "
        "before it goes on, so through a switch one chunk reaches half the bandwidth, 8 nearly all",
    )
    to.add_argument("--in-flight", type=int, metavar="N", help=in_flight)
    to.add_argument(
        "--no-congestion",
        action="store_true",
        help="let messages pass without waiting for each other, each counted once, as in analytical models",
    )
    to.add_argument(
        "--tcp-window",
        metavar="SIZE",
        help="simulate a transport like TCP, in which a pair of ranks has at most this many bytes under way; the next "
        "five options are part of it",
    )
    to.add_argument("--ack-delay", metavar="TIME", help="delay of a receiver's acknowledgement (default: 0ns)")
    to.add_argument(
        "--switch-buffer",
        metavar="SIZE",
        help="buffer of a switch; segments that do not fit are lost (default: no end)",
    )
    to.add_argument("--segment", metavar="SIZE", help="size of a segment (default: 64KiB)")
    to.add_argument("--tcp-timeout", metavar="TIME", help="time until a lost segment is sent again (default: 10ms)")
    to.add_argument(
        "--tcp-start",
        metavar="N",
        help="number of segments that a sender's own window begins with; it grows with acknowledgements and shrinks "
        "at a loss (default: 0, no such window)",
    )
    to.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=A,B,...",
        help="simulate once with each of these values of an option, such as chunks=1,8 (or of a preset's shape); "
        "given several times, every combination; values that have commas are separated by semicolons",
    )
    to.add_argument(
        "--shortcut",
        choices=("auto", "never", "always"),
        default="auto",
        help="use of one rank for all: auto, where that is exact (the default); never; always, with an error where it "
        "is not exact",
    )


def topology(options: argparse.Namespace) -> Topology:
    """Reads --topology, --bandwidth and --latency.

    Raises:
      ConfigError: what they say is no network.
    """
    from recjax.lab.simulate.topology import read_topology
    from recjax.utils.units import read_rate, read_time

    rates = [read_rate(text) for text in options.bandwidth.split(",")]
    times = [read_time(text) for text in options.latency.split(",")]
    return read_topology(options.topology, rates, times)


def system(options: argparse.Namespace, algorithms: dict[str, str | None], scheduling: Any = "fifo") -> System:
    """Reads the options about ranks and their transport.

    Args:
      options: of the command line.
      algorithms: of each collective; None or "" for its default.
      scheduling: "fifo" or "lifo".

    Raises:
      ConfigError: a time or size cannot be read, or an option of the transport stands without --tcp-window.
    """
    from recjax.lab.simulate.system import System
    from recjax.utils.units import read_time

    return System(
        algorithms={collective: name for collective, name in algorithms.items() if name},
        chunks=options.chunks,
        in_flight=options.chunks if options.in_flight is None else options.in_flight,
        scheduling=scheduling,
        endpoint_delay_ns=read_time(options.endpoint_delay, "--endpoint-delay"),
        copy_latency_ns=read_time(options.copy_latency, "--copy-latency"),
        congestion=not options.no_congestion,
        tcp=_tcp(options),
    )


def _tcp(options: argparse.Namespace) -> Tcp | None:
    from recjax.lab.simulate.tcp import Tcp
    from recjax.utils.units import read_bytes, read_time

    if options.tcp_window is None:
        if given := [name for name in _OF_TCP if getattr(options, name) is not None]:
            raise ConfigError(f"--{given[0].replace('_', '-')} is one of the transport's: give --tcp-window, too.")
        return None
    buffer = math.inf if options.switch_buffer is None else read_bytes(options.switch_buffer, "--switch-buffer")
    values: dict[str, str] = {name: getattr(options, name) or value for name, value in _OF_TCP.items()}
    return Tcp(
        read_bytes(options.tcp_window, "--tcp-window"),
        read_time(values["ack_delay"], "--ack-delay"),
        buffer,
        read_bytes(values["segment"], "--segment"),
        read_time(values["tcp_timeout"], "--tcp-timeout"),
        int(values["tcp_start"]) if values["tcp_start"].isdigit() else -1,
    )
