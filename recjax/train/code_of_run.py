"""The code with which a run was made: what config.json says of it, its copy, and when which of them may be run.

A run folder may come from somebody else. Its copy is run only if one says so; the file that config.json names is run if
it lies outside the folder and has the hash that stands there.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from recjax.config import own_code
from recjax.config.code_identity import Source, difference, gather
from recjax.config.preset_files import class_path, find_class
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.utils.files import disk_error, write_whole

COPY = "source"  # folder of a run folder
NO_RESUME = "Put the code back to resume it, or give another --out to start again."
TRUST = "--trust-code (from Python: trust_code=True)"


@dataclasses.dataclass(frozen=True)
class Kept:
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


def take(plain: dict[str, Any], file: Path) -> Kept:
    """Takes out of the content of a config.json what `describe` put there.

    Raises:
      ConfigError: it is none of that.
    """
    where, source = plain.pop("class", None), plain.pop("source", None)
    if where is None:
        return Kept()
    if source is None:
        return Kept(str(where))
    try:
        hash, files = source["hash"], tuple(source["files"])
        good = isinstance(hash, str) and files and all(map(_stays_inside, files))
    except (TypeError, KeyError):
        good = False
    if not good:
        raise ConfigError(f"{file}: what it says of `source` was edited or damaged. Restore it from a copy.")
    return Kept(str(where), hash, files)


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


def read_copy(run: Path, kept: Kept) -> Source:
    """The copy of the code in a run folder.

    Raises:
      ConfigError: there is none, or it is damaged.
    """
    if kept.hash is None:
        raise ConfigError(f"{run} holds no copy of that code, for an earlier version of recjax made it.")
    try:
        files = {}
        for name in kept.files:
            if not (path := run / COPY / name).is_file():
                raise FileNotFoundError(None, "no such file", str(path))
            files[name] = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the copy in {run / COPY} is not whole: {error.filename}: {error.strerror}. Restore it from a backup."
        ) from error
    source = Source(kept.files[0], files)
    if source.hash != kept.hash:
        raise ConfigError(
            f"the copy in {run / COPY} is damaged or was edited: it has the hash {source.hash}, and config.json says "
            f"{kept.hash}. It is not run. Restore it from a backup."
        )
    return source


def same(kept: Kept, config: RunConfig) -> bool:
    """Returns whether a config is known to have the code of a run."""
    source = own_code.source_of(type(config))
    hash = None if source is None else source.hash
    return (kept.where is None) == (type(config) is RunConfig) and kept.hash == hash


def refuse_other(run: Path, kept: Kept, config: RunConfig) -> None:
    """Refuses to go on with a run by other code.

    Of a run that an earlier version of recjax made, and of classes without a text, nothing is known or refused.

    Raises:
      ConfigError: the code differs; the message shows how.
    """
    source, name = own_code.source_of(type(config)), type(config).__qualname__
    if kept.hash is None or source is None:
        if (kept.where is None) != (type(config) is RunConfig) and (kept.where is None or kept.hash is not None):
            raise ConfigError(f"{run} holds a run of the class {kept.name}, not {name}. {NO_RESUME}")
        return
    if source.hash != kept.hash:
        raise ConfigError(
            f"{run} holds a run of other code: {_told(run, kept, source)}. Its weights would meet another model. "
            f"{NO_RESUME}" + _shown(run, kept, source)
        )
    if name != kept.name:
        raise ConfigError(f"{run} holds a run of the class {kept.name}, not {name}. {NO_RESUME}")


def _told(run: Path, kept: Kept, now: Source) -> str:
    """Names the files that differ."""
    try:
        then = read_copy(run, kept)
    except ConfigError as error:
        return f"the hash of {now.root} is {now.hash}, and was {kept.hash}. How they differ cannot be shown: {error}"
    names = sorted({*then.forms, *now.forms})
    differing = [name or now.root for name in names if then.forms.get(name) != now.forms.get(name)]
    return f"{', '.join(differing)} changed since the run was made"


def _shown(run: Path, kept: Kept, now: Source) -> str:
    """The difference, on lines of its own; nothing without an intact copy."""
    try:
        return "\n" + difference(read_copy(run, kept), now, COPY, "now")
    except ConfigError:
        return ""


def find(run: Path, kept: Kept, *, trust: bool, report: Callable[[str], None]) -> type:
    """The class of a run's config, by running the code that defines it.

    Args:
      run: the run folder.
      kept: what its config.json says.
      trust: whether the copy in the folder may be run where the original is gone or differs.
      report: called with what the user should know.

    Raises:
      ConfigError: the code is gone, differs or fails, or the class is no RunConfig.
    """
    assert kept.where is not None
    module = kept.where.rpartition(":")[0]
    if module == "__main__":
        return _in_main(run, kept)
    try:
        source, folder = _original(run, module, kept)
    except ConfigError as error:
        if not trust:
            raise _offering(run, kept, error) from error
        copy = read_copy(run, kept)
        reason = str(error).partition("\n")[0]
        report(f"the copy of the code in {run / COPY} is run, as --trust-code says: {reason}")
        return _checked(find_class(f"{run / COPY / copy.root}:{kept.name}", copy, run / COPY))
    if kept.hash is None:
        report(
            f"an earlier version of recjax made {run}, without keeping the code of {kept.where}: whether that has "
            "changed since cannot be said"
        )
    return _checked(find_class(kept.where, source, folder))


def _offering(run: Path, kept: Kept, error: ConfigError) -> ConfigError:
    """Says what to do when the original cannot be run."""
    paragraph, _, shown = str(error).partition("\n")
    if kept.hash is None:
        return ConfigError(paragraph)
    return ConfigError(
        f"{paragraph} Put the code back, or add {TRUST} to run the copy in {run / COPY}; do that only if you trust "
        f"whoever made this folder." + (f"\n{shown}" if shown else "")
    )


def _checked(found: type) -> type:
    if not issubclass(found, RunConfig):
        raise ConfigError("it is no RunConfig. Put back the code with which the run was made.")
    return found


def _in_main(run: Path, kept: Kept) -> type:
    """A class that a notebook or a script has defined, in that notebook or script."""
    found = vars(sys.modules["__main__"]).get(kept.name)
    if not (isinstance(found, type) and issubclass(found, RunConfig)):
        copy = f" Its code, as far as it was found, is in {run / COPY}." if kept.hash else ""
        raise ConfigError(
            "a notebook or a script defined it, and only there does it exist. Put it into a file, import it from "
            f"there, and train again: then any process can evaluate the run.{copy}"
        )
    source = own_code.source_of(found)
    if source is not None and kept.hash not in (None, source.hash):
        raise ConfigError(
            f"{_told(run, kept, source)}. Run the former definitions again to use this run." + _shown(run, kept, source)
        )
    return found


def _original(run: Path, module: str, kept: Kept) -> tuple[Source | None, Path | None]:
    """The code where it was when the run was made, and the folder that its imports start from.

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
    loaded = None if is_file else vars(sys.modules[module]).get(kept.name) if module in sys.modules else None
    if is_file:
        real = Path(module).resolve()
        place: tuple[Path, str, bool] | None = (real.parent, real.name, False)
    else:
        place = own_code.place_of(module, str(places[-1][0]) if places[-1] else None)
    try:
        if isinstance(loaded, type) and (known := own_code.source_of(loaded)) is not None:
            source, folder = known, None  # which may have been edited since it was imported
        elif place is None:
            return None, None
        else:
            folder, root, alone = place
            if not (folder / root).is_file():
                raise ConfigError(f"cannot read the preset {module}: there is no such file any more.")
            source = gather(folder, root, alone=alone)
    except OSError as error:
        raise ConfigError(f"cannot read the preset {error.filename or module}: {error.strerror}.") from error
    if kept.hash not in (None, source.hash):
        raise ConfigError(f"{_told(run, kept, source)}." + _shown(run, kept, source))
    return (source, folder) if is_file else (None, None)


def _brought() -> ConfigError:
    return ConfigError("a run folder must not bring its own code, which would be run. Move the file.")


def _is_inside(path: Path, run: Path) -> bool:
    """Returns whether a path lies in the run folder, by its name or by where its links lead."""
    folder, real = run.resolve(), path.resolve()
    return folder in (real, *real.parents) or folder in (parent.resolve() for parent in path.parents)
