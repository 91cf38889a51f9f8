"""Tells which code may run although only a file names it: a run folder's config.json, or a sweep.

Whoever made that file wrote into it what he liked, the hash of any public code included. So code that it names runs by
itself only if it is known otherwise:

- this user has run it on this machine by naming it himself: the same code (see `_key`) at the same place. A
  preset counts once a command or `recjax.load` has loaded it, an imported module once it has trained. Of each there is
  a file in $XDG_STATE_HOME/recjax/code (~/.local/state/recjax/code), named after place and code;
- it lies in a folder that the environment variable RECJAX_TRUSTED_CODE names (several: as in PATH);
- it is a module of an installed package, whose text defines a class of that name and imports recjax.

The preset of a sweep may also lie in the working folder: see `is_trusted_preset`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import site
import stat
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from recjax.config.code_identity import Source, gather

VARIABLE = "RECJAX_TRUSTED_CODE"
_RUN_HERE: set[str] = set()  # keys of the code that this process has run
_MODE = 0o400  # of a record; what else writes a file, through a link say, gives it another


def trust_source(folder: Path, source: Source) -> str | None:
    """Notes that the user has run this code by naming it himself.

    Args:
      folder: where its imports start.
      source: the code.

    Returns:
      None; or why another process will not know of it.
    """
    key = _key(folder, source)
    _RUN_HERE.add(key)
    try:
        file = _records() / key
        if not _is_record(file, folder, source):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=".")
            with open(handle, "wb") as to:
                to.write(_content(folder, source))
                os.fchmod(handle, _MODE)
            os.replace(unfinished, file)
        return None if _is_record(file, folder, source) else f"{file.parent} is not this user's alone"
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        return str(error)


def is_trusted(folder: Path, source: Source, module: str = "", class_name: str = "") -> bool:
    """Returns whether code that only a file names may run.

    Args:
      folder: where its imports start.
      source: the code.
      module: the module that would be imported; "" if a file would be run.
      class_name: the class that is looked for in it.
    """
    key = _key(folder, source)
    with contextlib.suppress(OSError, RuntimeError):
        if key in _RUN_HERE or _is_record(_records() / key, folder, source):
            return True
    files = [(folder / name).resolve() for name in source.files]
    named = [Path(place).resolve() for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    if all(any(place in file.parents for place in named) for file in files):
        return True
    return (
        bool(module)
        and defines(source, class_name)
        and "recjax" in _imports(source)
        and _is_installed(files, folder.resolve(), module.partition(".")[0])
    )


def defines(source: Source, name: str) -> bool:
    """Returns whether the text of the root defines a class of this name, with a base, at the top level."""
    try:
        tree = ast.parse(source.files[source.root])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.ClassDef) and node.name == name and node.bases for node in tree.body)


def is_trusted_preset(file: Path, named_by: Path) -> bool:
    """Returns whether a preset that only a sweep file names may run.

    So may a program with recjax in the working folder or below, unless it lies in a folder there that the sweep file
    lies in too, and may have come with it. The home folder, and what it lies in, are nobody's working folder: whatever
    was unpacked on the machine lies below.

    Args:
      file: the preset.
      named_by: the sweep file.

    Raises:
      OSError: it cannot be read.
    """
    file = file.resolve()
    source = gather(file.parent, file.name)
    if is_trusted(file.parent, source):
        return True
    here = Path.cwd().resolve()
    if _holds_home(here) or here not in file.parents or "recjax" not in _imports(source):
        return False
    shared = Path(os.path.commonpath([file.parent, named_by.resolve().parent]))
    return shared == here or here not in shared.parents


def _key(folder: Path, source: Source) -> str:
    """Hashes place and code; who edits comments, or numbers in the value of `config`, has not changed the code."""
    parts = [str(folder.resolve()), source.root, sorted(source.forms.items()), source.configured]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _holds_home(folder: Path) -> bool:
    try:
        home = Path.home().resolve()
    except RuntimeError:  # the user has none
        home = Path("/")
    return folder == home or folder in home.parents or not folder.parents


def _records() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "recjax" / "code"


def _content(folder: Path, source: Source) -> bytes:
    return os.fsencode(f"run by its user: {folder.resolve() / source.root}\n")


def _is_record(file: Path, folder: Path, source: Source) -> bool:
    """Returns whether `trust_source` wrote this file, for this user; False if there is none.

    Raises:
      OSError: it cannot be read.
    """
    try:
        about, around = file.lstat(), file.parent.stat()
    except FileNotFoundError:
        return False
    apart = all(each.st_uid == os.geteuid() for each in (about, around)) and not around.st_mode & 0o022
    mine = apart and stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) == _MODE
    return mine and file.read_bytes() == _content(folder, source)


def _imports(source: Source) -> set[str]:
    """Returns the top-level names of the modules that the code imports."""
    names: set[str] = set()
    for code in source.files.values():
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


# Installed packages, found without importing anything.


def _is_installed(files: Sequence[Path], folder: Path, top: str) -> bool:
    """Returns whether files belong to an installed package, perhaps an editable one.

    Args:
      files: that importing a module runs.
      folder: where its imports start.
      top: the first part of its name.
    """
    places = _site_folders()
    if all(any(place in file.parents for place in places) for file in files):
        return True
    named = {line.strip() for place in places for file in place.glob("*.pth") for line in _lines(file)}
    for project, names in _editable_projects([str(place) for place in places]):
        added = project in folder.parents and str(folder) in named
        if top in names and (folder in (project, project / "src") or added):
            return True
    return False


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _site_folders() -> list[Path]:
    """The folders that packages are installed to."""
    folders = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [*dict.fromkeys(Path(folder).resolve() for folder in folders)]


def _editable_projects(places: list[str]) -> Iterator[tuple[Path, set[str]]]:
    """Yields the folder of each package that was installed in editable form (PEP 610), and its top-level names."""
    for package in importlib.metadata.distributions(path=places):
        try:
            about = json.loads(package.read_text("direct_url.json") or "{}")
            url = urlparse(about["url"])
            editable = url.scheme == "file" and about["dir_info"]["editable"] is True
        except (KeyError, TypeError, ValueError):
            continue
        if editable:
            named = re.sub(r"[-.]+", "_", package.metadata["Name"] or "")
            yield Path(unquote(url.path)).resolve(), {named, *(package.read_text("top_level.txt") or "").split()}
