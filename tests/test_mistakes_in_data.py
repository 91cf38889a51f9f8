"""Data that are wrong, damaged, missing or of something else: one paragraph, exit status 3, no harm done."""

import os
import shutil

import numpy as np
import pytest
from support.commands import OWN, arrays, assert_refused, assert_same_arrays, contents, inside, prepare, steps_of

from recjax.data.batch import Bags

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


def id_out_of_range(block):
    block.bags["x"].ids[137] = 10


def id_negative_in_a_bag(block):
    block.bags["y"].lengths[137] += 1
    at = int(block.bags["y"].lengths[:137].sum())
    block.bags["y"] = Bags(np.insert(block.bags["y"].ids, at, -1), block.bags["y"].lengths)


def nan_in_dense(block):
    block.dense[137, 1] = np.nan


def infinite_weight(block):
    block.weights[137] = np.inf


def label_two(block):
    block.labels[137] = 2


WRONG = (
    (id_out_of_range, r"id 10 of feature 'x' in sample 437 \(row 53 of the batch\).* 10 rows, ids 0 to 9"),
    (id_negative_in_a_bag, r"id -1 of feature 'y' in sample 437 \(row 53 of the batch\).* 20 rows, ids 0 to 19"),
    (nan_in_dense, r"dense feature 'd1' is nan in sample 437 \(row 53 of the batch\).* clean the source file"),
    (infinite_weight, r"weights is inf in sample 437 \(row 53 of the batch\)"),
    (label_two, r"the label of sample 437 is 2\.0; labels must be 0 or 1"),
)


def test_a_value_that_cannot_be_stops_the_run_where_it_stands(preset, tmp_path):
    """The wrong value stands in row 137 of the second block of 300: sample 437, row 53 of the batch of step 7."""
    for change, pattern in WRONG:
        data, run = prepare(tmp_path / f"{change.__name__}.data", change), tmp_path / change.__name__
        command = ("train", preset, *OWN, f"data.path={data}", "--out", run)
        assert_refused(inside(*command), 3, pattern, "repare the data again|Correct the column")
        assert steps_of(run, "train") == [1, 2, 3, 4, 5], "a step's metrics are read one step late"
    before = contents(run)
    assert_refused(inside(*command), 3, pattern)
    assert contents(run) == before


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file):
    content = bytearray(file.read_bytes())
    content[300] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "patterns"),
    [
        ("*-train*", cut, [r"blocks-train\S+ is \d+ bytes long instead of \d+"]),
        ("*-test*", os.unlink, [r"blocks-test\S+ is missing"]),
        ("*-train*", flip, [r"block 0 of split 'train' at .* cannot be read", r"Damaged: \S*blocks-train"]),
        ("recjax.json", cut, [r"recjax\.json is damaged"]),
        ("recjax.json", os.unlink, ["the folder exists, but holds no prepared data"]),
    ],
)
def test_damaged_data(preset, good, tmp_path, name, damage, patterns):
    data = shutil.copytree(good, tmp_path / "data")
    damage(next(data.rglob(name)))
    command = ("train", preset, *OWN, f"data.path={data}", "--out", tmp_path / "run", "--json")
    assert_refused(inside(*command), 3, *patterns, "[Pp]repare (the data|them)( again)?", "recjax data prepare")
    if damage is flip:  # found in the middle of the run, so that it has left the most behind
        shutil.rmtree(data)
        shutil.copytree(good, data)
        assert inside(*command).result["steps"] == 10


def test_data_that_have_changed_since_the_checkpoint(preset, good, tmp_path):
    command = ("train", preset, *OWN, "--out", tmp_path / "run")
    assert inside(*command, "train.steps=5", f"data.path={good}").status == 0
    other = prepare(tmp_path / "other", lambda block: block.labels.fill(1))
    pattern = "checkpoint 5 was trained on data with fingerprint .* but the data now have .*Point data.path at the data"
    assert_refused(inside(*command, f"data.path={other}"), 3, pattern)
    assert_refused(inside("eval", tmp_path / "run", f"data.path={other}"), 3, pattern)
    moved = shutil.copytree(good, tmp_path / "moved")
    assert inside(*command, f"data.path={moved}", "--json").result["steps"] == 10


IN_VERBS = (
    ("prepare movietweetings --out {file}", 3, "exists and is not prepared data.*nothing was chang"),
    ("prepare movietweetings --out {full}", 3, "exists and is not prepared data"),
    ("prepare movietweetings --out {file}/new", 1, "Not a directory.*choose another place with --out"),
    ("prepare movietweetings --out {good}", 3, "already holds prepared data of other.*--overwrite"),
    ("prepare movietweetings --out {new} --from {new}", 3, "is not a folder.*--from"),
    ("prepare movietweetings --out {new} --from {full}", 3, r"ratings\.dat"),
    ("prepare movietweeting --out {new}", 2, "Did you mean movietweetings"),
    ("prepare synthetic --out {new}", 2, "nothing to prepare"),
    ("prepare movietweetings --out {new} treshold=7", 2, "Did you mean threshold"),
    ("info movietweeting", 2, "Did you mean movietweetings"),
    ("info {full}", 3, "holds no prepared data"),
    ("info {good} seed=1", 2, "whose options are fixed.*Leave out 'seed=1'"),
    ("info synthetic sed=1", 2, "unknown key 'sed'. Did you mean seed"),
)


def test_data_verbs(good, tmp_path):
    places = {"file": tmp_path / "file", "full": tmp_path / "full", "new": tmp_path / "new", "good": good}
    places["file"].write_text("mine")
    places["full"].mkdir()
    (places["full"] / "notes.txt").write_text("mine")
    before = contents(tmp_path) | contents(good)
    for arguments, status, pattern in IN_VERBS:
        assert_refused(inside("data", *arguments.format(**places).split()), status, pattern)
        assert contents(tmp_path) | contents(good) == before
        assert sorted(os.listdir(tmp_path)) == ["file", "full"]


def test_a_step_that_is_not_finite_changes_nothing(preset, tmp_path):
    """A dense value that is finite, but overflows in the model: sample 437, so step 7."""

    def huge(block):
        block.dense[137] = 3e38

    data = prepare(tmp_path / "data", huge)
    command = ("train", preset, *OWN, f"data.path={data}", "train.checkpoint_every=1", "--out")
    done = inside(*command, tmp_path / "run")
    last = assert_refused(
        done,
        1,
        "step 7 is not finite: its loss",
        "samples 384 to 447 in the order of epoch 0",
        "was not applied",
        "lower train.optimizer.learning_rate",
        "another --out",
    )
    assert steps_of(tmp_path / "run", "train") == [1, 2, 3, 4, 5, 6]
    checkpoints = sorted(os.listdir(tmp_path / "run" / "checkpoints"))
    assert checkpoints == ["00000005", "00000006"]
    # The state after step 6 is that of a run that was only asked for 6 steps.
    assert inside(*command, tmp_path / "six", "train.steps=6").status == 0
    assert_same_arrays(arrays(tmp_path / "run", 6), arrays(tmp_path / "six", 6))
    before = contents(tmp_path / "run")
    again = assert_refused(inside(*command, tmp_path / "run"), 1)
    assert again == last
    assert contents(tmp_path / "run") == before
    assert steps_of(tmp_path / "run", "train") == [1, 2, 3, 4, 5, 6]
