"""The lab's verbs on the command line: which module has each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from recjax.cli import common
from recjax.cli.verbs import write_result


def add(names: Any, verbs: Sequence[str]) -> None:
    """Adds some verbs to these subparsers, with their options.

    Args:
      names: the subparsers.
      verbs: of `recjax.cli.lab.VERBS`.
    """
    for name, module in _MODULES.items():
        if any(verb in verbs for verb in name.split(", ")):
            module(names)


def _add_bench(names: Any) -> None:
    from recjax.lab.bench import verb

    verb.add(names)


def _add_calibrate(names: Any) -> None:
    from recjax.lab.calibrate import verb

    verb.add(names)


def _add_trace(names: Any) -> None:
    from recjax.lab.trace import verbs

    def shown(name: str, work: Callable[..., Any], *about: str) -> argparse.ArgumentParser:
        return common.verb(names, name, lambda o: write_result(o, *work(o)), *about)

    verbs.add(shown, common.overrides, common.PRESET)


def _add_simulate(names: Any) -> None:
    from recjax.lab.simulate import command
    from recjax.lab.studies import command as studies
    from recjax.lab.trace.workload import read_workload

    simulated = command.add(names, common.verb, write_result, read_workload)
    studies.add_hoti2020(simulated, common.verb, write_result, "simulate")  # by its older name


def _add_study(names: Any) -> None:
    from recjax.lab.studies import command

    command.add(names, common.verb, common.overrides, common.PRESET, write_result)


_MODULES = {
    "bench": _add_bench,
    "calibrate": _add_calibrate,
    "trace, trace report, trace convert, replay": _add_trace,
    "simulate": _add_simulate,
    "study": _add_study,
}
