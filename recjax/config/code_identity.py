"""The code of a user's own model: the file that defines it, and the files beside it that this one imports.

Nothing here runs code. Files are found by their import statements, and compared by what they do: comments, layout and
docstrings do not count.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import json
import symtable
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Never taken from beside a file: a second copy of these would not fit the one that recjax uses.
SHARED = frozenset({"recjax", "jax", "jaxlib", "flax", "optax", "numpy", *sys.stdlib_module_names})
_MOST_LINES, _WIDEST = 24, 160  # of a difference that is shown


@dataclasses.dataclass(frozen=True)
class Source:
    """The files that make up a model's code.

    Attributes:
      root: the one that is run, a key of `files`.
      files: path relative to the folder that imports start from, with "/" -> content.
    """

    root: str
    files: Mapping[str, bytes]

    @functools.cached_property
    def forms(self) -> dict[str, str]:
        """File -> hash of its effect; the root has the key "", because its name does not count."""
        return {"" if name == self.root else name: _form(code, name == self.root) for name, code in self.files.items()}

    @functools.cached_property
    def configured(self) -> str:
        """Hash of what the root assigns to `config`, which `forms` may leave out, whatever numbers stand in it."""
        parsed = _parse(self.files[self.root])
        hashed = hashlib.sha256()
        for node in filter(_is_config, parsed[1].body if parsed else ()):
            for token in _tokens(node):
                counted = "number" if token.startswith(("int ", "float ")) else token
                hashed.update(counted.encode("utf-8", "surrogatepass") + b"\0")
        return hashed.hexdigest()

    @functools.cached_property
    def hash(self) -> str:
        """Hash of all files, 16 hexadecimal digits: the same in every process, Python version and folder."""
        return hashlib.sha256(json.dumps(sorted(self.forms.items())).encode()).hexdigest()[:16]


def gather(folder: Path, root: str, read: Callable[[Path], bytes] = Path.read_bytes, *, alone: bool = False) -> Source:
    """Collects the file `root` and the files of its folder that it imports, directly or not, anywhere in its code.

    Args:
      folder: where imports start.
      root: path of the file in it.
      read: reads a file.
      alone: the folder is one of installed packages, of which only the root's own counts.

    Raises:
      OSError: a file cannot be read.
    """
    files: dict[str, bytes] = {}
    wanted = [root, *files_of(folder, root.split("/")[:-1])]  # the packages around a module are run before it
    while wanted:
        if (name := wanted.pop()) not in files:
            files[name] = read(folder / name)
            found = [each for each in _imported(folder, name, files[name]) if each != root]
            own = root.partition("/")[0]
            wanted += [each for each in found if not alone or each.partition("/")[0] == own]
    return Source(root, files)


def difference(then: Source, now: Source, then_place: str, now_place: str) -> str:
    """Returns a unified diff of the files whose effects differ, cut to about a screen."""
    texts = [{"" if name == s.root else name: _lines(code) for name, code in s.files.items()} for s in (then, now)]
    lines: list[str] = []
    for name in sorted({*texts[0], *texts[1]}):
        if then.forms.get(name) != now.forms.get(name):
            old, new = (text.get(name, []) for text in texts)
            names = f"{then_place}/{name or then.root}", f"{now_place}/{name or now.root}"
            lines += difflib.unified_diff(old, new, *names, n=2, lineterm="")
    shown = [line if len(line) <= _WIDEST else line[:_WIDEST] + " ..." for line in lines[:_MOST_LINES]]
    more = len(lines) - len(shown)
    return "\n".join(shown + [f"... and {more} more line{'s' if more > 1 else ''}"] * (more > 0))


def _lines(code: bytes) -> list[str]:
    """Returns the lines of a file, with "?" for characters that would steer a terminal."""
    text = code.decode("utf-8", "replace").expandtabs(4)
    return ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines()]


def _parse(code: bytes) -> tuple[str, ast.Module] | None:
    """Returns the text of a file and its syntax tree; None if it is no Python, which running it explains."""
    try:
        with warnings.catch_warnings():  # running it warns again
            warnings.simplefilter("ignore")
            text = importlib.util.decode_source(code)
            return text, ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# Imports.


def _imported(folder: Path, name: str, code: bytes) -> Iterator[str]:
    """Yields the files below `folder` that the import statements of the file `name` mean."""
    parsed = _parse(code)
    package = name.split("/")[:-1]
    for node in ast.walk(parsed[1]) if parsed else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from files_of(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + 1:
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = [*start, *(node.module.split(".") if node.module else [])]
            yield from files_of(folder, base)
            for alias in node.names:
                if alias.name != "*":
                    yield from files_of(folder, [*base, alias.name])
                elif base and base[0] not in SHARED:
                    below = sorted(folder.joinpath(*base).glob("*.py"))
                    yield from (path.relative_to(folder).as_posix() for path in below if path.is_file())


def files_of(folder: Path, parts: Sequence[str]) -> Iterator[str]:
    """Yields the files below `folder` that run when the module a.b.c, given as its parts, is imported."""
    if not parts or parts[0] in SHARED:
        return
    for length in range(1, len(parts) + 1):
        path = "/".join(parts[:length])
        for name in (f"{path}/__init__.py", f"{path}.py"):
            if (folder / name).is_file():
                yield name
                break


# What counts of a file.


def _form(code: bytes, is_root: bool) -> str:
    """Hashes the effect of a file when it is run or imported.

    Comments, layout and docstrings are left out. So are the code under `if __name__ == "__main__"`, which is not run,
    and in the root `config = ...`, whose value is compared as a config; but these two count where other code of the
    file reads a name that they bind.
    """
    if (parsed := _parse(code)) is None:
        return "as it is " + hashlib.sha256(code).hexdigest()
    text, tree = parsed
    out = [node for node in tree.body if _is_main(node) or (is_root and _is_config(node))]
    read = _global_names(_blanked(text, out))
    out = [node for node in out if not read & _bound(node)]
    tree.body = [node for node in tree.body if node not in out]
    hashed = hashlib.sha256()
    for token in _tokens(tree):
        hashed.update(token.encode("utf-8", "surrogatepass") + b"\0")
    return hashed.hexdigest()


def _is_config(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == "config"


def _is_main(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and isinstance(node.test, ast.Compare)
        and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )


def _bound(node: ast.stmt) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    names |= {n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    for alias in (a for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names):
        names.add(alias.asname or alias.name.partition(".")[0])
    return names


def _blanked(text: str, nodes: Sequence[ast.stmt]) -> str:
    """Returns the text with these statements replaced by `pass`."""
    lines = [line.encode() for line in text.split("\n")]  # columns are counted in bytes
    for node in reversed(nodes):
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        joined = lines[first][: node.col_offset] + b"pass" + lines[last][node.end_col_offset :]
        lines[first : last + 1] = [joined]
    return b"\n".join(lines).decode()


def _global_names(text: str) -> set[str]:
    """Returns the global names that the code reads, also within its functions and classes."""
    try:
        top = symtable.symtable(text, "preset", "exec")
    except (SyntaxError, RecursionError):  # what compiling refuses beyond parsing; running it explains that
        return set()
    names: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    return names


def _tokens(tree: ast.AST) -> Iterator[str]:
    """Yields a syntax tree as texts without positions, docstrings and empty fields: in these Python versions differ."""
    stack: list[Any] = [tree]
    while stack:  # no recursion: expressions may be nested deeply
        item = stack.pop()
        if isinstance(item, ast.AST):
            yield f"({type(item).__name__}"
            stack.append(_END)
            for name, value in reversed([*ast.iter_fields(item)]):
                if name == "body" and isinstance(item, _DOCUMENTED):
                    value = value[ast.get_docstring(item, clean=False) is not None :]
                if isinstance(item, ast.JoinedStr):  # Python 3.12 ends some with an empty text
                    value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
                if value is not None and value != []:
                    stack += [value, _Field(name)]
        elif isinstance(item, list):
            yield "["
            stack += [_END, *reversed(item)]
        elif isinstance(item, _Field):
            yield item.name
        else:  # a number has no limit of digits in hexadecimal
            yield f"{type(item).__name__} {hex(item) if type(item) is int else repr(item)}"


@dataclasses.dataclass(frozen=True)
class _Field:
    """A token for the name of a field, or for the end of a node or list."""

    name: str


_END = _Field(")")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
