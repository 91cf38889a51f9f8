"""One simulation for each combination of varied options and shapes: `recjax simulate ... --vary`."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from recjax.errors import ConfigError
from recjax.lab.simulate.report import table
from recjax.lab.variants import variants
from recjax.utils.units import time_text

_NEVER = ("json", "out", "vary", "workload", "overrides", "calibration", "run", "parser", "interrupted")


def each(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[tuple[str, argparse.Namespace]]:
    """(name, options) of every simulation.

    A key of --vary is one of the verb's options, without its dashes, or else a shape of a preset.

    Raises:
      ConfigError: an option that cannot vary, or a --vary of another form.
    """
    found = []
    for name, pairs in variants(options.vary, "chunks=1,8 or topology='switch:16;switch:8,switch:2'"):
        one = copy.copy(options)
        one.overrides, one.vary = list(getattr(options, "overrides", ())), []
        words: list[str] = []
        for key, value in pairs:
            name_of, option = key.replace("-", "_"), f"--{key.replace('_', '-')}"
            if name_of in _NEVER:
                raise ConfigError(f"--vary {key}: {option} cannot vary.")
            if name_of in options:
                words.append(f"{option}={value}")
            elif "workload" in options:
                one.overrides.append(f"{key}={value}")
            else:
                raise ConfigError(f"--vary {key}: a collective has no option {option}.")
        found.append((name, _with(one, parser, words)))
    return found


def _with(options: argparse.Namespace, parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options as the parser reads them with further words."""
    required = ("collective", "bytes", "topology", "bandwidth") if "workload" not in options else ()
    given = [f"--{name}={getattr(options, name)}" for name in required]
    places = [options.workload, *options.overrides] if "workload" in options else []
    return parser.parse_args([*places, *given, *words], options)


def compared(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    """A line for each simulation."""
    collective = "bus_bytes_per_s" in found[0]
    rows = [
        ["varied", "time", *(("algorithm GB/s", "bus GB/s") if collective else ("computation", "exposed", "share"))]
    ]
    for name, one in zip(names, found, strict=True):
        row = [name, time_text(one["time_ns"])]
        if collective:
            row += [f"{one[key] / 1e9:.2f}" for key in ("algorithm_bytes_per_s", "bus_bytes_per_s")]
        else:
            exposed = one["exposed_communication_ns"]
            row += [time_text(one["compute_ns"]), time_text(exposed), f"{exposed / (one['time_ns'] or 1):.1%}"]
        rows.append(row)
    return table(rows)
