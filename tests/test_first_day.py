"""Stumbles of a first day: what is answered to each, in words that lead on."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from support.commands import inside

from recjax.data.arrow.column_profile import ColumnProfile
from recjax.data.arrow.proposals import propose

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    rng = np.random.default_rng(0)
    user = rng.integers(0, 20, 400)
    table = {
        "user": [f"u{u}" for u in user],
        "price": [f"{x:.2f}".replace(".", ",") for x in rng.uniform(1, 9, 400)],
        "a,b": [f"x{u % 7}" for u in user],
        "clicked": (rng.random(400) < 0.2 + 0.6 * (user % 2)).astype(int),
    }
    path = tmp_path_factory.mktemp("table") / "table.csv"
    pyarrow.csv.write_csv(pa.table(table), path)
    return path


def refused(*arguments, status=2):
    done = inside(*arguments)
    assert done.status == status and "Traceback" not in done.err, done.err
    return done.err.splitlines()[-1]


def test_two_mistakes_are_told_at_once_but_not_what_follows_from_one():
    text = refused("show", "movietweetings", "train.bach_size=4", "embeding.dim=3", "train.epochs=x")
    for part in ("train.bach_size", "Did you mean train.batch_size", "embeding.dim", "Also:", "train.epochs=x"):
        assert part in text
    text = refused("show", "movietweetings", "modle=dcnv2", "modle.bottom=4")
    assert "Also:" not in text and "modle" in text
    text = refused("show", "movietweetings", *(f"x{i}=1" for i in range(9)))
    assert text.endswith("And 4 more.")


def test_a_run_folder_in_the_place_of_a_preset(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for verb in ("bench", "train", "show", "plan"):
        assert "is a run folder, and this verb takes a preset" in refused(verb, tmp_path)


def test_weights_of_a_file_that_is_not_there(tmp_path):
    text = refused("weights", "import", tmp_path / "no.npz", "movietweetings", "--out", tmp_path / "run")
    assert "no.npz does not exist. Give the .npz" in text and "savez" not in text


def test_a_name_with_a_comma_without_its_quotes(file, tmp_path):
    text = refused("train", "table", f"data.from={file}", "data.label=a,b", "--out", tmp_path / "run")
    assert """A name with a comma stands in double quotes: '"a,b"'.""" in text


def test_decimal_commas_and_text_beside_a_threshold(file, tmp_path):
    settings = ("train", "table", f"data.from={file}", "mesh.devices=1", "train.steps=1", "--out", tmp_path / "run")
    text = refused(*settings, "data.label=user", "data.threshold=3", status=3)
    assert "no number, which data.threshold=3 compares" in text and "data.positive=VALUE" in text
    assert "not 0 or 1" not in text


@pytest.mark.full
def test_words_of_a_run(file, tmp_path):
    settings = ("train", "table", f"data.from={file}", "data.label=clicked", "mesh.devices=1", "train.epochs=1")
    first = inside(*settings, "--out", tmp_path / "run")
    assert first.status == 0 and "the first that cannot be read as one is" in first.err
    text = refused(*settings, "train.batch_size=2", "--out", tmp_path / "run")
    assert "train.batch_size: 1 there, 2 here" in text and "small." not in text, "the values that were used"
    lines = file.read_text().splitlines(keepends=True)
    other = tmp_path / "other.csv"
    other.write_text("".join(lines[:300]))
    text = refused(*settings, f"data.from={other}", "--out", tmp_path / "run", status=3)
    assert "Point data.from at the data" in text and "data.path" not in text, "the words that were given"
    scores = ("predict", tmp_path / "run", "--input", file, "--out", tmp_path / "s.csv")
    assert """A name with a comma stands in double quotes: '"a,b"'.""" in refused(*scores, "--columns", "a,b", status=3)
    assert "A setting is written without dashes: on_error=skip." in refused(*scores, "--on-error", "skip")
    text = refused("eval", tmp_path / "run", "--by", "price,net", "--by", "user")
    assert "no categorical feature 'price,net'" in text
    skipped = inside(*settings, "data.columns=auto,price:skip", "--out", tmp_path / "skips")
    assert skipped.status == 0
    text = refused("eval", tmp_path / "skips", "--by", "price")
    assert "'price' is a column of the table" in text and "train with price:id" in text
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("[0-9]*"):
        (checkpoint / "manifest.json").write_text("{}")
    refused("eval", tmp_path / "run", status=3)
    (tmp_path / "run" / "config.json").write_text("{")
    assert "`recjax show PRESET a.b=value --json`" in refused("eval", tmp_path / "run")


def test_a_weight_for_positive_labels():
    for key in ("train.pos_weight", "scale_pos_weight", "data.class_weight"):
        assert "data.columns=auto,w:weight" in refused("show", "table", f"{key}=3")


def test_tables_that_do_not_exist():
    assert "there is no table 'usr'. There are sparse_0" in refused("show", "synthetic", "embedding.tables.usr.dim=4")
    assert "usr is known once" in inside("show", "table", "embedding.tables.usr.dim=4").err


def test_the_machine_of_a_prediction():
    text = refused("plan", "movietweetings", "--predict", "planner.machine=h200")
    assert "is --machine h200" in text


def test_a_latency_without_a_unit():
    options = ("--topology", "switch:8", "--bytes", "4MiB", "--bandwidth", "100Gb/s")
    text = refused("simulate", "collective", "--collective", "all_reduce", *options, "--latency", "1")
    assert "--latency '1' has no unit. Write 1ns, 1us or 1ms." in text


def test_the_preset_of_a_sweep_beside_its_file(tmp_path, monkeypatch):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.py").write_text("from recjax.config.run import RunConfig\nconfig = RunConfig()\n")
    (tmp_path / "sweeps" / "s.toml").write_text('preset = "mine.py"\n[grid]\nseed = [0, 1]\n')
    monkeypatch.chdir(tmp_path)
    text = refused("sweep", "sweeps/s.toml", "--dry-run")
    assert "in the working folder, from which paths count, although there is sweeps/mine.py" in text


def test_a_column_of_nulls_and_one_number_in_two_types():
    nulls = ColumnProfile()
    nulls.add(pa.array([None] * 500, pa.float64()), count=True)
    assert propose("empty", nulls).role == "skip" and propose("empty", nulls).why == "has no value"
    both = ColumnProfile()
    both.add(pa.array(np.arange(300)), count=True)
    both.add(pa.array(np.arange(300).astype(float)), count=True)
    both.add(pa.array([0.5, 2.0**60]), count=True)
    assert both.distinct == 302


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.lr=0.1", "Did you mean embedding.optimizer.learning_rate, train.optimizer.learning_rate"),
        ("train.optimizer=AdamW", "Write train.optimizer=optax train.optimizer.name=adamw."),
        ("train.schedule=cosine", "Write train.schedule=optax train.schedule.name=cosine_decay_schedule."),
        ("train.optimizer=admn", "expected sgd, adagrad, adam or optax"),
    ],
)
def test_words_of_others(setting, words):
    assert words in refused("show", "movietweetings", setting)


def test_a_run_folder_without_its_parent(tmp_path, monkeypatch):
    (tmp_path / "runs" / "clicks").mkdir(parents=True)
    (tmp_path / "runs" / "clicks" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert "Did you mean runs/clicks?" in refused("eval", "clickz")
    assert "Did you mean runs/clicks?" in refused("eval", "run/clicks")


def test_a_list_of_files(file, tmp_path):
    text = refused("train", "table", f"data.from={file},{file}", "data.label=clicked", status=3)
    assert "several are given as a folder that holds them, or as a pattern in quotes" in text
