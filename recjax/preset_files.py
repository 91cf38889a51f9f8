"""How preset and sweep files are found from any folder, and how a preset file becomes a config."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import runpy
import sys
import traceback
import types
from pathlib import Path

from recjax.config import flatten
from recjax.config_values import either
from recjax.data.own import hint
from recjax.errors import ConfigError


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
    if is_path and Path(text).is_file():
        return Path(text)
    # The wheel carries configs/ inside the package; in a checkout (or an editable install) it stands beside it.
    package = Path(__file__).resolve().parent
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    files = {file.stem: file for file in sorted(folder.glob(pattern))}
    if text in files:
        return files[text]
    close = difflib.get_close_matches(Path(text).stem, files, n=3)
    if what == "preset" and (of_data := hint(text)):
        raise ConfigError(f"{text} is no preset (the name of one, or a Python file). {of_data.rstrip()}")
    raise ConfigError(
        f"there is no {'file' if is_path else what} {text!r}."
        + (f" Did you mean {either(close)}?" if close else "")
        + f" {what.capitalize()}s: {', '.join(files) or f'none in {folder}'}. Give one of these names, or the path of "
        f"a {suffix} file {content}."
    )


def load_preset_module(path: str | Path) -> tuple[object, str]:
    """Runs a preset file and returns its `config` and its docstring ("" if it has none).

    A preset is a Python program: only run files that you trust. Its classes belong to a module named after the
    file's absolute path, under which it stays loaded: `class_path` tells where a class comes from, and its
    annotations can be resolved, also where they are text.

    Raises:
      ConfigError: the file cannot be read, fails (the message names file and line), defines no `config`, or one
        with a value that does not fit its annotation.
    """
    name = str(Path(path).resolve())
    try:
        namespace = runpy.run_path(str(path), run_name=name)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename).resolve() == Path(name):
            raise ConfigError(f"cannot read the preset {path}: {error.strerror}.") from error
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno
        else:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
        place = str(path) if line is None else f"{path}:{line}"
        if isinstance(error, ConfigError):
            raise ConfigError(f"{place}: {error}") from error
        raise ConfigError(f"{place}: the preset fails with {type(error).__name__}: {error}. Correct it.") from error
    module = types.ModuleType(name)
    vars(module).update(namespace)
    sys.modules[name] = module
    config = namespace.get("config")
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"{path}: the preset must assign a config to the name `config`, as in config = RunConfig().")
    try:
        flatten(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config, inspect.cleandoc(namespace.get("__doc__") or "")


def class_path(cls: type) -> str:
    """Where `find_class` finds a class again: "package.module:Name", or "/path/of/preset.py:Name"."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_class(path: str) -> type:
    """The class that `class_path` described. This runs the code that defines it.

    Raises:
      ConfigError: the file or module is gone or fails, or has no such class.
    """
    where, _, name = path.rpartition(":")
    if where.endswith(".py"):
        load_preset_module(where)
        module = sys.modules[str(Path(where).resolve())]
    else:
        try:
            module = importlib.import_module(where)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"the module {where!r} cannot be imported ({error}). Install it, or set PYTHONPATH."
            ) from error
    found = vars(module).get(name)
    if not isinstance(found, type):
        raise ConfigError(f"{where} has no class {name!r}. Put back the code with which the run was made.")
    return found
