"""Every script that measures starts: its imports are there, and it says what it takes."""

import runpy
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
OURS = [str(TOP / "tests"), str(TOP / "benchmarks")]
SCRIPTS = sorted((TOP / "benchmarks").glob("*.py"))


@pytest.mark.full
def test_measuring_scripts_say_what_they_take(monkeypatch, capsys):
    assert len(SCRIPTS) > 30
    wrong = []
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [str(script), "--help"])
        monkeypatch.setattr(sys, "path", [str(script.parent), *(path for path in sys.path if path not in OURS)])
        for name in [name for name in sys.modules if name.partition(".")[0] in ("support", "conftest")]:
            monkeypatch.delitem(sys.modules, name)  # which the script must find by itself
        before = set(sys.modules)
        try:
            runpy.run_path(str(script), run_name="__main__")
            wrong.append(f"{script.name}: it ended without a word about its options")
        except SystemExit as end:
            if end.code or "usage:" not in capsys.readouterr().out:
                wrong.append(f"{script.name}: status {end.code}")
        except Exception as error:
            wrong.append(f"{script.name}: {type(error).__name__}: {error}")
        for name in set(sys.modules) - before:  # of the tests: the next script must find them by itself, too
            if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(OURS)):
                del sys.modules[name]
        monkeypatch.undo()
    assert not wrong, "\n".join(wrong)
