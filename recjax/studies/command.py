"""`recjax study NAME ...`: options and what they run. Light to import; the work is elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from recjax.errors import ConfigError
from recjax.utils.paths import expanded

Print = Callable[[argparse.Namespace, Any, Callable[[], str]], None]
_PRESET = "movietweetings"


def add(verbs: Any, verb: Callable[..., argparse.ArgumentParser], show: Print) -> None:
    """Adds the verb.

    Args:
      verbs: the subparsers to add to.
      verb: makes a parser: (of, name, run, what it does, example).
      show: prints a result: (options, object for --json, text).
    """
    study = verbs.add_parser("study", help="reproduce a published study: trainings, measures, figures")
    actions = study.add_subparsers(title="studies", metavar="NAME", required=True)
    one = verb(actions, "replicas", lambda o: _replicas(o, show),
               "replica groups with tables of their own, after the distributed DLRM of UW-Madison",
               "study replicas movietweetings --out studies/replicas")  # fmt: skip
    one.add_argument("preset", nargs="?", default=_PRESET, help=f"what to train on what (default: {_PRESET}); "
                     "train.batch_size is that of two groups, mesh.devices those of four")  # fmt: skip
    one.add_argument("overrides", nargs="*", default=[], metavar="a.b=value",
                     help="settings to change; see `recjax show`")  # fmt: skip
    one.add_argument("--out", type=expanded, required=True, metavar="DIR", help="folder for figures and replicas.json")
    one.add_argument("--iterations", type=int, default=600, metavar="N", help="of each training (default: 600)")
    one.add_argument("--every", type=int, default=50, metavar="N", help="iterations between measures (default: 50)")
    one.add_argument("--timed", type=int, default=20, metavar="N", help="iterations of which each time is the mean; 0 "
                     "leaves out the times (default: 20)")  # fmt: skip


def _replicas(options: argparse.Namespace, show: Print) -> None:
    from recjax.config import presets
    from recjax.studies.replica_groups import study as replicas

    for name, least in (("iterations", 1), ("every", 1), ("timed", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be at least {least}.")
    preset, overrides = options.preset, list(options.overrides)
    if "=" in preset:  # it is an override, and the preset was left out
        preset, overrides = _PRESET, [preset, *overrides]
    how = replicas.Options(options.iterations, options.every, options.timed)
    result = replicas.study(presets.load(preset, overrides), options.out, how)
    show(options, result, lambda: replicas.to_text(result))
