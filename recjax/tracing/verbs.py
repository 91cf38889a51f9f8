"""The verbs `recjax trace`, `recjax trace report` and `recjax replay`: their arguments, and what they call."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError

Shown = tuple[Any, Callable[[], str]]  # a result, and how to write it as text
FORMATS = ("recjax", "param", "chakra-json", "chakra-et")


def add(verb: Callable[..., argparse.ArgumentParser], overrides: Callable[..., None], preset: str) -> None:
    """Adds the verbs.

    Args:
      verb: (name, function from options to what is `Shown`, help, example) -> its parser.
      overrides: adds the settings of a config to a parser.
      preset: the help of a preset's name.
    """
    made = verb("trace", trace, "record the communication of training steps",
                "trace movietweetings mesh.devices=8 --steps 5 --out traces/first")  # fmt: skip
    made.add_argument("preset", help=preset)
    overrides(made)
    made.add_argument("--steps", type=int, default=5, metavar="K", help="steps to record (default: 5)")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, a file for each rank")
    made.add_argument("--format", action="append", choices=FORMATS,
                      help="may be given several times (default: recjax); others go to DIR/FORMAT")  # fmt: skip
    made.add_argument("--vary", metavar="KEY=A,B,...",
                      help="record once with each of these values of a setting, in DIR/KEY=VALUE")  # fmt: skip
    made.add_argument("--overwrite", action="store_true", help="replace a trace that is there")
    made.set_defaults(tunables=True)

    shown = verb("trace report", report, "show what traces say: sizes, shares, imbalance, time; several side by side",
                 "trace report traces/first --out report.html --out report.png")  # fmt: skip
    shown.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a trace in any of the formats")
    shown.add_argument("--format", choices=FORMATS, help="of the files (default: found out)")
    shown.add_argument("--out", action="append", type=Path, default=[], metavar="FILE",
                       help=".html: one page with everything; .png: the picture; may be repeated")  # fmt: skip


def trace(options: argparse.Namespace) -> Shown:
    """Records a preset, or several variants of it."""
    from recjax import presets
    from recjax.comms import show
    from recjax.comms.study import figures
    from recjax.tracing.record import record

    runs, formats = list(_variants(options)), options.format or ["recjax"]
    for folder, _ in runs:
        _require_free(folder, options.overwrite)
    configs = [(folder, presets.load(options.preset, overrides)) for folder, overrides in runs]
    results = []
    # The largest mesh first: host devices are made once.
    for folder, config in sorted(configs, key=lambda run: -run[1].mesh.devices):
        recorded = record(config, options.steps)
        recorded = dataclasses.replace(
            recorded, about={**recorded.about, "preset": options.preset, "label": folder.name}
        )
        for format in formats:
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
    if options.vary is None:
        yield options.out, options.overrides
        return
    key, equals, values = options.vary.partition("=")
    if not equals or not all(values.split(",")):
        raise ConfigError(f"--vary {options.vary}: write KEY=A,B,..., for example train.batch_size=1024,4096.")
    for value in dict.fromkeys(values.split(",")):
        yield options.out / f"{key}={value}".replace("/", "_"), [*options.overrides, f"{key}={value}"]


def _require_free(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file. Name a folder.")
    there = [*folder.glob("trace.*.json"), *folder.glob("*/*.json"), *folder.glob("*/*.et")]
    if there and not overwrite:
        raise ConfigError(f"--out {folder} holds a trace already. Name another folder, or add --overwrite.")


def write(recorded: Any, folder: Path, format: str) -> None:
    """Writes a trace; files of ranks that an earlier one had there go."""
    from recjax.comms.formats import FORMATS
    from recjax.comms.formats.files import rank_files
    from recjax.errors import DataError
    from recjax.train.files import write_whole

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
    from recjax.comms import show
    from recjax.comms.formats import read_trace
    from recjax.comms.study import figures
    from recjax.train.files import write_whole

    makers = {".html": lambda found: show.page(found).encode(), ".png": show.picture}
    for path in options.out:
        if path.suffix not in makers:
            raise ConfigError(f"--out {path}: the name must end in .html or .png.")
    found = [figures(read_trace(folder, options.format)) for folder in options.folders]
    for path in options.out:
        write_whole(path, makers[path.suffix](found))
    written = "".join(f"\n\nwrote {path}" for path in options.out)
    return {"traces": found, "out": [str(p) for p in options.out]}, lambda: show.to_text(found) + written


def tell(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
