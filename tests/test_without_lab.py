"""The trainer runs without the lab: in a copy of the package that has no `recjax/lab`, as a new user would use it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.shop import prepare_shop, rows

import recjax

pytestmark = pytest.mark.full

SMALL = "model.bottom=8-4 model.top=8-1 embedding.dim=4 train.batch_size=64 train.checkpoint_every=2".split()

# Runs commands one after the other in one process, and prints status and output of each as a line of JSON.
PROGRAM = """
import contextlib, io, json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from recjax.cli.main import main
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package and the presets, without the lab."""
    top, source = tmp_path_factory.mktemp("trainer"), Path(recjax.__file__).parent
    shutil.copytree(source, top / "recjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(top / "recjax/lab")
    shutil.copytree(source.parent / "configs", top / "configs")
    return top


def environment(package: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}


def run(package: Path, folder: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env=environment(package),
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def result(done: tuple[int, str, str]) -> Any:
    status, out, err = done
    assert status == 0, err
    return json.loads(out)


def test_trains_resumes_plans_and_scores(package: Path, tmp_path: Path) -> None:
    prepare_shop(tmp_path / "data")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()[:5]))
    data = ["synthetic", "data=prepared", "data.path=data", "mesh.devices=2", *SMALL]
    names = "train resume eval predict export preflight plan compile auto".split()
    done = run(
        package,
        tmp_path,
        ["train", *data, "train.steps=2", "--out", "run", "--json"],
        ["train", *data, "train.steps=4", "--out", "run", "--json"],
        ["eval", "run", "--json"],
        ["predict", "run", "--input", "rows.jsonl", "--out", "scores.csv", "--json"],
        ["export", "run", "--out", "exported", "--json"],
        ["preflight", *data, "--json"],
        ["plan", *data, "--json"],
        ["plan", *data, "--compile", "--json"],
        ["plan", *data, "plan=auto", "planner.machine=h200", "--json"],
    )
    results = dict(zip(names, map(result, done), strict=True))
    assert (results["train"]["steps"], results["resume"]["steps"]) == (2, 4)
    assert results["eval"]["auc"] == pytest.approx(results["resume"]["eval"]["auc"])
    assert results["predict"]["rows"] == 5
    assert results["preflight"]["collectives"]["all_to_all"]["points"][0]["p50_us"] > 0
    assert results["compile"]["compiled"]["memory"]["tables"] > 0
    assert results["auto"]["chosen"]
    if importlib.util.find_spec("fastapi"):
        assert_serves(package, tmp_path)


def assert_serves(package: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "recjax", "serve", "exported", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(package), cwd=folder) as server:
        try:
            said = json.loads(server.stdout.readline())
            body = json.dumps(said["example"]).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{said['url']}/score", body)) as answer:
                assert json.load(answer)["scores"]
        finally:
            server.terminate()


def test_what_the_lab_does_is_missed_in_one_sentence(package: Path, tmp_path: Path) -> None:
    lab = ["bench", "calibrate", "trace", "trace report", "trace convert", "replay", "simulate", "study"]
    commands = [[*verb.split(), "--help"] for verb in lab]
    options = [["--predict", "--machine", "h200"], ["--devices", "1,2"], ["--tiers"]]
    commands += [["plan", "synthetic", "planner.machine=h200", *SMALL, *option] for option in options]
    for command, (status, out, err) in zip(commands, run(package, tmp_path, *commands), strict=True):
        assert (status, out) == (2, ""), command
        wanted = " ".join(command[:2]) if command[1] in ("report", "convert") else command[0]
        assert f"`recjax {wanted}" in err and "recjax.lab" in err and err.count("\n\n") == 0, err
        assert "Traceback" not in err


def test_help_lists_the_lab_apart(package: Path, tmp_path: Path) -> None:
    for folder in (package, Path(recjax.__file__).parents[1]):
        ((status, out, _),) = run(folder, tmp_path, ["--help"])
        trainer, _, lab = out.partition("\nlab verbs")
        assert status == 0
        assert "\n    train " in trainer and "bench " not in trainer
        assert "\n    bench " in lab and "\n    study " in lab
