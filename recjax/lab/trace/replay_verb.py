"""The verb `recjax replay`: its arguments, and what it calls."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from recjax.errors import ConfigError, DeviceError
from recjax.parallel import distributed
from recjax.settings.values import either
from recjax.utils.paths import expanded, located

if TYPE_CHECKING:
    from recjax.parallel.mesh import MeshConfig


def add(verb: Callable[..., argparse.ArgumentParser], formats: Sequence[str]) -> None:
    """Adds the verb.

    Args:
      verb: (name, function from options to a result and how to write it as text, help, example) -> its parser.
      formats: of traces that can be read.
    """
    again = verb(
        "replay",
        replay,
        "run a trace's collectives again without the model, or plain ones of all sizes",
        "replay traces/first --repeats 20",
    )
    again.add_argument(
        "folder", nargs="?", type=expanded, metavar="DIR", help="folder of a trace in any of the formats"
    )
    again.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b=value",
        help="settings to change: mesh.platform and mesh.devices; others have no meaning here",
    )
    again.add_argument("--format", choices=formats, help="format of the files (default: detected)")
    again.add_argument("--repeats", type=int, default=20, metavar="N", help="number of timed runs (default: 20)")
    again.add_argument(
        "--shrink",
        type=int,
        metavar="N",
        help="replay only the first N ranks, without collectives of which one rank is left",
    )
    again.add_argument(
        "--gaps", action="store_true", help="compute between the collectives for as long as the trace did"
    )
    again.add_argument(
        "--splits",
        choices=("padded", "ragged"),
        default="padded",
        help="way to send all-to-alls whose splits the trace holds; ragged: not on CPU (default: padded)",
    )
    again.add_argument("--sweep", action="store_true", help="measure collectives of all sizes, without a trace")
    again.add_argument(
        "--devices", type=int, default=0, metavar="N", help="with --sweep: number of devices (default: all there are)"
    )
    again.add_argument(
        "--collective",
        action="append",
        metavar="KIND",
        help="with --sweep: kind of collective, such as all_reduce; may be repeated (default: four kinds)",
    )
    again.add_argument(
        "--min", default="8", metavar="SIZE", help="with --sweep: smallest message: 8, 64KiB, 1.5MB (default: 8)"
    )
    again.add_argument(
        "--max",
        default="1GiB",
        metavar="SIZE",
        help="with --sweep: largest message, if memory holds it (default: 1GiB)",
    )
    again.add_argument(
        "--factor",
        type=int,
        default=4,
        metavar="F",
        help="with --sweep: ratio of one size to the size before (default: 4)",
    )
    again.add_argument(
        "--out",
        type=expanded,
        metavar="FILE",
        help="also write the result to this file as JSON; with --sweep after each of its passes",
    )
    again.set_defaults(
        tunables=True,
        together=True,
        interrupted="stopped by Ctrl-C. Of a sweep, --out has what the passes that were done have measured.",
    )


def replay(options: argparse.Namespace) -> tuple[Any, Callable[[], str]]:
    """Replays a trace, or sweeps."""
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}; at least 1 run must count.")
    if options.folder and options.folder.name.startswith("mesh.") and "=" in options.folder.name:
        options.overrides, options.folder = [options.folder.name, *options.overrides], None
    if options.sweep == (options.folder is not None):
        raise ConfigError("replay needs either the folder of a trace, or --sweep.")
    from recjax.lab.trace import show
    from recjax.utils.files import write_json

    result = _sweep(options) if options.sweep else _replay(options)
    if options.out and distributed.is_main():
        write_json(located(options.out), result)
    text = show.sweep_text if options.sweep else show.replay_text
    return result, lambda: text(result)


def _replay(options: argparse.Namespace) -> dict[str, Any]:
    from recjax.lab.formats import read_trace
    from recjax.lab.replay import replay as replays
    from recjax.lab.replay.program import left_out, shrink, slots
    from recjax.lab.replay.replay_report import figures
    from recjax.parallel.mesh import make_mesh

    given = read_trace(options.folder, options.format)
    missing = [rank for rank in range(given.world) if rank not in given.ranks]
    dropped: list[dict[str, Any]] = []
    if options.shrink is not None:
        if not 2 <= options.shrink <= given.world:
            raise ConfigError(f"--shrink is {options.shrink}; give 2 to {given.world}, the ranks of the trace.")
        missing = [rank for rank in missing if rank < options.shrink]
        dropped = left_out(given, options.shrink)
        given = shrink(given, options.shrink)
    found = slots(given)
    if not found:
        raise ConfigError(f"{options.folder}: the trace holds no collective, so there is nothing to replay.")
    try:
        mesh = replays.ranks_mesh(list(make_mesh(_mesh(options, given.world)).devices.flat))
    except DeviceError as error:
        raise DeviceError(f"{error} Or replay fewer of the trace's ranks with --shrink.") from error
    distributed.note(f"replaying {len(found)} collectives of {given.world} ranks, {options.repeats} times")
    prepared = replays.Prepared(found, mesh, options.splits, options.gaps)
    (times,) = replays.measure([prepared], [options.repeats])
    device = mesh.devices.flat[0].device_kind
    about = {"label": given.about["label"], "ranks": given.world, "device": device, "repeats": options.repeats}
    about |= {"splits": options.splits, "gaps": options.gaps, "missing": missing, "left_out": dropped}
    return {**about, **figures(found, times)}


def _mesh(options: argparse.Namespace, devices: int) -> MeshConfig:
    """The devices of a replay, as its settings say; `devices` of them, or if 0 as many as there are."""
    from recjax import settings
    from recjax.parallel.mesh import MeshConfig

    if wrong := [s for s in options.overrides if not s.startswith(("mesh.devices=", "mesh.platform="))]:
        raise ConfigError(f"{wrong[0]}: a replay has the settings mesh.platform and mesh.devices alone.")
    given = settings.override(MeshConfig(), [s.removeprefix("mesh.") for s in options.overrides])
    if given.devices and devices and given.devices != devices:
        raise ConfigError(
            f"mesh.devices={given.devices}, but {devices} ranks are to be replayed, one on each device. Leave it out, "
            f"set it to {devices}, or choose the ranks with --shrink or --devices."
        )
    return dataclasses.replace(given, devices=given.devices or devices)


def _sweep(options: argparse.Namespace) -> dict[str, Any]:
    from recjax.lab.replay.microbenchmark import KINDS, sweep
    from recjax.lab.replay.replay import ranks_mesh
    from recjax.parallel.mesh import make_mesh
    from recjax.utils.files import write_json
    from recjax.utils.host_memory import available_bytes
    from recjax.utils.units import read_whole_bytes

    kinds = tuple(options.collective or KINDS)
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--collective {wrong[0]} is not known; choose {either(list(KINDS))}.")
    size, last = read_whole_bytes(options.min, "--min"), read_whole_bytes(options.max, "--max")
    if options.factor < 2 or size > last:
        raise ConfigError("--factor must be at least 2, and --min at most --max.")
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= options.factor
    mesh = ranks_mesh(list(make_mesh(_mesh(options, options.devices)).devices.flat))
    # All processes must leave out the same sizes.
    memory = int(distributed.from_main("its memory", str(available_bytes() or 0)))

    def keep(result: dict[str, Any]) -> None:
        if options.out and distributed.is_main():
            write_json(located(options.out), result)

    return sweep(mesh, kinds, sizes, options.repeats, memory // 2 or None, keep)
