"""The code with which a run was made: what config.json says of it, its copy, and when which of them may be run.

A run folder may come from somebody else, who wrote config.json as he liked. Its copy is run only if one says so. The
file or module that config.json names is run if it lies outside the folder, has the hash that stands there, and is code
that this user trusts for other reasons: see `recjax/config/trusted_code.py`. What this process has imported already is
used as it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from recjax.config import own_code, trusted_code
from recjax.config.code_identity import Source, difference, gather
from recjax.config.preset_files import class_path, find_class
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.utils.files import disk_error, write_whole

COPY = "source"  # folder of a run folder
NO_RESUME = "Put the code back to resume it, or give another --out to start again."
TRUST = "--trust-code (from Python: trust_code=True)"


@dataclasses.dataclass(frozen=True)
class CodeCopy:
    """Entries of a config.json about code.

    Attributes:
      where: "/path/of/preset.py:Name" or "package.module:Name" of the config's class; None: RunConfig itself.
      hash: of the code, see `Source.hash`; None if it is not known.
      files: its files, the one that is run first.
    """

    where: str | None = None
    hash: str | None = None
    files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the class."""
        return (self.where or ":RunConfig").rpartition(":")[2]


def describe(config: RunConfig, *, with_code: bool = True) -> dict[str, Any]:
    """Describes the code of a config, for config.json."""
    if type(config) is RunConfig:
        return {}
    said: dict[str, Any] = {"class": class_path(type(config))}
    source = own_code.source_of(type(config))
    if source is not None and with_code:
        others = sorted(name for name in source.files if name != source.root)
        said["source"] = {"hash": source.hash, "files": [source.root, *others]}
    return said


def take(plain: dict[str, Any], file: Path) -> CodeCopy:
    """Takes out of the content of a config.json what `describe` put there.

    Raises:
      ConfigError: it is none of that.
    """
    where, source = plain.pop("class", None), plain.pop("source", None)
    if where is None:
        return CodeCopy()
    if source is None:
        return CodeCopy(str(where))
    try:
        hash, files = source["hash"], tuple(source["files"])
        good = isinstance(hash, str) and files and all(map(_stays_inside, files))
    except (TypeError, KeyError):
        good = False
    if not good:
        raise ConfigError(f"{file}: what it says of `source` was edited or damaged. Restore it from a copy.")
    return CodeCopy(str(where), hash, files)


def _stays_inside(name: object) -> bool:
    path = PurePosixPath(name) if isinstance(name, str) and "\0" not in name else None
    return path is not None and path.suffix == ".py" and not path.is_absolute() and ".." not in path.parts


def write_copy(run: Path, source: Source) -> None:
    """Puts a copy of the code into a run folder.

    Raises:
      TrainingError: the disk refuses.
    """
    for name, code in source.files.items():
        path = run / COPY / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(path, error, len(code)) from error
        write_whole(path, code)


def read_copy(run: Path, code: CodeCopy) -> Source:
    """The copy of the code in a run folder.

    Raises:
      ConfigError: it is gone or damaged.
    """
    try:
        files = {}
        for name in code.files:
            if not (path := run / COPY / name).is_file():
                raise FileNotFoundError(None, "no such file", str(path))
            files[name] = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the copy in {run / COPY} is not whole: {error.filename}: {error.strerror}. Restore it from a backup."
        ) from error
    source = Source(code.files[0], files)
    if source.hash != code.hash:
        raise ConfigError(
            f"the copy in {run / COPY} is damaged or was edited: it has the hash {source.hash}, and config.json says "
            f"{code.hash}. It is not run. Restore it from a backup."
        )
    return source


def same(code: CodeCopy, config: RunConfig) -> bool:
    """Returns whether a config is known to have the code of a run."""
    source = own_code.source_of(type(config))
    hash = None if source is None else source.hash
    return (code.where is None) == (type(config) is RunConfig) and code.hash == hash


def refuse_other(run: Path, code: CodeCopy, config: RunConfig) -> None:
    """Refuses to go on with a run by other code.

    Of a run without a hash of its code, and of classes without a text, nothing but the name is known.

    Raises:
      ConfigError: the code differs; the message shows how.
    """
    source, name = own_code.source_of(type(config)), type(config).__qualname__
    other_class = f"{run} holds a run of the class {code.name}, not {name}. {NO_RESUME}"
    if code.hash is None or source is None:
        if code.name != name or (code.where is None) != (type(config) is RunConfig):
            raise ConfigError(other_class)
        return
    if source.hash != code.hash:
        raise ConfigError(
            f"{run} holds a run of other code: {_told(run, code, source)}. Its weights would meet another model. "
            f"{NO_RESUME}" + _shown(run, code, source)
        )
    if name != code.name:
        raise ConfigError(other_class)


def _told(run: Path, code: CodeCopy, now: Source) -> str:
    """Names the files that differ."""
    try:
        then = read_copy(run, code)
    except ConfigError as error:
        return f"the hash of {now.root} is {now.hash}, and was {code.hash}. How they differ cannot be shown: {error}"
    names = sorted({*then.forms, *now.forms})
    differing = [name or now.root for name in names if then.forms.get(name) != now.forms.get(name)]
    return f"{', '.join(differing)} changed since the run was made"


def _shown(run: Path, code: CodeCopy, now: Source) -> str:
    """The difference, on lines of its own; nothing without an intact copy."""
    try:
        return "\n" + difference(read_copy(run, code), now, COPY, "now")
    except ConfigError:
        return ""


def find(run: Path, code: CodeCopy, *, trust: bool, report: Callable[[str], None]) -> type:
    """The class of a run's config: one that is imported already, or by running the code that defines it.

    Args:
      run: the run folder.
      code: what its config.json says.
      trust: whether code that config.json names may be run although a stranger may have chosen it: the copy in the
        folder, or the original where no hash is known.
      report: called with what the user should know.

    Raises:
      ConfigError: the code is gone, differs, fails or is not trusted, or the class is no RunConfig.
    """
    assert code.where is not None
    module = code.where.rpartition(":")[0]
    if module == "__main__":
        return _in_main(run, code)
    try:
        original = _original(run, module, code)
        if isinstance(original, type):
            return _checked(original)
        if not (trust and code.hash is None):
            _require_trusted(module, code, original)
    except ConfigError as error:
        if not trust or code.hash is None:
            raise _offering(run, code, error) from error
        copy = read_copy(run, code)
        reason = str(error).partition("\n")[0]
        report(f"the copy of the code in {run / COPY} is run, as --trust-code says: {reason}")
        return _checked(find_class(f"{run / COPY / copy.root}:{code.name}", copy, run / COPY))
    if code.hash is None:
        report(
            f"{module} is run, as --trust-code says: {run / 'config.json'} gives no hash of it, so whether it has "
            "changed since cannot be said"
        )
    return _checked(find_class(code.where, *((original.source, original.folder) if original.is_file else ())))


@dataclasses.dataclass(frozen=True)
class _Original:
    """Code where it was when a run was made, not yet run; `folder` is where its imports start."""

    source: Source
    folder: Path
    is_file: bool  # that is run, and not imported as a module


class _Untrusted(ConfigError):
    """Code is there, and is not run by itself; `remedy` is what the user may do but for --trust-code."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def _require_trusted(module: str, code: CodeCopy, original: _Original) -> None:
    """Refuses the original of a run's code unless this user has other reasons than config.json to run it.

    Raises:
      _Untrusted: he has none.
    """
    if code.hash is None:
        raise _Untrusted(
            f"config.json gives no hash of {module}, so this may be any program: it is not run by itself.", ""
        )
    importing = ("", "") if original.is_file else (module, code.name)
    source, folder = original.source, original.folder
    if trusted_code.is_trusted(folder, source, *importing):
        return
    if not original.is_file and not trusted_code.defines(source, code.name):
        raise ConfigError(f"the module {module!r} defines no class {code.name}.")
    once = f"run `recjax show {module}` once (or " if original.is_file else ""
    package = folder / source.root.partition("/")[0] if "/" in source.root else folder
    raise _Untrusted(
        f"{module} is not run by itself, for nothing but this folder says that it is code of yours: you have not run "
        "it on this machine.",
        f"{once}set {trusted_code.VARIABLE}={package}{')' if once else ''}, or ",
    )


def _offering(run: Path, code: CodeCopy, error: ConfigError) -> ConfigError:
    """Says what to do when the original cannot be run."""
    paragraph, _, shown = str(error).partition("\n")
    if isinstance(error, _Untrusted):
        before = f"If you know that code, {error.remedy}add"
    elif code.hash is not None:
        module = (code.where or "").rpartition(":")[0]
        before = "Put the code back, or add"
        if module.endswith(".py"):
            before = f"Put the code back, or where it has moved run `recjax train NEW.py --out {run}` once, or add"
    else:
        return error
    what = "it as it is" if code.hash is None else f"the copy in {run / COPY}"
    return ConfigError(
        f"{paragraph} {before} {TRUST} to run {what}; do that only if you trust whoever made this folder."
        + (f"\n{shown}" if shown else "")
    )


def _checked(found: type) -> type:
    if not issubclass(found, RunConfig):
        raise ConfigError("it is no RunConfig. Put back the code with which the run was made.")
    return found


def _in_main(run: Path, code: CodeCopy) -> type:
    """A class that a notebook or a script has defined, in that notebook or script."""
    found = vars(sys.modules["__main__"]).get(code.name)
    if not (isinstance(found, type) and issubclass(found, RunConfig)):
        copy = f" Its code, as far as it was found, is in {run / COPY}." if code.hash else ""
        raise ConfigError(
            "a notebook or a script defined it, and only there does it exist. Put it into a file, import it from "
            f"there, and train again: then any process can evaluate the run.{copy}"
        )
    source = own_code.source_of(found)
    if source is not None and code.hash not in (None, source.hash):
        raise ConfigError(
            f"{_told(run, code, source)}. Run the former definitions again to use this run." + _shown(run, code, source)
        )
    return found


def _original(run: Path, module: str, code: CodeCopy) -> _Original | type:
    """The code where it was when the run was made; or the class itself, if this process has imported its module.

    Raises:
      ConfigError: it is gone, differs or lies in the run folder.
    """
    is_file = module.endswith(".py")
    try:
        if is_file:
            if not Path(module).is_absolute():
                raise _brought()
            places: list[tuple[Path, ...]] = [(Path(module),)]
        else:
            places = [*own_code.locate(module)]
        if any(_is_inside(path, run) for of_one in places for path in of_one):
            raise _brought()
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        what = f"{module} cannot be found" if is_file else f"the module {module!r} cannot be imported"
        raise ConfigError(f"{what} ({error})." + ("" if is_file else " Install it, or set PYTHONPATH.")) from error
    if not is_file and module in sys.modules:
        loaded = find_class(code.where or "")
        known = own_code.source_of(loaded)  # of whose file more may have been edited since
        if known is not None and code.hash not in (None, known.hash):
            raise ConfigError(f"{_told(run, code, known)}." + _shown(run, code, known))
        return loaded
    if is_file:
        real = Path(module).resolve()
        place: tuple[Path, str, bool] | None = (real.parent, real.name, False)
    else:
        place = own_code.place_of(module, str(places[-1][0]) if places[-1] else None)
    if place is None:
        raise ConfigError(f"the module {module!r} has no file of Python code. Import it, in Python, before.")
    folder, root, alone = place
    try:
        if not (folder / root).is_file():
            raise ConfigError(f"cannot read the preset {module}: there is no such file any more.")
        source = gather(folder, root, alone=alone)
        if any(_is_inside(folder / name, run) for name in source.files):
            raise _brought()
    except OSError as error:
        raise ConfigError(f"cannot read the preset {error.filename or module}: {error.strerror}.") from error
    if code.hash not in (None, source.hash):
        raise ConfigError(f"{_told(run, code, source)}." + _shown(run, code, source))
    return _Original(source, folder, is_file)


def _brought() -> ConfigError:
    return ConfigError("a run folder must not bring its own code, which would be run. Move the file.")


def _is_inside(path: Path, run: Path) -> bool:
    """Returns whether a path lies in the run folder, by its name or by where its links lead."""
    folder, real = run.resolve(), path.resolve()
    return folder in (real, *real.parents) or folder in (parent.resolve() for parent in path.parents)
