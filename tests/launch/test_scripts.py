"""What holds of every script in launch/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launchers import LAUNCH, SHELLCHECK, Desk, golden, scripts

SOURCED = ("common.sh", "slurm_common.sh")
RUN = [path for path in scripts() if path.name not in SOURCED]


@pytest.mark.full
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


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ("0 0", 0),
        ("0 143", 143),
        ("4 143", 143),
        ("143 137", 143),
        ("4 130", 130),
        ("143 130", 143),
        ("137 0", 4),
        ("4 134", 4),
        ("4 1", 1),
        ("3 1", 3),
        ("3 2 4", 2),
        ("127 4", 127),
    ],
)
def test_verdict(statuses: str, verdict: int) -> None:
    script = f". {LAUNCH}/common.sh; verdict {statuses}"
    assert subprocess.check_output(["bash", "-euc", script], text=True) == f"{verdict}\n"


SCRIPTS = {
    "local.sh": (["--gpus", "--processes", "2"], "gpu"),
    "ssh.sh": (["--hosts", "hosts", "--gpus"], "gpu"),
    "slurm.sbatch": ([], "gpu"),
    "tpu_vm.sh": (["--tpu", "t", "--dir", "/d"], "tpu"),
    "k8s/render.sh": (["--image", "i", "--claim", "c", "--gpus", "8"], "gpu"),
    "gke.sh": ("--cluster c --location us-west4 --image i --claim c --tpu t --topology 2x2 --tpus 4".split(), "tpu"),
}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    (desk.folder / "hosts").write_text("node1\n")
    return desk


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_refuses_what_recjax_refuses(desk: Desk, script: str) -> None:
    options, _ = SCRIPTS[script]
    refusal = "invalid choice: 'trian'. Did you mean train?"
    (desk.fake / "refuses").write_text(refusal)
    done = desk.run(script, "--dry-run", *options, "--", "trian", "p")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{Path(script).name}: this command would fail: {refusal}\n"
    assert (desk.fake / "checks").read_text() == "trian --help\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_shows_the_config_and_warns_where_accelerators_would_be_idle(desk: Desk, script: str) -> None:
    options, kind = SCRIPTS[script]
    (desk.fake / "shows").write_text("seed=0\nmesh.platform=cpu   (preset: auto)\n")
    done = desk.run(script, "--dry-run", *options, "--", "train", "p", "seed=1", "--out", "runs/x", "--json")
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert f"warning: this asks for {kind.upper()}s, but mesh.platform=cpu" in done.stderr
    assert f"mesh.platform={kind} mesh.devices=0" in done.stderr
    checks = (desk.fake / "checks").read_text().splitlines()
    assert checks[0] == "train --help" and checks[1].startswith("show p seed=1") and len(checks) == 2
    (desk.fake / "shows").write_text("seed=0\nmesh.platform=gpu   (preset: cpu)\n")
    assert desk.run(script, "--dry-run", *options, "--", "train", "p").stderr == ""


def test_a_dry_run_where_recjax_or_the_preset_is_not(desk: Desk) -> None:
    done = desk.run("ssh.sh", "--dry-run", "--hosts", "hosts", "--", "train", "there.py", "seed=1")
    assert done.returncode == 0 and "the preset is not on this machine" in done.stderr
    done = desk.run("ssh.sh", "--dry-run", "--hosts", "hosts", "--", "trian", env={"RECJAX_BIN": "/not/here/recjax"})
    assert done.returncode == 0 and "recjax is not installed here, so the command was not checked" in done.stderr


def test_the_dry_run_of_an_array_checks_the_sweep(desk: Desk) -> None:
    desk.dry("slurm_array.sbatch", "size", "--out", "runs/s")
    assert (desk.fake / "checks").read_text() == "sweep --help\nsweep size --out runs/s --dry-run\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trian", "synthetic"), "invalid choice: 'trian' .*Did you mean train"),
        (("train", "synthetik"), "no preset 'synthetik'"),
        (("train", "synthetic", "train.step=3", "--out", "x"), "Did you mean train.steps"),
    ],
)
def test_what_recjax_itself_refuses(desk: Desk, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    program = tmp_path / "recjax"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={LAUNCH.parent} exec {sys.executable} -m recjax "$@"\n')
    program.chmod(0o755)
    done = desk.run("local.sh", "--dry-run", "--", *words, env={"RECJAX_BIN": program})
    assert (done.returncode, done.stdout) == (2, "") and re.search(says, done.stderr)
    assert done.stderr.startswith("local.sh: this command would fail: ") and done.stderr.count("\n") == 1
