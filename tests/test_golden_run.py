"""Data, a plan and a run that an earlier version wrote: this one reads them and gives the same numbers.

All is in float64, where neither the mesh nor a compiler moves a number by more than 1e-9. golden/make_run.py made it,
but for "begun" in run.json. Initial values have been drawn by 64 bits of a table's name since then: those are the
numbers of a run that begins with them.
"""

import json
import tarfile
from pathlib import Path

import pytest
from support.commands import inside, lines_of

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "run.json").read_text())
OTHERWISE = ("mesh.devices=3", "plan=table_wise")


def close(numbers, rel=1e-9):
    return pytest.approx(numbers, rel=rel, abs=0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Here lie `data`, `plan.json`, `run` and `rows.jsonl`."""
    with tarfile.open(GOLDEN / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_evaluated(folder):
    result = inside("eval", "run", "--json").result
    assert result["step"] == EXPECTED["eval_step"]
    assert {key: result[key] for key in EXPECTED["eval"]} == close(EXPECTED["eval"])


def test_it_predicts(folder):
    assert inside("predict", "run", "--input", "rows.jsonl", "--out", "scores.jsonl").status == 0
    logits = [json.loads(line)["logit"] for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert logits == close(EXPECTED["logits"])


# Initial weights are drawn in float32, and their last bit, 1e-7, is that version's of JAX; the losses moved by 2e-9.
@pytest.mark.parametrize(
    ("out", "changes", "numbers", "rel"),
    [
        ("run", (), "longer", 1e-9),
        ("run", OTHERWISE, "longer", 1e-9),
        ("new", (), "begun", 1e-7),
        ("new", OTHERWISE, "begun", 1e-7),
    ],
)
def test_it_goes_on_and_begins_again(folder, out, changes, numbers, rel):
    done = inside(*EXPECTED["command"], "train.steps=10", *changes, "--out", out, "--json")
    assert ("/run at step 6\n" in done.err) == (out == "run")
    expected = EXPECTED[numbers]
    assert [line["loss"] for line in lines_of(folder / out, "train")] == close(expected["losses"], rel)
    assert (done.result["eval_step"], done.result["eval"]) == (expected["eval_step"], close(expected["eval"], rel))
