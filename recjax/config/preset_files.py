"""Finds preset and sweep files from any folder, and makes a config of a preset file."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import traceback
import types
from pathlib import Path

from recjax.config import trusted_code
from recjax.config.code_identity import Source, gather
from recjax.config.own_code import Space, space_named, space_of
from recjax.data.own import hint
from recjax.errors import ConfigError
from recjax.settings.overrides import flatten
from recjax.settings.values import either
from recjax.utils.paths import expanded
from recjax.utils.text import near


def find_preset(name_or_path: str | Path) -> Path:
    """The file of a preset: a path that ends in .py, or a name in configs/, from any working folder.

    Raises:
      ConfigError: there is no such file or name; the message gives the nearest names and all names.
    """
    return _find(str(name_or_path), "preset", "*.py", "that defines `config`")


def find_sweep(name_or_path: str | Path) -> Path:
    """The file of a sweep: a path that ends in .toml, or a name in configs/sweeps/, from any working folder.

    Raises:
      ConfigError: there is no such file or name; the message gives the nearest names and all names.
    """
    return _find(str(name_or_path), "sweep", "sweeps/*.toml", "that describes one")


def _find(text: str, what: str, pattern: str, content: str) -> Path:
    suffix = Path(pattern).suffix
    is_path = text.endswith(suffix)
    if is_path and (path := expanded(text)).is_file():
        return path
    folder = _shipped()
    files = {file.stem: file for file in sorted(folder.glob(pattern))}
    if text in files:
        return files[text]
    close = near(Path(text).stem, files, least=0.6)
    if what == "preset" and (expanded(text) / "config.json").is_file():
        raise ConfigError(
            f"{text} is a run folder, and this verb takes a preset, with the settings that change it. `recjax eval`, "
            "`predict`, `export` and `serve` take a run folder; its settings are in its config.json."
        )
    if what == "preset" and (of_data := hint(text)):
        raise ConfigError(f"{text} is no preset (the name of one, or a Python file). {of_data.rstrip()}")
    raise ConfigError(
        f"there is no {'file' if is_path else what} {text!r}."
        + (f" Did you mean {either(close)}?" if close else "")
        + f" {what.capitalize()}s: {', '.join(files) or f'none in {folder}'}. Give one of these names, or the path of "
        f"a {suffix} file {content}."
    )


def _shipped() -> Path:
    """The folder of recjax's own presets and sweeps."""
    # The wheel carries configs/ inside the package; in a checkout (or an editable install) it stands beside it.
    package = Path(__file__).resolve().parent.parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def require_trusted(preset: str, named_by: Path, trust_code: bool) -> None:
    """Refuses the preset that a sweep file names if it is somebody else's program: see `trusted_code.py`.

    Args:
      preset: as the file has it.
      named_by: the file.
      trust_code: whether the user says that he trusts it.

    Raises:
      ConfigError: it is, or there is no such preset.
    """
    beside = named_by.parent / preset
    if preset.endswith(".py") and not expanded(preset).is_file() and beside.is_file():
        raise ConfigError(
            f"there is no file {preset} in the working folder, from which paths count, although there is {beside}. "
            f'Start the command in {beside.parent.resolve()}, or write preset = "{beside.resolve()}".'
        )
    path = find_preset(preset)
    if trust_code or path.resolve().parent == _shipped():
        return
    try:
        trusted = trusted_code.is_trusted_preset(path, named_by)
    except OSError as error:
        raise ConfigError(f"cannot read the preset {preset}: {error.strerror}.") from error
    if not trusted:
        raise ConfigError(
            f"the preset {preset} is a program that you have not run yet, and that may have come with this file, so it "
            f"is not run. Look at it; if it is good, run `recjax show {path}` once, or add --trust-code."
        )


def load_preset_module(path: str | Path) -> tuple[object, str]:
    """Runs a preset file that the user names, and returns its `config` and its docstring ("" if it has none).

    A preset is a Python program: only run files that you trust. This one, as it is now, will then also run for whatever
    names it: see `trusted_code.py`. See `own_code.py` for what it may import, and for the module that its classes
    belong to.

    Raises:
      ConfigError: the file cannot be read, fails (the message names file and line), defines no `config`, or one
        with a value that does not fit its annotation.
    """
    module = run_file(path)
    config = vars(module).get("config")
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"{path}: the preset must assign a config to the name `config`, as in config = RunConfig().")
    try:
        flatten(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    file = Path(path).resolve()
    if file.parent != _shipped() and (space := space_named(module.__name__)) is not None:
        trusted_code.trust_source(space.folder, space.source)
    return config, inspect.cleandoc(module.__doc__ or "")


def run_file(path: str | Path, source: Source | None = None, folder: Path | None = None) -> types.ModuleType:
    """Runs a Python file of one's own, with what it imports from beside it.

    Args:
      path: the file, also as messages name it.
      source: its code, which lies in `folder`; None reads it.
      folder: where imports start; None takes the one that the file lies in.

    Raises:
      ConfigError: the file cannot be read, or fails; the message names file and line.
    """
    file = Path(path).resolve()
    folder = (folder or file.parent).resolve()
    try:
        if source is None:
            if file.exists() and not file.is_file():  # a pipe, say, over which it would wait forever
                raise ConfigError(f"cannot read the preset {path}: it is no regular file.")
            source = gather(folder, file.name)
    except OSError as error:
        which = path if error.filename in (None, str(file)) else error.filename
        raise ConfigError(f"cannot read the preset {which}: {error.strerror}.") from error
    files = {str(folder / name): path if name == source.root else folder / name for name in source.files}
    try:
        return Space(folder, source).run()
    except Exception as error:
        if isinstance(error, SyntaxError) and error.filename in files:
            name, line = error.filename, error.lineno
        else:
            frames = reversed(traceback.extract_tb(error.__traceback__))
            name, line = next(((f.filename, f.lineno) for f in frames if f.filename in files), (str(file), None))
        place = f"{files[name]}" if line is None else f"{files[name]}:{line}"
        if isinstance(error, ConfigError):
            raise ConfigError(f"{place}: {error}") from error
        raise ConfigError(f"{place}: the preset fails with {type(error).__name__}: {error}. Correct it.") from error


def class_path(cls: type) -> str:
    """Path by which `find_class` finds a class again: "package.module:Name", or "/path/of/preset.py:Name"."""
    space = space_of(cls)
    return f"{cls.__module__ if space is None else space.file}:{cls.__qualname__}"


def find_class(path: str, source: Source | None = None, folder: Path | None = None) -> type:
    """The class that `class_path` described. This runs the code that defines it.

    Args:
      path: from `class_path`.
      source: the code of that file or module, as for `run_file`; None takes it as it is.
      folder: as for `run_file`.

    Raises:
      ConfigError: the file or module is gone or fails, or has no such class.
    """
    where, _, name = path.rpartition(":")
    if where.endswith(".py"):
        module = run_file(where, source, folder)
    else:
        try:
            module = importlib.import_module(where)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"the module {where!r} cannot be imported ({error}). Install it, or set PYTHONPATH."
            ) from error
    of_config = type(vars(module).get("config"))  # which may be imported, under whatever name
    found = of_config if of_config.__qualname__ == name else vars(module).get(name)
    if not isinstance(found, type):
        raise ConfigError(f"{where} has no class {name!r}. Put back the code with which the run was made.")
    return found
