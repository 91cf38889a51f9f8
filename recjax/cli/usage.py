"""Refusals of a command line that cannot be read: one paragraph, with the nearest word where there is one."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from recjax.settings.values import either
from recjax.utils.text import did_you_mean, masked

STATUS = 2  # of bad usage


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one paragraph, as everywhere in recjax; --help alone prints the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2, `message` and, where an argument is missing, the verb's example."""
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += f".{did_you_mean(wrong[1], re.findall(r'[a-z0-9][a-z0-9_ -]*', wrong[2]))}"
        message = re.sub(
            r"invalid (int|float) value: (.*)",
            lambda found: f"{found[2]} is no {'whole ' if found[1] == 'int' else ''}number",
            message,
        )
        example = re.search(r"^example: (.*)$", self.epilog or "", re.M)
        shown = f" For example: {example[1]}." if example and "required" in message else ""
        end = "" if message.endswith((".", "?")) else "."
        print(f"\nrecjax: error: {masked(message)}{end}{shown} See `{self.prog} --help`.", file=sys.stderr)
        raise SystemExit(STATUS)


def refuse(options: argparse.Namespace, argument: str, arguments: Sequence[str]) -> NoReturn:
    """Ends the program with status 2 because of an argument that the verb does not know.

    Args:
      options: the arguments that could be read, with the `parser` of the verb.
      argument: the unknown one.
      arguments: the whole command line.
    """
    parser: Parser = options.parser
    hint = ""
    if "overrides" in options:
        hint = _as_setting(options, argument, arguments)
    if not hint and argument.startswith("--"):
        hint = did_you_mean(argument.partition("=")[0], re.findall(r"--[a-z][a-z-]+", parser.format_usage()))
    parser.error(f"unrecognized argument: {argument}.{hint}")


def _as_setting(options: argparse.Namespace, argument: str, arguments: Sequence[str]) -> str:
    """Returns a sentence that writes the argument as a setting; "" if there is no setting of that name."""
    if not argument.startswith("-"):
        return " Settings are written KEY=VALUE, without spaces around the '='."
    name, equals, value = argument.lstrip("-").replace("-", "_").partition("=")
    if equals:
        value = argument.partition("=")[2]
    else:
        place = list(arguments).index(argument) + 1
        following = arguments[place] if place < len(arguments) else "-"
        value = "VALUE" if following.startswith("-") or "=" in following else following
    keys = _keys_like(options, name)
    return f" A setting is written without dashes: {either([f'{key}={value}' for key in keys])}." if keys else ""


def _keys_like(options: argparse.Namespace, name: str) -> list[str]:
    """Returns the keys of settings that are `name` or end in it; three at most."""
    from recjax import settings  # which other mistakes need not wait for
    from recjax.errors import ConfigError

    try:
        if "dataset" in options:
            from recjax.data import catalog

            config: object = catalog.default(options.dataset)
        elif "preset" in options or "run_folder" in options:
            config = _config(getattr(options, "preset", ""))
        else:
            return []  # a verb with settings of its own
    except ConfigError:
        return []
    keys = list(settings.flatten(config))
    group = name.partition(".")[0]
    if group != name and any(key.startswith(f"{group}.") for key in keys):
        return [name]  # which may exist for another kind of data or model; if not, the corrected command says so
    if name in ("on_error", "encoding") and "input" in options:  # which are of no config
        return [name]
    like = [name] if name in keys else [key for key in keys if key.endswith(f".{name}")]
    return ([key for key in like if not key.startswith("small.")] or like)[:3]


def _config(preset: str) -> object:
    """Returns the config of a preset that has this name, else the default one: a file of one's own is not run."""
    from recjax.config import presets
    from recjax.config.run import RunConfig
    from recjax.errors import ConfigError

    if preset and not preset.endswith(".py"):
        with contextlib.suppress(ConfigError):
            return presets.load(preset)
    return RunConfig()
