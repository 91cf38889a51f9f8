"""Counts of what makes the package hard to hold in the head, read from its source: see `tests/test_house.py`."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

# Words that say nothing of what they name.
WORDS = frozenset("found kept asked given made held own of how one each mine rest".split())
LIVES = 3  # lines that a local of such a name may live

# Takers of any number of like values, by the last part of their names; `reshape` takes a shape.
TAKES_MANY = frozenset(
    """
    Path chain concatenate difference gcd intersection join joinpath map max merge min print product reshape stack
    union zip zip_longest
    """.split()
)
# Calls whose result holds like values.
GIVES_LIKE = frozenset("filter keys map range sorted values".split())

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LIKE = (ast.List, ast.ListComp, ast.SetComp, ast.GeneratorExp)
_PROPERTIES = ("property", "cached_property")


@dataclasses.dataclass
class _Scope:
    """A function, comprehension, class or module: which weak names it binds, and the lines of all that it mentions."""

    kind: str
    outer: _Scope | None = None
    parameters: Set[str] = frozenset()
    vararg: str = ""
    bound: set[str] = dataclasses.field(default_factory=set)
    lines: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    attributes: dict[str, int] = dataclasses.field(default_factory=dict)  # of a class, and where each is first set

    def takes(self, name: str) -> bool:
        """Returns whether a name is the `*args` of this function or of one around it."""
        return name == self.vararg or (self.outer is not None and self.outer.takes(name))

    def owner(self) -> _Scope | None:
        """Returns the class around this scope, if any."""
        scope: _Scope | None = self
        while scope is not None and scope.kind != "class":
            scope = scope.outer
        return scope


class Source:
    """What one pass over a file's syntax tree gives.

    Attributes:
      name: path from the folder that holds the package: "recjax/train/step.py".
      lines: of the file.
      public: names of its own classes and functions that do not begin with an underscore.
      weak: (line, word) of each weak name.
      splats: (line, name of what is called) of each splat that the call alone does not excuse.
      takers: names of functions that take any number of values; `others`, of those that do not.
      group: lines of functions with a parameter `group`.
      imports: dotted names that it imports at run time, at its top or within functions.
    """

    def __init__(self, name: str, text: str) -> None:
        tree = ast.parse(text)
        self.name, self.lines = name, text.count("\n")
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self.public = {node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}
        self.weak: list[tuple[int, str]] = []
        self.splats: list[tuple[int, str]] = []
        self.takers: set[str] = set()
        self.others: set[str] = set()
        self.group: list[int] = []
        self.imports: set[str] = set()
        self._inside(tree, _Scope("module"))

    def _inside(self, node: ast.AST, scope: _Scope) -> None:
        for field in node._fields:
            value = getattr(node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    self._visit(child, scope)

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.Name):
            self._mention(scope, node.id, node.lineno, binds=isinstance(node.ctx, ast.Store))
        elif isinstance(node, ast.Constant | ast.expr_context):
            pass
        elif isinstance(node, _FUNCTIONS):
            self._function(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            self._within(node, _Scope("comprehension", scope))
        elif isinstance(node, ast.ClassDef):
            self._class(node, scope)
        elif isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            for child in node.orelse:
                self._visit(child, scope)
        else:
            if isinstance(node, ast.Import):
                self.imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self._mention(scope, node.name, node.lineno, binds=True)
            elif isinstance(node, ast.Attribute):
                self._attribute(node, scope)
            elif isinstance(node, ast.Call):
                self._call(node, scope)
            self._inside(node, scope)

    def _mention(self, scope: _Scope, name: str, line: int, *, binds: bool) -> None:
        if name in WORDS:
            scope.lines[name].append(line)
            if binds and scope.kind == "class":
                scope.attributes.setdefault(name, line)
            elif binds:
                scope.bound.add(name)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: _Scope) -> None:
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults, *getattr(node, "decorator_list", ())):
            if default is not None:
                self._visit(default, scope)
        plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters = [*plain, *(argument for argument in (arguments.vararg, arguments.kwarg) if argument)]
        self.weak += [(argument.lineno, argument.arg) for argument in parameters if argument.arg in WORDS]
        if any(argument.arg == "group" for argument in plain):
            self.group.append(node.lineno)
        if not isinstance(node, ast.Lambda):
            (self.takers if arguments.vararg else self.others).add(node.name)
            is_property = any(ast.unparse(d).rpartition(".")[2] in _PROPERTIES for d in node.decorator_list)
            if scope.kind != "class" or is_property:
                self._mention(scope, node.name, node.lineno, binds=True)
        names = {argument.arg for argument in parameters}
        vararg = arguments.vararg.arg if arguments.vararg else ""
        inner = _Scope("function", scope, names, vararg)
        for child in node.body if isinstance(node.body, list) else [node.body]:
            self._visit(child, inner)
        self._close(inner)

    def _class(self, node: ast.ClassDef, scope: _Scope) -> None:
        inner = _Scope("class", scope)
        self._within(node, inner)
        self.weak += [(line, name) for name, line in inner.attributes.items()]

    def _within(self, node: ast.AST, scope: _Scope) -> None:
        self._inside(node, scope)
        self._close(scope)

    def _close(self, scope: _Scope) -> None:
        """Judges the locals of a scope, and hands on what it mentions of the scopes around it."""
        assert scope.outer is not None
        for name, lines in scope.lines.items():
            if name in scope.bound and name not in scope.parameters:
                if max(lines) - min(lines) > LIVES:
                    self.weak.append((min(lines), name))
            elif name not in scope.parameters and not (scope.kind == "class" and name in scope.attributes):
                scope.outer.lines[name] += lines

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if node.attr in WORDS and of_self and isinstance(node.ctx, ast.Store) and (owner := scope.owner()):
            owner.attributes.setdefault(node.attr, node.lineno)

    def _call(self, node: ast.Call, scope: _Scope) -> None:
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                value, callee = argument.value, _last_name(node.func)
                passed_on = isinstance(value, ast.Name) and scope.takes(value.id)
                like = isinstance(value, _LIKE) or (
                    isinstance(value, ast.Call) and _last_name(value.func) in GIVES_LIKE
                )
                if not (passed_on or like or callee in TAKES_MANY):
                    self.splats.append((node.lineno, callee))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def circles(edges: Mapping[str, Set[str]]) -> list[set[str]]:
    """Strongly connected parts of a graph that have more than one node; every node is a key of `edges`."""
    back: dict[str, set[str]] = {name: set() for name in edges}
    for start, ends in edges.items():
        for end in ends:
            back[end].add(start)
    left, parts = set(edges), []
    while loose := {name for name in left if not (edges[name] & left and back[name] & left)}:
        left -= loose
    while left:
        start = min(left)
        part = _reach(start, edges, left) & _reach(start, back, left)
        if len(part) > 1:
            parts.append(part)
        left -= part
    return parts


def _reach(start: str, edges: Mapping[str, Set[str]], within: Set[str]) -> set[str]:
    reached, fresh = {start}, {start}
    while fresh:
        fresh = {end for name in fresh for end in edges[name] if end in within} - reached
        reached |= fresh
    return reached


class House:
    """A package's source. Each count has a list of places, as `--list` prints them, or a number."""

    def __init__(self, package: Path) -> None:
        self.sources = [
            Source(file.relative_to(package.parent).as_posix(), file.read_text(encoding="utf-8"))
            for file in sorted(package.rglob("*.py"))
        ]
        self._lab = f"{package.name}/lab/"

    def lines_by_package(self, *, lab: bool | None = None) -> dict[str, int]:
        """Lines of the files of each package: of core, of lab (all below `lab/`), or of both (None)."""
        lines: dict[str, int] = collections.Counter()
        for source in self._sources(lab):
            lines["/".join(source.name.split("/")[:2])] += source.lines
        return dict(lines)

    def files(self, *, lab: bool | None = None) -> list[str]:
        """Python files of core, of lab (all below `lab/`), or of both (None)."""
        return [source.name for source in self._sources(lab)]

    def _sources(self, lab: bool | None) -> list[Source]:
        return [source for source in self.sources if lab in (None, source.name.startswith(self._lab))]

    def weak_names(self, word: str = "") -> list[str]:
        """Weak names (`WORDS`, or one of them) of parameters, of attributes, and of locals that live over three lines.

        Attributes are what a class's body or `self.x =` sets, and properties, each once a class; a local, also of a
        comprehension, lives from the first to the last line that mentions it.
        """
        return [
            f"{source.name}:{line} {name}"
            for source in self.sources
            for line, name in source.weak
            if word in ("", name)
        ]

    def tuple_splats(self) -> list[str]:
        """Arguments `*x` of calls where neither x nor what is called shows that all its values are of one kind.

        What shows it: x is a list, a comprehension, the `*args` of a function around the call, or the result of one of
        `GIVES_LIKE`; what is called is one of `TAKES_MANY`, or is called as functions of the package are that all have
        `*args`.
        """
        takers = {name for source in self.sources for name in source.takers}
        takers -= {name for source in self.sources for name in source.others}
        return [
            f"{source.name}:{line} {callee}"
            for source in self.sources
            for line, callee in source.splats
            if callee not in takers
        ]

    def shared_file_names(self) -> list[str]:
        """Names of files, but for `__init__.py`, that several folders have."""
        pairs = (source.name.rpartition("/")[::2] for source in self.sources)
        return _several((name, folder) for folder, name in pairs if name != "__init__.py")

    def shared_public_names(self) -> list[str]:
        """Names without a leading underscore of classes and functions at the top of several modules."""
        return _several((name, source.name) for source in self.sources for name in source.public)

    def group_parameters(self) -> list[str]:
        """Functions, methods and lambdas that have a parameter called `group`."""
        return [f"{source.name}:{line}" for source in self.sources for line in source.group]

    @functools.cached_property
    def circles(self) -> list[set[str]]:
        """Sets of files that import each other in circles, at their top or within functions; not for types alone."""
        modules = {
            source.name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source.name
            for source in self.sources
        }

        def file_of(imported: str) -> str | None:
            return modules.get(imported) or modules.get(imported.rpartition(".")[0])

        edges = {
            source.name: {file for name in source.imports if (file := file_of(name)) and file != source.name}
            for source in self.sources
        }
        return circles(edges)

    def counts(self) -> dict[str, int]:
        """Returns all counts by name."""
        return {
            "core_lines": sum(self.lines_by_package(lab=False).values()),
            "core_files": len(self.files(lab=False)),
            "lab_lines": sum(self.lines_by_package(lab=True).values()),
            "lab_files": len(self.files(lab=True)),
            "core_and_lab_lines": sum(self.lines_by_package().values()),
            "core_and_lab_files": len(self.files()),
            **{name: len(places) for name, places in self.places().items()},
            "import_circles": len(self.circles),
        }

    def places(self) -> dict[str, list[str]]:
        """Returns where to look for each count that is one of places."""
        return {
            "weak_names": self.weak_names(),
            **{f"weak_name_{word}": self.weak_names(word) for word in sorted(WORDS)},
            "tuple_splats": self.tuple_splats(),
            "shared_file_names": self.shared_file_names(),
            "shared_public_names": self.shared_public_names(),
            "group_parameters": self.group_parameters(),
            "files_in_circles": sorted(name for circle in self.circles for name in circle),
        }


def _several(pairs: Iterable[tuple[str, str]]) -> list[str]:
    places: dict[str, set[str]] = collections.defaultdict(set)
    for name, place in pairs:
        places[name].add(place)
    return [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(places.items()) if len(where) > 1]
