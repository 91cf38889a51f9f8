"""The verbs `recjax trace`, `trace report` and `trace convert`: their arguments, and what they call."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.lab.trace import replay_verb
from recjax.lab.variants import variants
from recjax.parallel import distributed
from recjax.utils.paths import expanded, located

Shown = tuple[Any, Callable[[], str]]  # a result, and how to write it as text
FORMATS = ("recjax", "param", "chakra-json", "chakra-et")
_READ = (*FORMATS, "chakra-graph")  # that can be read
WITHOUT_TIMES = ("param", "chakra-json")


def add(verb: Callable[..., argparse.ArgumentParser], overrides: Callable[..., None], preset: str) -> None:
    """Adds the verbs.

    Args:
      verb: (name, function from options to what is `Shown`, help, example) -> its parser.
      overrides: adds the settings of a config to a parser.
      preset: the help of a preset's name.
    """
    made = verb(
        "trace",
        trace,
        "record the communication of training steps",
        "trace movietweetings mesh.devices=8 --steps 5 --out traces/first",
    )
    made.add_argument("preset", help=preset)
    overrides(made)
    made.add_argument("--steps", type=int, metavar="K", help="steps to record (default: 5)")
    made.add_argument(
        "--compile",
        action="store_true",
        help="compile a step without running it: for any number of devices, owned or not, without times unless "
        "--machine is given",
    )
    made.add_argument(
        "--machine",
        metavar="FILE",
        help="with --compile: predict the times on this machine, a file that `recjax calibrate` wrote or a shipped "
        "one such as h200; then `simulate workload` has all it needs",
    )
    made.add_argument(
        "--alone",
        action="store_true",
        help="place all batches on the devices first, so that no work of the host runs during the steps",
    )
    made.add_argument(
        "--out", type=expanded, required=True, metavar="DIR", help="folder to write, a file for each rank"
    )
    made.add_argument(
        "--format",
        action="append",
        choices=FORMATS,
        help="format to write; may be given several times; recjax (the default) goes to DIR, others go to DIR/FORMAT",
    )
    made.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="record once with each of these values of a setting, in DIR/KEY=VALUE; KEY+KEY=A,B,... sets several "
        "alike; given several times, every combination is recorded",
    )
    made.add_argument("--overwrite", action="store_true", help="replace a trace that is there")
    made.set_defaults(tunables=True, together=True)

    shown = verb(
        "trace report",
        report,
        "show what traces say: sizes, shares, imbalance, time; several side by side",
        "trace report traces/first --out report.html --out report.png",
    )
    shown.add_argument("folders", nargs="+", type=expanded, metavar="DIR", help="a trace in any of the formats")
    shown.add_argument("--format", choices=_READ, help="format of the files (default: detected)")
    shown.add_argument(
        "--calls",
        action="store_true",
        help="also show every call: how uneven, which rank came last and how late; and every rank: what it sent, "
        "received and waited",
    )
    shown.add_argument(
        "--out",
        action="append",
        type=expanded,
        default=[],
        metavar="FILE",
        help="file to write: .html, one page with everything, or .png, the picture; may be repeated",
    )

    shown.add_argument(
        "--timeline",
        type=expanded,
        metavar="FILE",
        help=".png file to write, of one step of a single trace: what every rank did when, and where it waited",
    )
    shown.add_argument("--step", type=int, metavar="K", help="step of the timeline (default: the one of median length)")
    _add_kineto(shown)

    other = verb(
        "trace convert",
        convert,
        "write a trace in another format, or for ui.perfetto.dev",
        "trace convert traces/first --format perfetto --out traces/perfetto",
    )
    other.add_argument("folder", type=expanded, metavar="DIR", help="a trace in any of the formats")
    other.add_argument("--from", dest="source", choices=_READ, help="format of the files (default: detected)")
    other.add_argument(
        "--format",
        action="append",
        required=True,
        choices=(*FORMATS, "perfetto"),
        help="format to write; may be given several times: then each goes to OUT/FORMAT",
    )
    other.add_argument("--out", type=expanded, required=True, metavar="OUT", help="folder to write")
    other.add_argument("--overwrite", action="store_true", help="replace a trace that is there")
    _add_kineto(other)
    replay_verb.add(verb, _READ)


def _add_kineto(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--kineto",
        type=expanded,
        metavar="DIR",
        help="for an execution trace of PyTorch: folder of the files that its profiler wrote of the same steps, one "
        "for each rank; times are taken from them",
    )


def trace(options: argparse.Namespace) -> Shown:
    """Records a preset, or several variants of it."""
    from recjax.config import presets
    from recjax.lab.trace import show
    from recjax.lab.trace.record import compiled, record
    from recjax.lab.trace.statistics import figures
    from recjax.planning.machine import open_machine

    if options.compile and (options.alone or options.steps is not None):
        raise ConfigError("--steps and --alone are about running, and --compile runs nothing. Leave it or them out.")
    if options.machine and not options.compile:
        raise ConfigError("--machine says where a step that is compiled would run: give --compile too.")
    machine = open_machine(options.machine) if options.machine else None
    steps = 5 if options.steps is None else options.steps
    runs, formats = list(_variants(options)), options.format or ["recjax"]
    for folder, _ in runs:
        _require_free(folder, options.overwrite)
    configs = [(folder, presets.load(options.preset, overrides)) for folder, overrides in runs]
    results = []
    # The largest mesh first: host devices are made once.
    for folder, config in sorted(configs, key=lambda run: -run[1].mesh.devices):
        recorded = compiled(config, machine) if options.compile else record(config, steps, options.alone)
        recorded = dataclasses.replace(
            recorded, about={**recorded.about, "preset": options.preset, "label": folder.name}
        )
        for format in formats if distributed.is_main() else ():
            write(recorded, folder if format == "recjax" else folder / format, format)
        results.append((folder, figures(recorded)))
    results.sort(key=lambda one: [folder for folder, _ in runs].index(one[0]))
    found = [one for _, one in results]
    out = {
        "out": str(options.out),
        "formats": formats,
        "traces": [{"folder": str(f), **one} for f, one in results],
    }
    return out, lambda: f"{show.to_text(found)}\n\nwrote {', '.join(str(f) for f, _ in results)}"


def _variants(options: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """(folder, overrides) of each run."""
    for name, pairs in variants(options.vary, "train.batch_size=1024,4096"):
        folder = options.out / name.replace("/", "_") if name else options.out
        yield folder, [*options.overrides, *(f"{key}={value}" for key, value in pairs)]


def _require_free(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file. Name a folder.")
    names = (r"\d+\.(json(\.gz)?|et)$", r"^timeline\.json$")  # as all formats name their files
    there = [p for p in (*folder.glob("*"), *folder.glob("*/*")) if any(re.search(name, p.name) for name in names)]
    if there and not overwrite:
        raise ConfigError(f"--out {folder} holds a trace already. Name another folder, or add --overwrite.")


def write(recorded: Any, folder: Path, format: str) -> None:
    """Writes a trace; files of ranks that an earlier one had there go."""
    from recjax.lab.formats import FORMATS
    from recjax.lab.formats.files import rank_files
    from recjax.utils.files import write_whole

    folder.mkdir(parents=True, exist_ok=True)
    files = FORMATS[format].write(recorded)
    try:
        stale = rank_files(folder)
    except DataError:
        stale = {}
    for path in stale.values():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        write_whole(folder / name, content)


def report(options: argparse.Namespace) -> Shown:
    """Shows the figures of some traces."""
    from recjax.lab.trace import show
    from recjax.lab.trace.draw import picture
    from recjax.lab.trace.kineto import read_timed
    from recjax.lab.trace.statistics import figures, labels, ordered
    from recjax.lab.trace.timeline import timeline
    from recjax.utils.files import write_whole

    makers = {".html": lambda found: show.page(found).encode(), ".png": picture}
    for path in options.out:
        if path.suffix not in makers:
            raise ConfigError(f"--out {path}: the name must end in .html or .png.")
    if options.kineto and len(options.folders) > 1:
        raise ConfigError("--kineto is of one trace: name one folder, or convert each trace first.")
    if options.step is not None and not options.timeline:
        raise ConfigError("--step chooses the step of a timeline: give --timeline FILE.png, too.")
    traces = [read_timed(folder, options.kineto, options.format) for folder in options.folders]
    found = ordered([figures(one) for one in traces])
    if options.timeline:
        if options.timeline.suffix != ".png" or len(traces) > 1:
            raise ConfigError(f"--timeline {options.timeline}: it is the .png of one trace.")
        write_whole(located(options.timeline), timeline(traces[0], labels(found)[0], options.step))
        options.out = [*options.out, options.timeline]
    for path in options.out:
        if path != options.timeline:
            write_whole(located(path), makers[path.suffix](found))
    written = "".join(f"\n\nwrote {path}" for path in options.out)
    return {"traces": found, "out": [str(p) for p in options.out]}, lambda: show.to_text(found, options.calls) + written


def convert(options: argparse.Namespace) -> Shown:
    """Writes a trace in other formats."""
    from recjax.lab.trace import perfetto
    from recjax.lab.trace.kineto import read_timed
    from recjax.utils.files import write_whole

    given = read_timed(options.folder, options.kineto, options.source)
    formats = list(dict.fromkeys(options.format))
    folders = {format: options.out / format if len(formats) > 1 else options.out for format in formats}
    if options.folder.resolve() in [folder.resolve() for folder in folders.values()]:
        raise ConfigError(
            f"--out {options.out} is where the trace lies, whose files would be replaced. Name another folder."
        )
    lost = []
    for format, folder in folders.items():
        _require_free(folder, options.overwrite)
        if format != "perfetto":
            write(given, folder, format)
            if format in WITHOUT_TIMES and given.measured:
                lost.append(f"{format} carries no durations and no computing")
            continue
        files = perfetto.write(given)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    result = {
        "out": {format: str(folder) for format, folder in folders.items()},
        "ranks": len(given.ranks),
        "lost": lost,
    }
    lines = [f"wrote {len(given.ranks)} ranks as {format} to {folder}" for format, folder in folders.items()]
    return result, lambda: "\n".join([*lines, *lost])
