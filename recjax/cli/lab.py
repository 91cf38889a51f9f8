"""The verbs of the lab, which measure, predict, record and simulate. Their code is loaded when one is asked for.

This is the one place where the trainer names `recjax.lab`: everything else of it runs without that package.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from recjax.errors import ConfigError
from recjax.utils.text import near

_PACKAGE = "recjax.lab"
# Verb -> what it does. A verb of two words comes with the first one's.
VERBS = {
    "bench": "measure the training step and its parts, alone or against another library",
    "calibrate": "measure what this machine can do, for plan --predict",
    "trace": "record the communication of training steps",
    "trace report": "show what traces say: sizes, shares, imbalance, time; several side by side",
    "trace convert": "write a trace in another format, or for ui.perfetto.dev",
    "replay": "run a trace's collectives again without the model, or plain ones of all sizes",
    "simulate": "predict collectives and whole iterations on a network, owned or not",
    "study": "reproduce a published study: trainings, measures, figures",
}


def load(module: str, wanted_by: str) -> Any:
    """Imports a module of the lab.

    Args:
      module: its name below `recjax.lab`.
      wanted_by: the verb, with an option, that needs it.

    Raises:
      ConfigError: the lab is not installed.
    """
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise ConfigError(
            f"`recjax {wanted_by}` belongs to the package {_PACKAGE} (measuring, predicting, simulating), which this "
            "installation lacks. Install all of recjax to use it."
        ) from error


def add(names: Any, verb: str | None) -> None:
    """Adds the lab's verbs to these subparsers.

    Args:
      names: the subparsers.
      verb: the one on the command line, which alone gets its options; the names of the others are known, for the sake
        of who misspells one. None: all get theirs.

    Raises:
      ConfigError: the lab is not installed.
    """
    asked = [name for name in VERBS if verb is None or verb == name]
    if asked:
        load("verbs", asked[0]).add(names, asked)
    for name in VERBS:
        if name not in names.choices:
            names.add_parser(name)


def describe_verbs() -> str:
    """The part of `recjax --help` about the lab."""
    return "\n".join(["lab verbs, which measure, predict, record and simulate:", *_lines()])


def _lines() -> list[str]:
    width = max(map(len, VERBS)) + 2
    return [f"    {name:{width}}{does}" for name, does in VERBS.items()]


def join_words(arguments: Sequence[str]) -> list[str]:
    """The arguments of the command line with a verb of two words as one, also where the second is misspelt."""
    verb, second = [*arguments[:2], "", ""][:2]
    seconds = [words[1] for name in VERBS if len(words := name.split()) == 2 and words[0] == verb]
    if not seconds or not near(second, seconds, least=0.8):
        return list(arguments)
    return [f"{verb} {second}", *arguments[2:]]
