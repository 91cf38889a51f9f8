"""Runs the code of a user's own model, with the files beside it, and finds the code that a class came from.

A file is run in a space of its own. Import statements of its code find the files beside it first, as those of a
script do, but as modules of that space: `sys.path` stays as it is, equal names in two folders are two modules, also for
imports within functions, and a file that is run again is read again.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recjax.config.code_identity import SHARED, Source, gather

_COUNT = itertools.count(1)
_SPACES: dict[str, Space] = {}  # name of a module -> the space that it belongs to
_KNOWN: weakref.WeakKeyDictionary[type, tuple[Path, Source]] = weakref.WeakKeyDictionary()  # see `remember`
_SEEN: dict[Path, tuple[object, bytes]] = {}  # file of an imported module -> its spec, and the file when it was new


class Space:
    """The modules of one run of a file."""

    def __init__(self, folder: Path, source: Source) -> None:
        """Makes a space for the files of `source`, which lie in `folder`. It runs the content that `source` holds."""
        self.folder, self.source = folder.resolve(), source
        self.file = self.folder / source.root
        self.name = f"{self.file}#{next(_COUNT)}"
        self._tops = {name.partition("/")[0].removesuffix(".py") for name in source.files} - SHARED
        self._builtins = vars(builtins) | {"__import__": self._import}
        self._lock = threading.RLock()

    def run(self) -> types.ModuleType:
        """Runs the root as a module, under a name that no other module has.

        Raises:
          Exception: whatever the code raises.
        """
        try:
            if "/" in self.source.root:  # within a package, which is imported first
                return self._load(self.source.root.removesuffix(".py").removesuffix("/__init__").split("/"))
            return self._execute(self.name, self.source.root, self.source.root)
        except BaseException:
            for name in [name for name, space in _SPACES.items() if space is self]:
                _SPACES.pop(name)
                sys.modules.pop(name, None)
            raise

    def _execute(self, full: str, name: str | None, path: str) -> types.ModuleType:
        """Makes the module `full` from the file `name`, or from the folder `path` alone if `name` is None."""
        if name is None:
            module = types.ModuleType(full)
            module.__path__ = [str(self.folder / path)]
        else:
            file = str(self.folder / name)
            loader = _Loader(full, file, self.source.files[name], self._builtins)
            packages = [str(Path(file).parent)] if name.endswith("/__init__.py") else None
            spec = importlib.util.spec_from_file_location(
                full, file, loader=loader, submodule_search_locations=packages
            )
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
        sys.modules[full], _SPACES[full] = module, self
        try:
            if module.__spec__ is not None:
                loader.exec_module(module)
        except BaseException:
            sys.modules.pop(full, None)
            _SPACES.pop(full, None)
            raise
        return module

    def _load(self, parts: Sequence[str]) -> types.ModuleType:
        """Returns the module a.b.c, given as its parts. It and the packages around it run once each."""
        with self._lock:
            package = None
            for length in range(1, len(parts) + 1):
                path, full = "/".join(parts[:length]), ".".join([self.name, *parts[:length]])
                names = [name for name in (f"{path}/__init__.py", f"{path}.py") if name in self.source.files]
                if names == [self.source.root] and self.name in sys.modules:
                    full = self.name
                if full not in sys.modules:
                    if not names and not any(name.startswith(f"{path}/") for name in self.source.files):
                        raise ModuleNotFoundError(
                            f"No module named {'.'.join(parts)!r} in {self.folder}", name=".".join(parts)
                        )
                    module = self._execute(full, names[0] if names else None, path)
                    if package is not None:
                        setattr(package, parts[length - 1], module)
                package = sys.modules[full]
            assert package is not None
            return package

    def _import(
        self,
        name: str,
        globals: dict[str, Any] | None = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Serves as `__import__` to the code in this space: finds modules of the space first."""
        importer = (globals or {}).get("__name__", self.name).removeprefix(self.name).lstrip(".")
        within = importer.split(".") if importer else []
        if "__path__" not in (globals or {}):
            within = within[:-1]
        if level > len(within) + 1:
            raise ImportError(f"attempted relative import beyond {self.folder}")
        parts = within[: len(within) + 1 - level] if level else []
        parts += name.split(".") if name else []
        alone = not importer and "/" not in self.source.root and parts == [self.source.root.removesuffix(".py")]
        if level == 0 and (parts[0] not in self._tops or alone):
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        module = self._load(parts) if parts else sys.modules[self.name]
        for each in fromlist or ():
            for leaf in getattr(module, "__all__", ()) if each == "*" else (each,):
                if not hasattr(module, leaf):
                    with contextlib.suppress(ModuleNotFoundError):  # then the import statement says it better
                        self._load([*parts, leaf])
        return module if fromlist else self._load(parts[:1])


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the code that it was made with: not an older one from a cache, not a newer one from the disk."""

    def __init__(self, name: str, path: str, code: bytes, names: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._code, self._names = code, names

    def get_data(self, path: str) -> bytes:
        return self._code if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self._code, self.path)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = self._names
        super().exec_module(module)


# Which code a class came from.


def space_of(cls: type) -> Space | None:
    """Returns the space in which the class was defined; None if it was in none."""
    return space_named(cls.__module__)


def space_named(module: str) -> Space | None:
    """Returns the space of a module, by the name that it has in `sys.modules`; None if it is in none."""
    return _SPACES.get(module)


def is_recjax(cls: type) -> bool:
    """Returns True for a class of recjax itself."""
    return cls.__module__.partition(".")[0] == "recjax"


def remember(cls: type) -> None:
    """Keeps the code from which a class is being defined: its file may be edited later, while the class stays."""
    module = sys.modules.get(cls.__module__)
    if is_recjax(cls) or cls.__module__ in _SPACES or module is None:
        return
    with contextlib.suppress(OSError):
        if (place := place_of(cls.__module__, getattr(module, "__file__", None))) is not None:
            _KNOWN[cls] = place[0], gather(*place[:2], _read_once, alone=place[2])


def source_of(cls: type) -> Source | None:
    """Returns the code of a config's class; None for a class of recjax, and where the code cannot be found."""
    if (placed := placed_source_of(cls)) is not None:
        return placed[1]
    if cls.__module__ == "__main__":
        from recjax.config.notebook_cells import cell_source  # which most runs do not need

        return cell_source(cls)
    return None


def placed_source_of(cls: type) -> tuple[Path, Source] | None:
    """Returns the code of a config's class that lies in files, after the folder where its imports start."""
    if (space := space_of(cls)) is not None:
        return space.folder, space.source
    return _KNOWN.get(cls)


def place_of(module: str, file: str | None) -> tuple[Path, str, bool] | None:
    """Returns the folder where a module's imports start, its file from there, and whether packages are installed there.

    None if the module has no file of Python code.
    """
    if file is None or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    above = 0 if module == "__main__" else module.count(".") + (path.name == "__init__.py")
    folder = path.parents[above]
    return folder, path.relative_to(folder).as_posix(), folder.name in ("site-packages", "dist-packages")


def _read_once(file: Path) -> bytes:
    """Returns a file's content; that of an imported module as it was when this import of it was first seen."""
    for module in [*sys.modules.values()]:
        spec = getattr(module, "__dict__", {}).get("__spec__")
        if spec is not None and spec.origin == str(file):
            if (seen := _SEEN.get(file)) is None or seen[0] is not spec:
                _SEEN[file] = spec, file.read_bytes()
            return _SEEN[file][1]
    return file.read_bytes()


def locate(module: str) -> Iterator[tuple[Path, ...]]:
    """Finds a module and the packages around it, outermost first, without running any of them.

    Yields:
      Of each its file, if it has one, and the folders of a package.

    Raises:
      ImportError, ValueError: there is no such module.
    """
    path: Sequence[str] | None = None
    parts = module.split(".")
    for length, part in enumerate(parts, 1):
        name = ".".join(parts[:length])
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None and path is None:
            finders: list[Callable[..., Any]] = [f.find_spec for f in sys.meta_path if hasattr(f, "find_spec")]
            spec = next((found for find in finders if (found := find(name, None)) is not None), None)
        elif spec is None:  # by its own name, for under the full one a namespace asks for the package around it
            spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        path = [*(spec.submodule_search_locations or ())]
        yield tuple(map(Path, [*([spec.origin] if spec.has_location and spec.origin else []), *path]))
