"""Finding preset and sweep files, and running preset files."""

from __future__ import annotations

import os
import py_compile
import sys
from pathlib import Path

import pytest

from recjax import settings
from recjax.config import preset_files
from recjax.errors import ConfigError

PRESET = '''"""A preset.

Measured: nothing.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class C:
    x: int = 1


config = C(x=2)
'''


def test_load_preset_module(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PRESET)
    config, docstring = preset_files.load_preset_module(file)
    assert settings.flatten(config) == {"x": 2}
    assert docstring == "A preset.\n\nMeasured: nothing."
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]  # no __pycache__ beside a user's file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\nconfig = 1 / 0\n", r"mine\.py:3: the preset fails with ZeroDivisionError"),
        ("\nconfig = (\n", r"mine\.py:2: the preset fails with SyntaxError"),
        ("\nimport recjax_no_such_module\n", r"mine\.py:2: the preset fails with ModuleNotFoundError"),
        ("\nopen('no_such_file.txt')\n", r"mine\.py:2: the preset fails with FileNotFoundError"),
        ("from recjax.errors import ConfigError\nraise ConfigError('bad dim')\n", r"mine\.py:2: bad dim"),
        ("settings = 1\n", r"mine\.py: the preset must assign a config"),
        ("config = 1\n", r"mine\.py: the preset must assign a config"),
        (PRESET.replace("x=2", "x=2.5"), r"mine\.py: x is 2\.5; expected an integer"),
    ],
)
def test_load_preset_module_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        preset_files.load_preset_module(file)


def test_load_preset_module_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the preset .*gone\.py: No such file"):
        preset_files.load_preset_module(tmp_path / "gone.py")


def test_find_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, elsewhere = tmp_path / "recjax", tmp_path / "elsewhere"
    for folder in (package, elsewhere, tmp_path / "configs"):
        folder.mkdir()
    for name in ("movietweetings", "synthetic"):
        (tmp_path / "configs" / f"{name}.py").write_text(PRESET)
    (elsewhere / "mine.py").write_text(PRESET)
    (elsewhere / "synthetic").write_text("a file that only has the name of a preset")
    monkeypatch.setattr(preset_files, "__file__", str(package / "config" / "preset_files.py"))
    monkeypatch.chdir(elsewhere)

    assert preset_files.find_preset("synthetic") == tmp_path / "configs" / "synthetic.py"
    assert preset_files.find_preset("mine.py").samefile(elsewhere / "mine.py")
    assert preset_files.find_preset(elsewhere / "mine.py") == elsewhere / "mine.py"
    for wrong in ("movietweeting", "movietweetings.py", "/a/long/path/to/my/presets/movietweetings.py"):
        with pytest.raises(ConfigError, match=r"Did you mean movietweetings\? Presets: movietweetings, synthetic\."):
            preset_files.find_preset(wrong)
    for wrong in ("zzz", "mine", "", "../elsewhere/mine"):
        with pytest.raises(ConfigError, match=r"there is no preset .* Presets: movietweetings, synthetic\."):
            preset_files.find_preset(wrong)

    # A wheel holds its own copy, which comes first.
    (package / "configs").mkdir()
    (package / "configs" / "synthetic.py").write_text(PRESET)
    assert preset_files.find_preset("synthetic") == package / "configs" / "synthetic.py"
    with pytest.raises(ConfigError, match="Presets: synthetic"):
        preset_files.find_preset("movietweetings")


def test_find_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs" / "sweeps").mkdir(parents=True)
    (tmp_path / "configs" / "sweeps" / "size.toml").touch()
    (tmp_path / "configs" / "size.toml").touch()  # presets stand here, sweeps in their own folder
    (tmp_path / "mine.toml").touch()
    monkeypatch.setattr(preset_files, "__file__", str(tmp_path / "recjax" / "preset_files.py"))
    assert preset_files.find_sweep("size") == tmp_path / "configs" / "sweeps" / "size.toml"
    assert preset_files.find_sweep(tmp_path / "mine.toml") == tmp_path / "mine.toml"
    with pytest.raises(
        ConfigError, match=r"there is no sweep 'sise'\. Did you mean size\? Sweeps: size\. .* a \.toml file"
    ):
        preset_files.find_sweep("sise")


USER = PRESET.replace("import dataclasses\n", "import dataclasses\n\n{imports}\n").replace("C(x=2)", "C(x={value})")


def write(folder: Path, imports: str, value: str, **helpers: str) -> Path:
    """A preset with these imports, whose config holds `value`, and modules beside it ("__" stands for "/")."""
    for name, text in helpers.items():
        file = folder / (name.replace("__", "/", 1) + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(USER.format(imports=imports, value=value))
    return folder / "mine.py"


def value_of(file: Path) -> object:
    return settings.flatten(preset_files.load_preset_module(file)[0])["x"]


@pytest.mark.parametrize(
    ("imports", "value"),
    [
        ("from one import ONE", "ONE"),
        ("import one", "one.ONE"),
        ("import one as other", "other.ONE"),
        ("from .one import ONE", "ONE"),
        ("from . import one", "one.ONE"),
        ("from pack import ONE", "ONE"),
        ("from pack import leaf", "leaf.ONE"),
        ("from pack.leaf import *", "ONE"),
        ("from pack import *", "leaf.ONE"),
        ("import pack.leaf", "pack.leaf.ONE"),
        ("import pack.leaf as leaf", "leaf.ONE"),
        ("from open.leaf import ONE", "ONE"),
        ("import open.leaf, os.path", "open.leaf.ONE + len(os.path.basename('a/'))"),
        ("from circle import turn", "turn()"),
        ("from circle import late", "late()"),
        ("import random", "len(str(random.Random)) and 7"),
        ("ONE = __import__('one').ONE\nimport one", "ONE"),
    ],
)
def test_imports_from_beside_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str, value: str
) -> None:
    file = write(
        tmp_path / "code",
        imports,
        value,
        one="ONE = 7\n",
        pack____init__="from .leaf import ONE\nfrom . import leaf\n__all__ = ['leaf']\n",
        pack__leaf="from one import ONE\n",
        open__leaf="from ..one import ONE\n",
        circle="import mine\nimport circle as me\ndef turn(): return me.late()\ndef late():\n"
        "    from round import seven\n    return seven() + (mine.C is None)\n",
        round="from circle import late\ndef seven():\n    return 7\n",
        random="raise RuntimeError('one of the standard library is never taken from beside')\n",
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = [*sys.path]
    assert value_of(file) == 7
    assert sys.path == before and not {"one", "pack", "open", "circle", "mine"} & sys.modules.keys()
    assert not [*tmp_path.rglob("__pycache__")]


def test_equal_names_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    function = "@property\n    def late(self):\n        import one\n        return one.ONE\n"
    configs = []
    for folder, text in (("a", "ONE = 1\n"), ("b", "ONE = 2\n")):
        file = write(tmp_path / folder, "", "0", one=text)
        file.write_text(file.read_text().replace("x: int = 1\n", f"x: int = 1\n\n    {function}"))
        configs.append(preset_files.load_preset_module(file)[0])
    assert [config.late for config in configs] == [1, 2]  # type: ignore[attr-defined] # imported only now
    (tmp_path / "a" / "one.py").write_text("ONE = 3\n")
    again = preset_files.load_preset_module(tmp_path / "a" / "mine.py")[0]
    assert [config.late for config in (again, *configs)] == [3, 1, 2]  # type: ignore[attr-defined]


def test_an_edited_helper_is_seen_at_once(tmp_path: Path) -> None:
    """Also one that a cache of compiled code would take for the old one: as long, and of the same time."""
    file = write(tmp_path, "from one import ONE", "ONE", one="ONE = 1\n")
    py_compile.compile(str(tmp_path / "one.py"))
    assert value_of(file) == 1
    before = (tmp_path / "one.py").stat()
    (tmp_path / "one.py").write_text("ONE = 2\n")
    os.utime(tmp_path / "one.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert value_of(file) == 2


@pytest.mark.parametrize(
    ("helper", "message"),
    [
        ("ONE = 1\n\nTWO = 1 / 0\n", r"one\.py:3: the preset fails with ZeroDivisionError"),
        ("def f(:\n", r"one\.py:1: the preset fails with SyntaxError"),
        ("import two\n", r"one\.py:1: the preset fails with ModuleNotFoundError: No module named 'two'"),
        ("from .... import two\n", r"one\.py:1: the preset fails with ImportError: attempted relative import beyond"),
        ("", r"mine\.py:8: the preset fails with ImportError: cannot import name 'ONE'"),
        ("import random\nfrom random import no_such\n", r"one\.py:2: .* cannot import name 'no_such'"),
    ],
)
def test_a_mistake_in_a_helper(tmp_path: Path, helper: str, message: str) -> None:
    file = write(tmp_path, "from one import ONE", "ONE", one=helper)
    before = {*sys.modules}
    with pytest.raises(ConfigError, match=message):
        preset_files.load_preset_module(file)
    assert {*sys.modules} == before


def test_a_class_from_a_helper_is_found_again(tmp_path: Path) -> None:
    file = write(
        tmp_path, "", "1", runs="import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass R:\n    x: int = 5\n"
    )
    file.write_text("import runs\nconfig = runs.R()\n")
    config, _ = preset_files.load_preset_module(file)
    where = preset_files.class_path(type(config))
    assert where == f"{file}:R"
    assert settings.flatten(preset_files.find_class(where)()) == {"x": 5}
