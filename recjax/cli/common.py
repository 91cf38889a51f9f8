"""Options that several verbs have, and the parser of a verb."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

PRESET = "name of a preset in configs/, or the path of one"
_SPLITS = ("train", "validation", "test")
_INTERRUPTED = "stopped by Ctrl-C, without a result."  # unless a verb says otherwise


def verb(of: Any, name: str, run: Callable[..., None], what: str, example: str) -> argparse.ArgumentParser:
    """Adds a verb.

    Args:
      of: the subparsers to add to.
      name: of the verb.
      run: called with its options.
      what: it does, as its help.
      example: a command line, without `recjax`.

    Returns:
      Its parser.
    """
    added: argparse.ArgumentParser = of.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=f"example: recjax {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument("--json", action="store_true", help="print the result as one JSON object")
    added.set_defaults(run=run, parser=added, interrupted=_INTERRUPTED)
    return added


def overrides(to: argparse.ArgumentParser) -> None:
    """Adds the settings of a config."""
    # With a default argparse does not call them required.
    to.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=value", help="settings to change; see `recjax show`"
    )


def trusting(to: argparse.ArgumentParser, named: str = "the copy of your own model's code in DIR") -> None:
    """Adds --trust-code, of what reads a run folder or another file that names code; `named` is what it then runs."""
    to.add_argument(
        "--trust-code",
        action="store_true",
        help=f"run {named} although it may be a stranger's; only if you trust whoever made it",
    )


def checkpoint(to: argparse.ArgumentParser) -> None:
    """Adds --step, which chooses a checkpoint of a run."""
    to.add_argument(
        "--step",
        type=step,
        metavar="STEP",
        help="step of the checkpoint, or newest (default: the one that validation chose, or else the newest)",
    )


def excluding(to: argparse.ArgumentParser, default: str) -> None:
    """Adds --exclude, of what ranks items for users; `default` says in words what it is."""
    to.add_argument(
        "--exclude",
        type=split_names,
        default=argparse.SUPPRESS,
        metavar="SPLIT,...",
        help="with --topk: splits whose items a user's list leaves out, such as train or train,validation, or none "
        f"(default: {default})",
    )


def caches(to: argparse.ArgumentParser) -> None:
    """Adds the options of what serves tables on disk."""
    to.add_argument(
        "--cache-mib",
        type=float,
        default=64,
        metavar="MIB",
        help="MiB of memory for the rows of each table on disk (default: 64)",
    )
    to.add_argument(
        "--pooled-mib",
        type=float,
        default=0,
        metavar="MIB",
        help="MiB of memory for the pooled bags of each table on disk, which then are neither read nor summed again; "
        "scores change by rounding (default: 0, none)",
    )


def step(text: str) -> int | str:
    """The value of --step."""
    if text != "newest" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `newest`")
    return text if text == "newest" else int(text)


def numbers(kind: type) -> Callable[[str], list[Any]]:
    """The values of an option with commas between them."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers with commas between them") from None

    return parse


def split_names(text: str) -> list[str]:
    """Names of splits with commas between them; none for `none`."""
    names = [] if text == "none" else text.split(",")
    if wrong := [name for name in names if name not in _SPLITS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no split: they are {', '.join(_SPLITS)}; or write `none`")
    return names
