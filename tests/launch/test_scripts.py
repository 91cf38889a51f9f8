"""What holds of every script in launch/."""

import re
import subprocess
from pathlib import Path

import pytest
from launch_support import LAUNCH, SHELLCHECK, Desk, golden, scripts

SOURCED = ("common.sh", "slurm_common.sh")
RUN = [path for path in scripts() if path.name not in SOURCED]


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed; it comes with the extra dev")
def test_shellcheck() -> None:
    done = subprocess.run([str(SHELLCHECK), "-x", *scripts()], cwd=LAUNCH.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", RUN, ids=lambda path: path.name)
def test_header(script: Path, tmp_path: Path) -> None:
    text = script.read_text()
    assert text.startswith(f"#!/usr/bin/env bash\n# {script.name}: ")
    assert "\n# Usage: " in text and re.search(r"\bedit\b", text, re.I) and "\nset -euo pipefail\n" in text
    done = Desk(tmp_path).run(str(script.relative_to(LAUNCH)), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{script.name}: ") and "#" not in [line[:1] for line in done.stdout.splitlines()]
    assert "--dry-run" in done.stdout and "SBATCH --" not in done.stdout


def test_the_header_says_what_was_run() -> None:
    for script in RUN:
        if script.name != "env.sh":
            assert "\n# Run for real: " in script.read_text(), script


def test_every_script_is_in_the_table() -> None:
    table = (LAUNCH / "README.md").read_text()
    assert [script.name for script in RUN if script.name not in table] == []


def test_environment(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    there = {"http_proxy": "p", "no_proxy": "metadata", "NPROC": 1, "RECJAX_CPU_DEVICES": 12}
    golden("env.txt", desk.dry("env.sh", "n1", "n2", env=there))
    kept = desk.dry("env.sh", env={"NPROC": 64, "RECJAX_LIMIT_S": 5})
    assert "NPROC=64\n" in kept and "RECJAX_LIMIT_S=5\n" in kept and "proxy" not in kept
    twice = f"http_proxy=p; . {LAUNCH}/env.sh n1; . {LAUNCH}/env.sh n1; echo $no_grpc_proxy $RECJAX_LIMIT_S"
    done = subprocess.run(["bash", "-euc", twice], env=desk.env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("n1 60\n", "")


@pytest.mark.parametrize(("statuses", "verdict"), [
    ("0 0", 0), ("0 143", 143), ("4 143", 143), ("143 137", 143), ("137 0", 4), ("4 134", 4), ("4 1", 1), ("3 1", 3),
    ("3 2 4", 2), ("127 4", 127),
])  # fmt: skip
def test_verdict(statuses: str, verdict: int) -> None:
    script = f". {LAUNCH}/common.sh; verdict {statuses}"
    assert subprocess.check_output(["bash", "-euc", script], text=True) == f"{verdict}\n"
