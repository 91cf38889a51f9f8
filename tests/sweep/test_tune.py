"""A study of a few trials: it is killed and resumes, gives up what is hopeless, and two processes share it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from support import forked
from support.commands import assert_refused, inside, start
from support.processes import PROGRAM

import recjax
from recjax.sweep import run as sweep_run
from recjax.sweep.search_file import read_search
from recjax.sweep.tune import Study, _Follower

optuna = pytest.importorskip("optuna")
pytestmark = [
    pytest.mark.full,
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("default"),
    pytest.mark.light_compile,
    pytest.mark.few_programs,
]

BATCH = 64  # of the preset
FILE = """
preset = "{preset}"
overrides = ["train.steps={steps}", "mesh.devices=2", "train.checkpoint_every=40"]
trials = {trials}
[search]
"train.optimizer.learning_rate" = {{low = 0.01, high = 0.2, log = true}}
"""


@pytest.fixture
def written(preset, tmp_path):
    def write(steps, trials):
        path = tmp_path / "mine.toml"
        recjax.load(preset)  # the search lies where its preset does not, so its user has run that before
        path.write_text(FILE.format(preset=preset, steps=steps, trials=trials))
        return path

    return write


@pytest.fixture
def forks(monkeypatch):
    """The processes of trials are forks instead of new interpreters."""
    lock = threading.Lock()

    def popen(command, pass_fds, **options):
        environment = os.environ | {"GLIBC_TUNABLES": ""}
        with lock:
            return forked.Popen([sys.executable, "-c", PROGRAM, *command[4:]], env=environment, **options)

    monkeypatch.setattr(sweep_run, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": popen}))


def rows(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def of(path):
    """Optuna's own view of the study in a folder: (state, value, params, evaluations) of each trial."""
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path / "journal.log")))
    study = optuna.load_study(study_name="recjax", storage=storage)
    return [(trial.state.name, trial.value, trial.params, trial.intermediate_values) for trial in study.trials]


def test_a_killed_study_goes_on_with_the_trial_that_was_under_way(written, forks, tmp_path):
    out, file = tmp_path / "study", written(80, 2)
    with start("tune", file, "--out", out) as worker:
        while worker.poll() is None and not list(out.glob("trial-0000/checkpoints/[0-9]*")):
            time.sleep(0.01)
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(worker.pid)], capture_output=True, text=True)
        (child,) = map(int, found.stdout.split())
        os.kill(child, signal.SIGKILL)
        worker.kill()
    ((state, _, before, _),) = of(out)
    assert state == "RUNNING"

    # While another process holds its lock, the trial is not taken from it.
    with open(out / ".trial-0000.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = inside("tune", file, "--out", out, "--trials", "1", "--json")
        assert [row["status"] for row in done.result["runs"]] == ["open"] and "resuming" not in done.err

    done = inside("tune", file, "--out", out, "--json")
    assert "[trial 0 of 2] resuming" in done.err
    after = of(out)
    assert [state for state, *_ in after] == ["COMPLETE", "COMPLETE"]
    assert after[0][2] == before
    result = done.result
    assert sorted(row["index"] for row in result["runs"]) == [0, 1]
    for row in result["runs"]:
        _, value, params, evaluations = after[row["index"]]
        assert row["status"] == "done" and row["validation"]["auc"] == value
        assert {key: float(text) for key, text in row["swept"].items()} == params
        lines = [json.loads(text) for text in (out / f"trial-{row['index']:04}/metrics.jsonl").read_text().splitlines()]
        auc = {BATCH * line["step"]: line["auc"] for line in lines if line["split"] == "validation"}
        assert evaluations.items() <= auc.items()  # the last of them may come too late to be reported
        assert value == max(auc.values())
    assert after[result["best"]["index"]][1] == max(value for _, value, *_ in after)
    assert rows(out) == sorted(result["runs"], key=lambda row: row["index"])

    # Nothing is left to do.
    again = inside("tune", file, "--out", out)
    assert again.status == 0 and "recjax train" not in again.err
    assert f"best: trial {result['best']['index']}, validation.auc" in again.out


def test_a_hopeless_trial_is_given_up_at_an_evaluation(written, forks, tmp_path):
    out = tmp_path / "study"
    search = read_search(written(1_000_000, 6), out)
    study = Study(search)
    range_ = optuna.distributions.FloatDistribution(0.01, 0.2, log=True)
    for rate in (0.02, 0.04, 0.06, 0.08, 0.1):  # all far better than what comes, at every step
        every = dict.fromkeys(range(15 * BATCH, 100_000 * BATCH, 15 * BATCH), 0.999)
        trial = optuna.trial.create_trial(
            params={"train.optimizer.learning_rate": rate},
            distributions={"train.optimizer.learning_rate": range_},
            value=0.999,
            intermediate_values=every,
        )
        study._study.add_trial(trial)
    study.work()
    state, value, _, evaluations = of(out)[5]
    assert state == "PRUNED"
    assert value == evaluations[max(evaluations)]
    row = study.results()[5]
    assert (row["status"], row["validation"]) == ("pruned", {"auc": value})
    assert row["steps"] * BATCH == max(evaluations)
    assert list((out / "trial-0005/checkpoints").glob("[0-9]*"))  # it was told, and has saved


def test_trials_are_judged_where_they_have_seen_equally_many_samples(tmp_path):
    """Small batches learn more from as many samples, and less in as many steps: AUC 0.6 to 0.9, by samples alone."""

    def auc(samples, bonus=0.0):
        return min(0.9, 0.6 + samples / 100_000) + bonus

    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(5, n_min_trials=3))
    (tmp_path / "metrics.jsonl").touch()

    def follow(batch_size, bonus, steps=tuple(range(10, 101, 10))):
        trial = study.ask()
        follower = _Follower(trial, "validation.auc", batch_size, set())
        for step in steps:
            line = {"step": step, "split": "validation", "auc": auc(step * batch_size, bonus)}
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        follower._read(tmp_path / "metrics.jsonl")
        (tmp_path / "metrics.jsonl").write_text("")
        return trial

    for _ in range(5):
        study.tell(follow(1024, 0.0), 0.9)
    for steps in ((10,), (10, 20, 30, 40), (10, 20, 30, 40, 50, 60, 70, 80)):
        assert not follow(256, 0.01, steps).should_prune()  # better, after 2,560 to 20,480 samples
    assert not follow(256, -0.01, (10, 20, 30)).should_prune()  # nobody was judged after 7,680
    assert follow(256, -0.01, (10, 20, 30, 40)).should_prune()  # worse than the others after 10,240


@pytest.mark.wide
def test_two_that_share_a_study_do_each_trial_once(written, forks, tmp_path):
    out = tmp_path / "study"
    search = read_search(written(20, 4), out)
    workers = [threading.Thread(target=Study(search).work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    trials = of(out)
    assert [state for state, *_ in trials] == ["COMPLETE"] * 4
    assert len({params["train.optimizer.learning_rate"] for _, _, params, _ in trials}) == 4
    assert {row["index"]: row["validation"]["auc"] for row in Study(search).results()} == {
        number: value for number, (_, value, _, _) in enumerate(trials)
    }


def test_another_search_is_refused_and_hopeless_ones_end(written, forks, tmp_path):
    out = tmp_path / "study"
    Study(read_search(written(20, 1), out))
    done = inside("tune", written(21, 1), "--out", out)
    assert_refused(done, 2, "study with another preset and overrides")
    (tmp_path / "else").mkdir()
    (tmp_path / "else/thesis.tex").touch()
    assert_refused(inside("tune", written(20, 1), "--out", tmp_path / "else"), 2, "is not empty and holds no journal")
    bad = tmp_path / "bad.toml"
    bad.write_text(written(20, 9).read_text().replace('"mesh.devices=2"', '"mesh.devices=2", "data.train_rows=0"'))
    done = inside("tune", bad, "--out", tmp_path / "bad")
    assert done.status == 1 and "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("recjax: error: the first 3 trials all failed") and "no rows" in last
