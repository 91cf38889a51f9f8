"""A whole run, short, from Python: train, resume on another mesh, evaluate. Also run on the newest JAX."""

import json
from pathlib import Path

import pytest

import recjax

pytestmark = [pytest.mark.few_programs, pytest.mark.light_compile(as_text=True)]

SMALL = ("train.batch_size=256", "train.eval_every=15", "train.log_every=5", "mesh.platform=auto")
# Samples that are made up are as many as it takes.
FEW = {
    "movietweetings": (),
    "synthetic_multihot": ("data.train_rows=20000", "data.validation_rows=3000", "data.test_rows=3000"),
}


@pytest.mark.full
@pytest.mark.smoke
@pytest.mark.parametrize("preset", [pytest.param("movietweetings", marks=pytest.mark.wide), "synthetic_multihot"])
def test_a_run_leaves_what_the_readme_promises_and_goes_on_elsewhere(preset: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", (*SMALL, *FEW[preset])
    first = recjax.fit(recjax.load(preset, *settings, "train.steps=20", "mesh.devices=8"), out)
    assert (first["steps"], first["samples"], first["devices"]) == (20, 20 * 256, 8)
    assert first["eval_split"] == "test" and first["eval_step"] in (15, 20)

    summary = recjax.fit(recjax.load(preset, *settings, "train.steps=30", "mesh.devices=3", "plan=auto"), out)
    assert (summary["steps"], summary["samples"], summary["devices"]) == (30, 30 * 256, 3)
    assert json.loads((out / "summary.json").read_text())["eval"] == summary["eval"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["split"] == "train"] == [5, 10, 15, 20, 25, 30]
    # step 20 was evaluated for being the last, which it is no more
    assert [x["step"] for x in lines if x["split"] == "validation"] == [15, 30]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert recjax.load(preset, *settings, "train.steps=30", "mesh.devices=3", "plan=auto") == read(out)

    again = recjax.evaluate(out, "mesh.devices=2")
    assert again["step"] == summary["eval_step"]
    assert again["auc"] == pytest.approx(summary["eval"]["auc"], abs=1e-4)
    assert recjax.evaluate(out, step="newest")["step"] == 30


def read(out: Path) -> object:
    from recjax.train.run.folder import read_config

    return read_config(out)
