"""`recjax simulate ...`: options and what they run. Light to import; the work is elsewhere."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recjax.errors import ConfigError
from recjax.lab.simulate import network_options as network
from recjax.utils import log
from recjax.utils.paths import expanded

if TYPE_CHECKING:
    from recjax.lab.simulate.system import Played
    from recjax.lab.simulate.topology import Topology
    from recjax.lab.simulate.workload import Workload

Print = Callable[[argparse.Namespace, Any, Callable[[], str]], None]
_COLLECTIVES = ("all_reduce", "all_to_all", "reduce_scatter", "all_gather", "broadcast", "reduce", "send_recv")


def add(
    verbs: Any,
    verb: Callable[..., argparse.ArgumentParser],
    show: Print,
    read_trace: Callable[[Path, Topology | None], Workload],
) -> Any:
    """Adds the verb.

    Args:
      verbs: the subparsers to add to.
      verb: makes a parser: (of, name, run, what it does, example).
      show: prints a result: (options, object for --json, text).
      read_trace: the workload of a folder with a communication trace, for a topology or for any.

    Returns:
      The subparsers of its actions, which a study may join.
    """
    what = "predict collectives and whole iterations on a network, owned or not"
    simulate = verbs.add_parser(
        "simulate",
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog="example: recjax simulate collective --collective all_to_all --topology switch:8 --bytes 4MiB "
        "--bandwidth 100Gb/s --latency 500ns",
    )
    actions = simulate.add_subparsers(title="actions", metavar="ACTION", required=True)

    one: argparse.ArgumentParser
    one = verb(
        actions,
        "collective",
        lambda o: _each(o, one, show, _collective),
        "simulate one collective by itself",
        "simulate collective --collective all_reduce --algorithm ring --topology switch:8 --bytes 1MiB --bandwidth "
        "50GiB/s --latency 500ns --endpoint-delay 10ns",
    )
    one.add_argument(
        "--collective",
        required=True,
        type=lambda text: text.replace("-", "_"),
        choices=_COLLECTIVES,
        help="collective to simulate",
    )
    one.add_argument(
        "--algorithm",
        metavar="NAME",
        help="algorithm: ring, direct, double_binary_tree, halving_doubling over all ranks (for broadcast and reduce: "
        "tree, ring, direct; for send_recv: direct, from the first rank to the last, or ring, from every rank to the "
        "next); or one for each dimension, as in ring,direct or hierarchical (default: ring; direct for all_to_all "
        "and send_recv, tree for broadcast and reduce)",
    )
    one.add_argument(
        "--bytes",
        required=True,
        metavar="M",
        help="size of the collective, as nccl-tests count it: all-reduce, broadcast, reduce: the tensor; send_recv: "
        "the message; all-to-all: what a rank sends; reduce-scatter: its input; all-gather: its output",
    )
    network.add(one, required=True, in_flight="chunks that a rank works on at a time (default: 64)")
    one.set_defaults(in_flight=64)

    whole: argparse.ArgumentParser
    whole = verb(
        actions,
        "workload",
        lambda o: _each(o, whole, show, lambda one: _workload(one, whole, read_trace)),
        "simulate training iterations",
        "simulate workload hoti2020 batch_per_rank=256 --topology switch:16 --bandwidth 100Gb/s --latency 500ns "
        "--chunks 16 --scheduling lifo",
    )
    whole.add_argument(
        "workload",
        metavar="DIR|FILE|PRESET",
        help="folder of a communication trace in any format (see `recjax trace`), text workload of ASTRA-sim 1, or "
        "hoti2020, the DLRM of Rashidi et al. (HOTI 2020)",
    )
    whole.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="name=value",
        help="shapes of a preset to change, such as parallelism=data tables=128 bottom=512-64",
    )
    whole.add_argument(
        "--calibration",
        type=expanded,
        action="append",
        metavar="FILE",
        help="for a trace, in place of a network: file that `recjax replay --sweep --out FILE` wrote for as many "
        "devices; given once for each number of ranks that its collectives have",
    )
    network.add(
        whole,
        required=False,
        in_flight="chunks that a rank works on at a time, of each group of ranks (default: as many as --chunks, so a "
        "group does one collective after the other, as a communicator of NCCL on its stream; ASTRA-sim: 64)",
    )
    for collective in _COLLECTIVES:
        whole.add_argument(
            f"--{collective.replace('_', '-')}",
            metavar="NAME",
            help=f"algorithm of {collective}, as in `recjax simulate collective`",
        )
    whole.add_argument(
        "--scheduling",
        choices=("fifo", "lifo"),
        default="fifo",
        help="order of chunks: those of the collective issued first (fifo) or last (lifo) go first (default: fifo)",
    )
    whole.add_argument(
        "--no-lateness",
        action="store_true",
        help="for a trace with times: ranks begin as soon as they may (default: as late as they did)",
    )
    whole.add_argument(
        "--iterations", type=int, default=1, metavar="N", help="number of iterations of the training loop (default: 1)"
    )
    whole.add_argument(
        "--out",
        type=expanded,
        metavar="DIR",
        help="also write simulation.png, simulation.json and trace.json (for ui.perfetto.dev) to this folder",
    )

    return actions


def _progress(every_s: float = 5.0) -> Callable[[float, float], None]:
    """Prints to standard error how far a simulation is, where it takes long."""
    from recjax.utils.units import time_text

    said = time.monotonic()

    def watch(share: float, now_ns: float) -> None:
        nonlocal said
        if time.monotonic() - said > every_s:
            said = time.monotonic()
            log.info(f"simulate: {share:.0%} of the operations are done, at {time_text(now_ns)}")

    return watch


def _each(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    show: Print,
    simulated: Callable[[argparse.Namespace], tuple[dict[str, Any], str]],
) -> None:
    """Simulates once, or once for each combination of what varies, and shows it."""
    if not options.vary:
        found, text = simulated(options)
        show(options, found, lambda: text)
        return
    from recjax.lab.simulate import varied

    runs: dict[str, dict[str, Any]] = {}
    for name, one in varied.each(options, parser):
        if getattr(options, "out", None):
            one.out = options.out / name.replace("/", "_")
        log.info(f"simulate: {name}")
        runs[name], _ = simulated(one)
    show(
        options,
        {"runs": [{"varied": name, **found} for name, found in runs.items()]},
        lambda: varied.compared([*runs], [*runs.values()]),
    )


def _collective(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from recjax.lab.simulate import report
    from recjax.lab.simulate.execution import simulate
    from recjax.lab.simulate.workload import Operation, from_operations
    from recjax.utils.units import read_bytes

    operation = Operation(
        options.collective, "collective", collective=options.collective, bytes=read_bytes(options.bytes)
    )
    system = network.system(options, {options.collective: options.algorithm})
    result = simulate(
        from_operations(options.collective, [operation]),
        network.topology(options),
        system,
        options.shortcut,
        _progress(),
    )
    found = report.of_collective(result)
    return found, report.collective_text(found)


def _workload(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    read_trace: Callable[[Path, Topology | None], Workload],
) -> tuple[dict[str, Any], str]:
    from recjax.lab.simulate import draw, report
    from recjax.lab.simulate.execution import simulate
    from recjax.utils.files import write_json, write_whole

    result: Played
    if options.calibration:
        result, found = _calibrated(options, parser, read_trace)
    elif options.topology is None or options.bandwidth is None:
        raise ConfigError(
            "without --topology and --bandwidth there is no network: give both, or --calibration with what "
            "`recjax replay --sweep` measured."
        )
    else:
        topology = network.topology(options)
        algorithms = {collective: getattr(options, collective) for collective in _COLLECTIVES}
        system = network.system(options, algorithms, options.scheduling)
        result = simulate(_read(options, topology, read_trace), topology, system, options.shortcut, _progress())
        found = report.of_workload(result)
    text = report.calibrated_text if options.calibration else report.workload_text
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        draw.draw_workload(result, found, options.out / "simulation.png")
        write_json(options.out / "simulation.json", found)
        write_whole(options.out / "trace.json", json.dumps(draw.chrome_trace(result)).encode())
    written = f"\n\npicture and trace: {options.out}/simulation.png, trace.json" if options.out else ""
    return found, text(found) + written


def _calibrated(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    read_trace: Callable[[Path, Topology | None], Workload],
) -> tuple[Played, dict[str, Any]]:
    from recjax.lab.simulate import report
    from recjax.lab.simulate.calibrated import play, read_sweep

    of_network = (*network.NAMES, *_COLLECTIVES, "scheduling", "iterations")
    if given := [name for name in of_network if getattr(options, name) != parser.get_default(name)]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is of a network, in whose place --calibration stands. Leave out one of "
            "the two."
        )
    path = expanded(options.workload)
    if not path.is_dir() or options.overrides:
        raise ConfigError(f"--calibration is for the folder of a trace alone, and {options.workload} is none.")
    sweeps = [read_sweep(file) for file in options.calibration]
    played = play(_begun(options, read_trace(path, None)), sweeps)
    return played, report.of_calibrated(played, sweeps)


def _read(
    options: argparse.Namespace, topology: Topology, read_trace: Callable[[Path, Topology | None], Workload]
) -> Workload:
    from recjax import settings
    from recjax.lab.simulate.astra_text import read_text
    from recjax.lab.simulate.dlrm import PRESETS, dlrm

    if options.no_lateness and not expanded(options.workload).is_dir():
        raise ConfigError(f"--no-lateness is about the times of a trace, and {options.workload} has none.")
    if options.workload in PRESETS:
        shape = settings.override(PRESETS[options.workload], options.overrides)
        return dlrm(shape, topology.size, options.iterations, options.workload)
    path = expanded(options.workload)
    if not path.exists():
        raise ConfigError(
            f"{path} is neither a file or folder nor one of the presets {', '.join(PRESETS)}. Name a folder that "
            "`recjax trace` wrote, or a workload of ASTRA-sim 1."
        )
    if options.overrides:
        raise ConfigError(f"{options.overrides[0]}: shapes can be changed of presets only, not of {path}.")
    if path.is_dir():
        return _begun(options, read_trace(path, topology))
    return read_text(path, topology, options.iterations)


def _begun(options: argparse.Namespace, workload: Workload) -> Workload:
    """The workload of a trace, whose ranks begin late or at once."""
    from recjax.lab.simulate.workload import without_lateness

    return without_lateness(workload) if options.no_lateness else workload
