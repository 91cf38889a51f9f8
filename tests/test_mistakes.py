"""A user's mistake is one paragraph with place and remedy and the promised exit status, and leaves nothing that hurts.

Nothing half-written is trusted by a later run: the corrected command works in the same folder. Mistakes in a command
line or a config are in test_mistakes_in_usage.py, in data in test_mistakes_in_data.py; disks that refuse are in
test_disks.py.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from support.commands import SMALL, assert_refused, contents, inside, outside

from recjax.data import catalog

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

# What is found only when the run is set up: the folder stays free for the corrected command.
IN_SETTINGS = (
    ("embedding.dim=16 model.bottom=16-8", 2, "model.bottom ends in 8, but .* sparse_0 .16.* change embedding.dim"),
    ("data.train_rows=0", 3, "split 'train' of synthetic has no rows"),
    ("mesh.devices=9", 4, "mesh.devices=9, but JAX sees 8 cpu.* in this process: restart it"),
    ("mesh.platform=gpu", 4, "mesh.platform=gpu: JAX finds no such device.*cuda12"),
    ("plan=nowhere.json", 2, "plan=nowhere.json: there is no plan file of that name.* balanced, row_wise"),
    ("data=prepared", 3, "Give it as data.path=DIR"),
    ("data=prepared data.path=nowhere", 3, "no prepared data at .*/nowhere: there is no such.*recjax data prepare"),
)


def test_the_corrected_command_works_in_the_same_folder(preset, clean, tmp_path):
    out = tmp_path / "run"
    for mistake, status, pattern in IN_SETTINGS:
        assert_refused(inside("train", preset, *SMALL, *mistake.split(), "--out", out), status, pattern)
        assert sorted(os.listdir(out)) == [".lock"]
    assert inside("train", preset, *SMALL, "--out", out, "--json").result["eval"] == clean


def test_a_config_that_a_kill_left_half_written_does_not_block_the_folder(preset, clean, tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.unfinished-1234").write_text('{"seed": ')
    assert inside("train", preset, *SMALL, "--out", tmp_path, "--json").result["eval"] == clean
    assert not list(tmp_path.glob("*unfinished*"))


# --- the run folder ---


def test_a_run_of_another_config(preset, tmp_path):
    command = ("train", preset, *SMALL, "--out", tmp_path)
    assert inside(*command).status == 0
    results = [tmp_path / "metrics.jsonl", tmp_path / "summary.json"]
    before = contents(tmp_path) | {file.name: file.read_bytes() for file in results}
    done = inside(*command, "seed=2", "train.batch_size=32", "model.top=8-1", "train.optimizer=sgd")
    last = assert_refused(done, 2, "holds a run of another config", "another --out to start again")
    for words in (
        "seed: 0 there, 2 here",
        "train.batch_size: 64 there, 32 here",
        "model.top: 16,1 there, 8,1 here",
        "train.optimizer: adagrad there, sgd here",
        "train.optimizer.learning_rate: 0.05 there, 0.1 here",
    ):
        assert words in last
    assert "none" not in last, "settings that only one of two kinds has are left out"
    assert_refused(
        inside(*command, "train.steps=1"),
        2,
        "already trained 2 steps, more than the 1",
        "ask for more steps \\(train.steps",
    )
    assert contents(tmp_path) | {file.name: file.read_bytes() for file in results} == before
    assert inside(*command, "mesh.devices=3", "plan=data_parallel", "train.log_every=5").status == 0


def test_a_run_that_never_reached_a_checkpoint_gives_its_folder_up(preset, clean, tmp_path):
    rate = "train.optimizer.learning_rate=1e35"
    assert_refused(inside("train", preset, *SMALL, rate, "--out", tmp_path), 1, "not finite")
    assert inside("train", preset, *SMALL, "--out", tmp_path, "--json").result["eval"] == clean


def test_a_folder_that_is_no_run_folder(preset, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    pattern = "is not empty and holds no config.json, so it is not a run folder. Choose another --out"
    assert_refused(inside("train", preset, *SMALL, "--out", tmp_path), 2, pattern)
    assert_refused(inside("train", preset, *SMALL, "--out", tmp_path / "thesis.tex"), 2, "--out .*tex is a file")
    done = inside("train", preset, *SMALL, "--out", tmp_path / "thesis.tex" / "run")
    assert_refused(done, 1, "cannot be written: Not a directory", "Choose an --out")
    assert os.listdir(tmp_path) == ["thesis.tex"] and (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_folder_with_another_program_s_config(preset, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    pattern = "holds a config.json that no run of recjax wrote, so it is not a run folder. Choose another --out"
    for text in ('{"name": "a web page", "seed": 3}', "[1]", "rubbish", '{"class": "site.py:Page"}'):
        (tmp_path / "config.json").write_text(text)
        before = contents(tmp_path)
        assert_refused(inside("train", preset, *SMALL, "--out", tmp_path), 2, pattern)
        assert contents(tmp_path) == before


def test_a_damaged_config_or_record(preset, tmp_path):
    command = ("train", preset, *SMALL, "--out", tmp_path, "--json")
    first = inside(*command).result
    config, metrics = (tmp_path / "config.json").read_text(), (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "config.json").write_text(config[: len(config) // 2])
    assert_refused(inside(*command), 2, r"config\.json:\d+: not valid JSON", "restore it")
    assert_refused(inside("eval", tmp_path), 2, r"config\.json:\d+: not valid JSON")
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "metrics.jsonl").write_text("rubbish\n" + metrics)
    assert_refused(inside(*command), 1, r"metrics\.jsonl, line 1: b'rubbish", "delete that line")
    (tmp_path / "metrics.jsonl").write_text(metrics + '{"step": 1, "spl')  # which a kill may leave
    assert inside(*command).result["eval"] == first["eval"]
    assert (tmp_path / "metrics.jsonl").read_text() == metrics


def test_nothing_is_written_through_a_link_in_a_run_folder(preset, clean, tmp_path):
    """Whoever made the folder may have pointed its files anywhere: to resume and to evaluate it replaces the links."""
    run, mine, plan = tmp_path / "run", tmp_path / "mine", tmp_path / "plan.json"
    mine.mkdir()
    assert inside("plan", preset, *SMALL, "--save", plan).status == 0
    command = ("train", preset, *SMALL, f"plan={plan}", "--json", "--out", run)
    first = inside("train", *command[1:], "train.steps=1").result
    assert first["steps"] == 1
    files = [path for path in run.iterdir() if path.is_file()] + [run / "calibration.png"]
    assert {".lock", "config.json", "metrics.jsonl", "plan.json", "summary.json", "curves.png"} < {
        f.name for f in files
    }
    (run / "calibration.png").write_bytes(b"old")
    (run / ".lock").write_bytes(b"old")
    for file in files:
        file.rename(mine / file.name)
        file.symlink_to(mine / file.name)
    before = {file.name: file.read_bytes() for file in mine.iterdir()}
    assert inside(*command).result["eval"] == clean
    assert inside("eval", run).status == 0
    assert {file.name: file.read_bytes() for file in mine.iterdir()} == before
    assert not [file.name for file in files if file.is_symlink()]


def test_two_runs_in_one_folder(preset, clean, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = outside("train", preset, *SMALL, "--out", tmp_path / "run")
    assert_refused(done, 1, f"another process is training in {tmp_path}/run", "Wait for it, stop it, or choose another")
    assert os.listdir(tmp_path / "run") == [".lock"]
    assert inside("train", preset, *SMALL, "--out", tmp_path / "run", "--json").result["eval"] == clean


def test_a_file_system_without_locks(preset, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    done = inside("train", preset, *SMALL, "--out", tmp_path)
    assert_refused(done, 1, "cannot be locked against other processes: No locks available", "another file system")


@pytest.fixture(scope="module")
def finished(preset, tmp_path_factory):
    """A run folder; not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert inside("train", preset, *SMALL, "--out", out).status == 0
    return out


IN_EVAL = (
    ("nowhere", 2, "nowhere is not a run folder: it does not exist.*recjax train"),
    ("{run}n", 2, r"is not a run folder: it does not exist\. Did you mean {run}\? "),
    ("{run}/config.json", 2, r"config\.json is a file, not a run folder\. Name the --out folder"),
    ("{parent}", 2, r"it has no config\.json\. It holds {run}: name one of these\."),
    ("{run} --step 7", 1, "no checkpoint of step 7; the steps that it has: 2"),
    ("{run} seed=4 model.top=8-1", 2, r"seed: 0 there, 4 here; model\.top: 16,1 there, 8,1 here"),
    ("{run} seed=4", 2, "may only change mesh, plan, planner, tier, data.path"),
    ("{run} data.test_rows=0", 2, r"data\.test_rows: 700 there, 0 here"),
    ("{run} mesh.devices=9", 4, "mesh.devices=9, but JAX sees 8"),
    ("{run} sed=4", 2, "unknown key 'sed'. Did you mean seed"),
    ("{empty}", 2, "has no checkpoint yet. Train it first: recjax train"),
)


def test_eval(finished, tmp_path):
    shutil.copy(finished / "config.json", tmp_path)
    before = contents(tmp_path) | contents(finished)
    places = {"run": finished, "empty": tmp_path, "parent": finished.parent}
    for arguments, status, pattern in IN_EVAL:
        done = inside("eval", *arguments.format(**places).split())
        assert_refused(done, status, pattern.replace("{run}", str(finished)))
    assert contents(tmp_path) | contents(finished) == before


def test_eval_of_data_without_the_split(preset, tmp_path):
    command = ("train", preset, *SMALL, "data.validation_rows=0", "--out", tmp_path, "--json")
    assert inside(*command).result["chosen_by"] == "last step"
    assert_refused(inside("eval", tmp_path, "--split", "validation"), 3, "split 'validation' of synthetic has no rows")


# --- the plan ---


def test_a_broken_plan(preset, tmp_path):
    """What else a plan may not be: tests/embedding/test_plan.py."""
    plan = tmp_path / "plan.json"
    assert inside("plan", preset, "--save", plan).status == 0
    for broken, pattern in (
        (plan.read_text()[:80], r"plan\.json:\d+: not valid JSON.*recjax plan PRESET --save FILE"),
        (plan.read_text().replace("sparse_0", "sparse_9"), "plan.json.* sparse_9, but the model has sparse_0"),
    ):
        plan.write_text(broken)
        assert_refused(inside("plan", preset, f"plan={plan}"), 2, pattern)
        done = inside("train", preset, *SMALL, f"plan={plan}", "--out", tmp_path / "run")
        assert_refused(done, 2, pattern)
        assert os.listdir(tmp_path / "run") == [".lock"]


def test_a_run_keeps_its_plan_file(preset, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert inside("plan", preset, "--save", "plan.json").status == 0
    trained = inside("train", preset, *SMALL, "plan=plan.json", "--out", "run", "--json").result
    monkeypatch.chdir(tmp_path)
    assert inside("eval", "here/run", "--json").result["auc"] == pytest.approx(trained["eval"]["auc"])
    (tmp_path / "here" / "run" / "plan.json").write_text("[]")
    assert_refused(inside("eval", "here/run"), 2, r"run/plan\.json: not a plan")
    assert inside("eval", "here/run", "plan=row_wise").status == 0


def test_a_run_keeps_the_ids_that_its_plan_names_in_files(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inside("plan", preset, "plan=row_wise", "--save", "plan.json").status == 0
    plan = json.loads(Path("plan.json").read_text())
    rows = inside("plan", preset, "--json").result["tables"]["sparse_0"]["rows"]
    ids = list(range(rows))
    Path("all.txt").write_text("".join(f"{id}\n" for id in ids))
    plan["tables"]["sparse_0"][0]["rows"] = {"ids": "all.txt"}
    Path("plan.json").write_text(json.dumps(plan))
    assert inside("train", preset, *SMALL, "plan=plan.json", "--out", "run").status == 0
    Path("other").mkdir()
    assert inside("plan", preset, "plan=plan.json", "--save", "other/plan.json").status == 0
    assert inside("plan", preset, "plan=plan.json", "--save", "again.json").status == 0
    selectors = [
        json.loads(Path(file).read_text())["tables"]["sparse_0"][0]["rows"]
        for file in ("run/plan.json", "other/plan.json", "again.json")
    ]
    pinned = {"ids": "all.txt", "sha256": hashlib.sha256(Path("all.txt").read_bytes()).hexdigest()}
    assert selectors == [{"ids": ids}, {"ids": ids}, pinned]
    Path("all.txt").unlink()
    assert inside("eval", "run").status == 0
    assert_refused(
        inside("plan", preset, "plan=plan.json"), 2, "plan.json, table 'sparse_0': the ids in all.txt cannot"
    )


def test_a_plan_that_cannot_be_saved(preset, tmp_path):
    done = inside("plan", preset, "--save", tmp_path / "nowhere" / "plan.json")
    assert_refused(done, 2, "--save .*plan.json cannot be written: No such file", "Choose another path")


# --- devices ---


def test_an_environment_that_asks_for_devices_that_are_not_there(preset, tmp_path):
    command = ("train", preset, *SMALL, "mesh.platform=auto", "--out", tmp_path)
    done = outside(*command, env={"JAX_PLATFORMS": "rocm"})
    assert_refused(
        done, 4, "mesh.platform=auto with JAX_PLATFORMS=rocm: JAX finds no such device", "set mesh.platform=cpu"
    )


@pytest.mark.full
def test_tables_that_do_not_fit_into_memory(preset, clean, tmp_path):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))"
    done = outside(
        "train",
        preset,
        *SMALL,
        "data.rows=300000000,50,200",
        "--out",
        tmp_path,
        before=limit,
        env={"MALLOC_ARENA_MAX": "2"},
    )
    assert_refused(done, 1, "out of memory: .*Out of memory allocating", "recjax plan", "mesh.devices")
    assert inside("train", preset, *SMALL, "--out", tmp_path, "--json").result["eval"] == clean


def test_memory_that_ends_elsewhere_is_named_too(tmp_path, monkeypatch):
    """As a limit on addresses gives it while a library is loaded or a thread started."""
    errors = [
        ImportError("libjax_common.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        MemoryError("std::bad_alloc"),
    ]

    def prepare(*arguments, **options):
        raise errors.pop()

    monkeypatch.setattr(catalog, "prepare", prepare)
    while errors:
        done = inside("data", "prepare", "table", "--from", tmp_path / "t.csv", "--out", tmp_path / "out", "label=y")
        assert_refused(done, 1, "out of memory: ")


# --- the run itself ---


def test_a_learning_rate_that_is_far_too_high(preset, tmp_path):
    rate = ("train.optimizer=sgd", "train.optimizer.learning_rate=1e30", "embedding.optimizer.learning_rate=1e30")
    done = inside("train", preset, "train.steps=5", "mesh.devices=2", *rate, "--out", tmp_path)
    assert_refused(done, 1, r"step 2 is not finite: its loss \(nan\) and \d+ of its dense gradients", "learning_rate")
    # When it shows only in an evaluation:
    done = inside("train", preset, "train.steps=1", "mesh.devices=2", *rate, "--out", tmp_path)
    assert_refused(done, 1, "the logit of sample 0 is nan", "diverged", "lower the learning rate")
    assert not (tmp_path / "checkpoints").exists()
