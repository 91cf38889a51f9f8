"""Writes the reference of verbs, settings and presets, as Markdown from the code itself.

python docs/generate.py       writes docs/reference/{cli,config,presets}.md; conf.py does so too
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recjax import settings
from recjax.cli.parser import make_parser
from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.settings.tree import annotations_of, classes_of, field_of
from recjax.settings.values import entry_class, expected, written

ROOT = Path(__file__).resolve().parent.parent
LONG = 100  # characters of a setting; one that is longer gives its first values
MOST = 30  # settings of a preset that are shown; some set each of a thousand tables apart


def cli() -> str:
    """Returns every verb with its arguments, options and example."""
    return "\n".join(_verb(parser) for parser in _leaves(make_parser()))


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of verbs, in the order of `recjax --help`; those of groups such as `data` give their actions."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups or parser._defaults:
        yield parser
    for group in groups:
        for inner in group.choices.values():
            yield from _leaves(inner)


def _verb(parser: argparse.ArgumentParser) -> str:
    lines = [f"## {parser.prog}", "", _text(parser.description or ""), "", "```text", _usage(parser), "```", ""]
    rows = [(_invocation(action), _text(action.help or "")) for action in parser._actions if _is_shown(action)]
    lines += _table(("argument", "what"), rows) if rows else []
    return "\n".join([*lines, "", *(f"```bash\n{example}\n```" for example in _examples(parser)), ""])


def _usage(parser: argparse.ArgumentParser) -> str:
    """One line in place of argparse's own, which another Python breaks elsewhere."""
    given = [action for action in parser._actions if not action.option_strings]
    many = {None: "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} [{} ...]", argparse.REMAINDER: "..."}
    words = [many[action.nargs].replace("{}", str(action.metavar or action.dest)) for action in given]
    return " ".join([parser.prog, *words, *(["[OPTION ...]"] if len(given) < len(parser._actions) - 1 else [])])


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and action.dest != "help"


def _invocation(action: argparse.Action) -> str:
    value = action.metavar or (
        "" if action.nargs == 0 or action.choices is None else "\\|".join(map(str, action.choices))
    )
    names = action.option_strings or [str(action.metavar or action.dest)]
    shown = f"{names[0]} {value or action.dest.upper()}" if action.option_strings and action.nargs != 0 else names[0]
    return f"`{shown}`"


def _examples(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"^example: (.*)$", parser.epilog or "", re.M)


def config() -> str:
    """Returns every setting, class by class, with type, default and the comment of its field."""
    done: set[type] = set()
    queue: list[tuple[str, type, Any]] = [("", RunConfig, None)]
    parts = []
    while queue:
        prefix, cls, given = queue.pop(0)
        if cls in done:
            continue
        done.add(cls)
        parts.append(_class(prefix, cls, given, queue))
    return "\n".join(parts)


def _class(prefix: str, cls: Any, given: Any, queue: list[tuple[str, type, Any]]) -> str:
    """One class as a table; the classes of its fields join the queue. `given` is what the class around it has of it."""
    comments = field_comments(cls)
    own = {field.name: _default(field) for field in dataclasses.fields(cls)}
    defaults = {name: getattr(given, name) for name in own} if isinstance(given, cls) else own
    rows = []
    for key, annotation in annotations_of(cls).items():
        name = field_of(key)
        comment = _text(comments.get(name, ""))
        inner = classes_of(annotation)
        entry = entry_class(annotation)
        path = f"{prefix}{key}"
        if entry is not None:
            queue.append((f"{path}.NAME.", entry, None))
            rows.append((f"`{path}.NAME.`", comment, "see below", ""))
        elif inner:
            value = defaults[name]
            queue += [(f"{path}.", each, value if len(inner) == 1 else None) for each in inner]
            kinds = [kind for each in inner if (kind := _kind(each))]
            default = f"`{value.kind}`" if kinds and value is not None else ""
            choice = ", ".join(f"`{kind}`" for kind in kinds) if len(kinds) > 1 else "see below"
            rows.append((f"`{path}`", comment, choice, default))
        else:
            default = f"`{written(defaults[name])}`".replace("``", "empty")
            rows.append((f"`{path}`", comment, _text(expected(annotation)), default))
    kind = _kind(cls)
    title = f"{prefix.rstrip('.')}={kind}" if kind else (prefix.rstrip(".") or "The run")
    table = _table(("key", "what", "values", "default"), rows) if rows else ["No settings of its own."]
    return "\n".join([f"## {title}", "", _first_paragraph(cls), "", *table, ""])


def _kind(cls: Any) -> str:
    """The kind that a class is one of several by; "" if it is the only one, perhaps with a setting of that name."""
    return "" if any(field.name == "kind" for field in dataclasses.fields(cls)) else getattr(cls, "kind", "")


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def field_comments(cls: type) -> dict[str, str]:
    """Returns name of a field -> its comment: the one on its line, or the lines of comment right above it.

    Fields of base classes are among them.
    """
    comments: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        lines = textwrap.dedent(inspect.getsource(each)).splitlines()
        (tree,) = ast.parse("\n".join(lines)).body
        for node in tree.body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                behind = _comment(lines[(node.end_lineno or 0) - 1][node.end_col_offset :])
                above: list[str] = []
                at = node.lineno - 2
                while not behind and lines[at].strip().startswith("#"):
                    above.insert(0, _comment(lines[at]))
                    at -= 1
                comments[node.target.id] = behind or " ".join(above)
    return comments


def _comment(text: str) -> str:
    found = re.search(r"#\s*(.*?)\s*$", text)
    return re.sub(r"^(noqa.*|type: ignore.*)$", "", found[1]) if found else ""


def preset_list() -> str:
    """Returns every preset of configs/ and every sweep file: docstring, and the settings that are not the defaults."""
    parts = []
    for file in sorted((ROOT / "configs").glob("*.py")):
        doc = ast.get_docstring(ast.parse(file.read_text())) or ""
        lines = settings.assignments(presets.load(file.stem, []))
        more = [f"... and {len(lines) - MOST} more"] if len(lines) > MOST + 5 else []
        chosen = "\n".join([*map(_short, lines[:MOST] if more else lines), *more])
        parts.append(f"## {file.stem}\n\n{_doc(doc)}\n\n```text\n{chosen}\n```\n")
    for file in sorted((ROOT / "configs" / "sweeps").glob("*.toml")):
        text = file.read_text()
        tomllib.loads(text)
        parts.append(f"## Sweep: {file.stem}\n\n```toml\n{text}```\n")
    return "\n".join(parts)


def _short(setting: str) -> str:
    """A setting of a preset; of many values the first ones, and how many there are."""
    shown, comma, _ = setting[: LONG - 25].rpartition(",")
    return f"{shown},... ({setting.count(',') + 1} values)" if comma and len(setting) > LONG else setting


def _doc(doc: str) -> str:
    """A docstring as Markdown; its indented commands are fenced."""

    def fenced(found: re.Match[str]) -> str:
        text = textwrap.dedent(found[0]).strip()
        return f"```{'bash' if text.startswith(('recjax ', 'python ')) else 'text'}\n{text}\n```\n"

    return re.sub(r"(?m)(?:^ {4}.*\n?)+", fenced, doc)


def _first_paragraph(cls: type) -> str:
    doc = inspect.getdoc(cls) or ""
    own = "" if doc.startswith(f"{cls.__name__}(") else doc  # dataclasses makes such a one where there is none
    return own.split("\n\n")[0].replace("\n", " ").replace("<", "&lt;")


def _text(text: str) -> str:
    """A help text or comment in a cell of a table; options in it as code, else a page would show a dash for two."""
    pieces = " ".join(text.split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;").split("`")
    pieces[::2] = [re.sub(r"(?<![\w-])--[a-z][\w-]*", r"`\g<0>`", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells) + " |"

    return [line(head), line(("---",) * len(head)), *map(line, rows)]


# Heading and introduction of each page, and what follows.
PAGES: dict[str, tuple[str, typing.Callable[[], str]]] = {
    "cli": (
        "# Command line\n\nEvery verb, as `recjax VERB --help` has it. [A tour](../getting_started/commands.md).",
        cli,
    ),
    "config": (
        "# Settings\n\nEvery key that `a.b=value` takes. `recjax show PRESET` prints the values of a preset.",
        config,
    ),
    "presets": (
        "# Presets\n\nEvery file in `configs/`: its description, and the settings that differ from the defaults.",
        preset_list,
    ),
}
NOTE = "<!-- Made from the code by `python docs/generate.py`; not to be edited. -->"


def page(name: str) -> str:
    """Returns the whole text of one of the pages."""
    head, make = PAGES[name]
    return f"{NOTE}\n\n{head}\n\n{make().rstrip()}\n"


def write(folder: Path) -> None:
    """Writes the pages into a folder. Those that are right already stay, so that Sphinx need not read them again."""
    for name in PAGES:
        file, text = folder / f"{name}.md", page(name)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


if __name__ == "__main__":
    write(ROOT / "docs" / "reference")
