"""Which step of a run is best, and when it stops for want of a better one, survive an end, a kill and an extension."""

from support.commands import arrays, assert_same_arrays, inside, lines_of, steps_of
from support.resuming import DIES, LONG, MARKS, assert_ended_like, kill, last_step, steps_kept

pytestmark = MARKS


def test_an_extended_run_has_no_trace_of_its_old_end(preset, tmp_path):
    """Neither the lines that only the end asked for, nor their say in which step is best and when to stop."""
    settings = ("train.eval_every=5", "train.log_every=2", "mesh.devices=2", "train.patience=1")
    whole = inside("train", preset, *settings, "train.steps=10", "--out", tmp_path / "whole", "--json").result
    run = tmp_path / "run"
    ended = inside("train", preset, *settings, "train.steps=7", "--out", run, "--json").result
    assert ended["steps"] == 7 and steps_of(run, "validation") == [5, 7]
    assert steps_of(run, "train") == [2, 4, 6, 7]
    longer = inside("train", preset, *settings, "train.steps=10", "--out", run, "--json")
    for split in ("train", "validation", "test"):
        ours, theirs = lines_of(run, split), lines_of(tmp_path / "whole", split)
        for line in (*ours, *theirs):
            line.pop("samples_per_s", None)
        assert ours == theirs
    assert [longer.result[key] for key in ("eval", "eval_step")] == [whole[key] for key in ("eval", "eval_step")]
    assert_same_arrays(arrays(run, 10), arrays(tmp_path / "whole", 10))


EARLY = (
    *LONG[:3],
    "mesh.devices=2",
    "train.epochs=20",
    "train.eval_every=10",
    "train.patience=3",
    "embedding.optimizer.learning_rate=0.3",
    "train.optimizer.learning_rate=0.3",
)


def test_early_stopping_and_the_best_checkpoint_survive(preset, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    summary = inside("train", preset, *EARLY, "--out", whole, "--json").result
    best, last = summary["eval_step"], summary["steps"]
    assert summary["stopped_early"] and last == best + 30, "it stops three evaluations after the best one"
    command = ("train", preset, *EARLY, "--out", run)
    kill(command, lambda: last_step(run) > best + 12)  # after the first miss
    assert best in steps_kept(run)
    kill(command, lambda: False, f"{DIES}\nat_line({last})")  # one step before it stops
    assert best in steps_kept(run)
    assert inside(*command).status == 0
    assert_ended_like(run, whole, last)
    # Stopped is stopped: the same command trains no further.
    again = inside(*command, "--json").result
    assert (again["steps"], again["eval_step"], again["eval"]) == (last, best, summary["eval"])
    assert_ended_like(run, whole, last)
