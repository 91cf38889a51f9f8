"""Finding preset and sweep files, and running preset files."""

from __future__ import annotations

from pathlib import Path

import pytest

from recjax import config as cfg
from recjax import preset_files
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
    assert cfg.flatten(config) == {"x": 2}
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
    monkeypatch.setattr(preset_files, "__file__", str(package / "preset_files.py"))
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
