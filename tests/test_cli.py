"""What scripts rely on: the verbs, their JSON, standard output and standard error, exit statuses, the Python calls."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import SMALL, assert_refused, inside, outside, start

import recjax
from recjax.config.presets import load
from recjax.settings.overrides import to_json

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

VERBS = (
    ["train"],
    ["eval"],
    ["predict"],
    ["show"],
    ["plan"],
    ["calibrate"],
    ["sweep"],
    ["tune"],
    ["data", "prepare"],
    ["data", "info"],
    ["weights", "import"],
    ["weights", "export"],
    ["trace", "report"],
    ["trace", "convert"],
    ["replay"],
    ["simulate", "collective"],
    ["simulate", "workload"],
    ["simulate", "hoti2020"],
    ["study", "hoti2020"],
)
METRICS = {"auc", "logloss", "ne", "calibration", "samples"}


@pytest.fixture(scope="module")
def run(preset, tmp_path_factory):
    """A finished run folder, and what its command printed."""
    out = tmp_path_factory.mktemp("run") / "first"
    # An override may also stand behind an option.
    done = inside("train", preset, "train.steps=7", "--out", out, "train.eval_every=5", "mesh.devices=2", "--json")
    return out, done


# --- help ---

HELP = """
import sys
from recjax.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as exit:
    print(exit.code, *sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("verb", [[], *VERBS], ids=" ".join)
def test_help_shows_an_example_and_imports_nothing_heavy(verb):
    command = [sys.executable, "-c", HELP, *verb, "--help"]
    environment = os.environ | {"PYTHONPATH": str(Path(recjax.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    status, *modules = done.stderr.split()
    assert status == "0"
    assert f"example: recjax {' '.join(verb)}" in done.stdout
    assert "recjax.cli.main" in modules
    assert not {"jax", "jaxlib", "flax", "numpy", "tensorflow_datasets", "matplotlib"} & set(modules)


def test_help_names_every_verb_and_the_exit_statuses():
    text = inside("--help").out
    verbs = ("train", "eval", "predict", "show", "plan", "sweep", "data", "weights", "simulate")
    assert [verb for verb in verbs if f"\n    {verb} " not in text] == []
    assert "0 done, 2 bad usage or config, 3 bad data, 4 lost a peer or the device, 130 Ctrl-C, 143 SIGTERM" in text


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_example_of_every_verb_parses(verb, tmp_path, monkeypatch):
    """Run where nothing is: it may fail for want of data or a run, but not for its syntax, keys or names."""
    monkeypatch.chdir(tmp_path)
    (example,) = [line for line in inside(*verb, "--help").out.splitlines() if line.startswith("example: ")]
    words = example.removeprefix("example: recjax ").split()
    if verb == ["train"]:
        words += ["mesh.platform=gpu"]  # which ends it after the config is read
    if verb == ["calibrate"]:
        words += ["--platform=tpu"]  # likewise, before it measures
    if verb == ["tune"]:
        words += ["--results"]  # no trial
    if verb[-1] == "hoti2020":
        words += ["--experiments", "lone_all_reduce", "--chunks", "1"]  # the quickest of them
    done = inside(*words)
    assert "--help`" not in done.err and "unknown" not in done.err  # how refusals of the command line end
    failing = {"train": 4, "eval": 2, "predict": 3, "data prepare": 3, "weights import": 2, "weights export": 2}
    failing["tune"] = 0 if importlib.util.find_spec("optuna") else 2
    failing |= dict.fromkeys(("trace report", "trace convert", "replay"), 3) | {"calibrate": 4}
    assert done.status == failing.get(" ".join(verb), 0), done.err


# --- results ---


def test_train_prints_what_summary_json_holds(run, preset):
    out, done = run
    result = done.result
    assert result.pop("out") == str(out)
    assert result == json.loads((out / "summary.json").read_text())
    assert result.keys() >= {"steps", "samples", "samples_per_s", "eval", "devices", "versions"}
    assert (result["steps"], result["samples"], result["devices"]) == (7, 7 * 64, 2)
    assert result["samples_per_s"] is None or result["samples_per_s"] > 0  # of seven steps few may count
    assert result["eval"].keys() == METRICS and result["eval"]["samples"] == 700
    assert (result["eval_split"], result["eval_step"] in (5, 7)) == ("test", True)
    assert result["chosen_by"] == "validation auc"
    assert result["routing"] == "host"
    assert result["versions"].keys() >= {"recjax", "python", "jax", "flax", "numpy"}
    names = {path.name for path in out.iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "summary.json", "checkpoints", "curves.png"}
    overrides = ["train.steps=7", "train.eval_every=5", "mesh.devices=2"]
    assert (out / "config.json").read_text() == to_json(load(str(preset), overrides))


def test_metrics_hold_a_line_for_every_step_and_split(run):
    out, done = run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 8))
    assert [line["step"] for line in lines if line["split"] == "validation"] == [5, 7]
    (test,) = [line for line in lines if line["split"] == "test"]
    summary = done.result
    assert test["step"] == summary["eval_step"]
    assert {key: test[key] for key in METRICS} == summary["eval"]
    best = max((line for line in lines if line["split"] == "validation"), key=lambda line: line["auc"])
    assert best["step"] == summary["eval_step"]


def test_progress_goes_to_standard_error(run):
    _, done = run
    assert "step 1/7  loss 0." in done.err and "step 7: validation AUC 0." in done.err
    assert "resuming" not in done.err


def test_the_same_command_again_changes_no_result(run, preset, tmp_path):
    out, done = run
    before = (out / "metrics.jsonl").read_text()
    again = inside("train", preset, "train.steps=7", "train.eval_every=5", "mesh.devices=2", "--out", out, "--json")
    assert "nothing is left to train" in again.err
    assert again.result["eval"] == done.result["eval"] and again.result["eval_step"] == done.result["eval_step"]
    assert (out / "metrics.jsonl").read_text() == before


def test_eval_gives_the_metrics_of_a_checkpoint(run):
    out, done = run
    summary = done.result
    result = inside("eval", out, "--step", summary["eval_step"], "--json").result
    assert result.items() >= {"step": summary["eval_step"], "split": "test", **summary["eval"]}.items()
    newest = inside("eval", out, "mesh.devices=3", "--step=newest", "--split", "validation", "--json").result
    assert (newest["step"], newest["split"], newest["samples"]) == (7, "validation", 600)
    text = inside("eval", out).out
    assert "auc " in text and "logloss " in text


def test_show_prints_the_config_that_a_run_would_have(preset):
    assert inside("show", preset, "--json", "train.steps=7").result == json.loads(
        to_json(load(str(preset), ["train.steps=7"]))
    )
    text = inside("show", preset, "train.steps=7").out
    assert "\ntrain.steps=7   (preset: 0)\n" in text and "\ndata=synthetic\n" in text and "runs/synthetic-dlrm-" in text
    # What it prints are overrides that give the same config.
    pairs = [line.partition("   (")[0] for line in text.splitlines() if "=" in line]
    assert to_json(load("synthetic", pairs)) == to_json(load(str(preset), ["train.steps=7"]))


def test_what_a_choice_replaces_is_told_and_so_is_what_the_data_leave_unused(preset, tmp_path):
    settings = ("embedding.dim=12", "data.dense=0")
    told = inside("train", preset, *SMALL, *settings, "--out", tmp_path / "run")
    assert told.status == 0
    first, second, *_ = told.err.splitlines()
    assert first == "what you set changes other settings too: model.bottom=16,12 (preset: 16,8)"
    assert second.startswith("the data have no dense features, so the model has no bottom MLP: model.bottom=16,12")
    assert "model.bottom=16,12   (preset: 16,8)" in inside("show", preset, *settings).out
    done = inside("weights", "export", tmp_path / "run", "--format", "facebook", "--out", tmp_path / "w.npz")
    assert_refused(done, 2, "there every model has a bottom MLP, and this one has none")


def test_plan_tells_where_every_table_goes(preset, tmp_path):
    result = inside("plan", preset, "mesh.devices=4", "--save", tmp_path / "plan.json", "--json").result
    assert result["devices"] == 4
    assert result["tables"].keys() == {"sparse_0", "sparse_1", "sparse_2"}
    # 300 rows of 8 floats and one slot
    assert result["tables"]["sparse_0"]["bytes"] == 300 * (8 + 1) * 4
    assert {table["placement"] for table in result["tables"].values()} == {"row_wise"}
    saved = inside("plan", preset, f"plan={tmp_path / 'plan.json'}", "mesh.devices=4", "--json").result
    assert saved == result
    text = inside("plan", preset).out
    assert "sparse_0" in text and "row_wise" in text
    text = inside("plan", preset, "plan=table_row_wise", "mesh.devices=4", "mesh.hosts=2").out
    assert (
        "table_row_wise on host 0" in text and "table_row_wise on host 1" in text and "4 device(s) in 2 hosts" in text
    )


def test_an_output_file_that_is_a_link_stays_one(run, preset, tmp_path):
    for name, command in (
        ("plan.json", ("plan", preset, "mesh.devices=4", "--save")),
        ("weights.npz", ("weights", "export", run[0], "--format", "facebook", "--out")),
    ):
        link, file = tmp_path / name, tmp_path / f"there-{name}"
        link.symlink_to(file)
        assert inside(*command, link).status == 0
        assert link.is_symlink() and file.stat().st_size > 100


def test_data_prepare_and_info(tmp_path):
    made = inside("data", "prepare", "movietweetings", "--out", tmp_path / "made", "min_user_count=5", "--json").result
    assert made.keys() == {"dataset", "path", "fingerprint", "rows", "skipped"}
    assert sum(made["rows"].values()) == 100_000 and made["rows"]["test"] == 20_000
    info = inside("data", "info", tmp_path / "made", "--json").result
    assert info["fingerprint"] == made["fingerprint"]
    assert [feature["name"] for feature in info["features"]] == ["user", "movie", "genres", "year"]
    assert {split: part["rows"] for split, part in info["splits"].items()} == made["rows"]
    assert "movie" in inside("data", "info", tmp_path / "made").out
    assert inside("data", "prepare", "movietweetings", "--out", tmp_path / "made", "min_user_count=5").status == 0


def test_a_measure_without_a_value_is_null_in_json(preset, tmp_path):
    """The AUC of a single class: of one sample, say."""
    done = inside("train", preset, "train.steps=2", "mesh.devices=2", "data.test_rows=1", "--out", tmp_path, "--json")
    assert done.result["eval"]["auc"] is None and done.result["eval"]["logloss"] > 0
    assert inside("eval", tmp_path, "--json").result["auc"] is None
    assert " nan" in inside("eval", tmp_path).out


def test_a_validation_auc_without_a_value_chooses_nothing(preset, tmp_path):
    done = inside(
        "train",
        preset,
        "train.steps=12",
        "train.eval_every=4",
        "train.patience=1",
        "mesh.devices=2",
        "data.validation_rows=1",
        "--out",
        tmp_path,
        "--json",
    )
    result = done.result
    assert (result["steps"], result["stopped_early"]) == (12, False)
    assert (result["eval_step"], result["chosen_by"]) == (12, "last step")
    assert "step 4: the validation auc has no value" in done.err and "best so far" not in done.err


def test_python_gives_what_the_command_gives(run, preset, tmp_path):
    """The three lines of recjax/__init__.py."""
    out, done = run
    config = recjax.load(str(preset), "train.steps=7", "train.eval_every=5", "mesh.devices=2")
    summary = recjax.fit(config, out=tmp_path / "run")
    measured = {"samples_per_s", "seconds", "compile_s", "compile_ahead_s", "first_step_s"}
    told = done.result
    assert {k: v for k, v in summary.items() if k not in measured} == {
        k: v for k, v in told.items() if k not in {*measured, "out"}
    }
    assert summary.keys() == told.keys() - {"out"}
    result = recjax.evaluate(tmp_path / "run")
    assert result["step"] == 7 and np.isfinite(result["auc"])
    assert recjax.evaluate(str(tmp_path / "run"), "mesh.devices=1")["auc"] == pytest.approx(result["auc"], abs=1e-6)


# --- streams ---


def test_standard_output_that_is_closed_full_or_deserted():
    assert outside("show", "synthetic", stdout=subprocess.DEVNULL).err == ""
    with open("/dev/full", "w") as full:
        assert_refused(outside("show", "synthetic", stdout=full), 1, "No space left on device")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as deserted:
        done = outside("show", "synthetic", stdout=deserted)
    assert (done.status, done.err) == (1, "")
    # As in `recjax show synthetic >&-`: Python then has no sys.stdout at all.
    done = outside("show", "synthetic", before="import sys\nsys.stdout = None")
    assert (done.status, done.err) == (0, "")


def test_errors_do_not_land_on_standard_output():
    done = outside("show", "synthetik", before="import sys\nsys.stderr = None")
    assert (done.status, done.out) == (2, "")


def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "recjax", "show", "nonsense"]
    environment = os.environ | {"PYTHONPATH": str(Path(recjax.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("\nrecjax: error: there is no preset 'nonsense'")


def test_a_progress_line_that_nobody_reads_does_not_end_the_run(preset, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with (
        os.fdopen(writing, "w") as deserted,
        start("train", preset, "train.steps=2", "mesh.devices=2", "--out", tmp_path, "--json", stderr=deserted) as run,
    ):
        out, _ = run.communicate()
    assert run.returncode == 0 and json.loads(out)["steps"] == 2
