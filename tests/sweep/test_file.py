"""What a sweep file stands for: lines that paste, and mistakes that name the file and the key."""

import itertools
import shlex
import time
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refused, inside

from recjax.config import presets
from recjax.errors import ConfigError
from recjax.settings.overrides import config_hash
from recjax.sweep.file import read_sweep, read_toml
from recjax.sweep.search_file import read_search

pytestmark = pytest.mark.light_compile

FULL = """
preset = "synthetic"
overrides = ["train.epochs=1", "data.rows=100,50"]
sort = "test.auc"

[grid]
seed = [0, 1]
embedding.optimizer = ["sgd", "rowwise_adagrad"]

[zip]
"embedding.dim" = [4, 16]
"model.bottom" = ["8-4", [32, 16]]
"""


def sweep_of(folder, text, **options):
    path = folder / "mine.toml"
    path.write_text(text)
    return read_sweep(path, **options)


def test_grid_is_a_product_and_zip_goes_in_parallel(tmp_path):
    sweep = sweep_of(tmp_path, FULL)
    varied = [tuple(run.swept.values()) for run in sweep.runs]
    optimizers = ("sgd", "rowwise_adagrad")
    pairs = (("4", "8-4"), ("16", "32,16"))
    assert varied == [(s, o, *pair) for s, o, pair in itertools.product("01", optimizers, pairs)]
    assert [run.index for run in sweep.runs] == list(range(8))
    run = sweep.runs[7]
    assert run.overrides == (
        "train.epochs=1",
        "data.rows=100,50",
        "seed=1",
        "embedding.optimizer=rowwise_adagrad",
        "embedding.dim=16",
        "model.bottom=32,16",
    )
    assert run.config == presets.load("synthetic", run.overrides)
    assert (run.config.model.bottom, run.config.embedding.dim, run.config.data.rows) == ((32, 16), 16, (100, 50))
    assert str(sweep.out) == "runs/sweep-mine" and run.out == sweep.out / config_hash(run.config)


def test_a_zip_that_stands_first_varies_slowest(tmp_path):
    sweep = sweep_of(tmp_path, 'preset = "synthetic"\n[zip]\nseed = [5, 6]\n[grid]\nembedding.dim = [4, 8]')
    assert [run.swept for run in sweep.runs] == [
        {"seed": s, "embedding.dim": d} for s, d in itertools.product("56", "48")
    ]


def test_lines_paste(tmp_path):
    """Through a shell's splitting, each gives back its own arguments, whatever is in a path."""
    text = 'preset = "synthetic"\noverrides = ["data=prepared"]\n[grid]\n"data.path" = ["a b", "it\'s $HOME", "c"]'
    sweep = sweep_of(tmp_path, text, out=tmp_path / "with space")
    for run in sweep.runs:
        words = shlex.split(run.command)
        assert words[:4] == ["recjax", "train", "synthetic", "data=prepared"]
        assert words[4:] == [f"data.path={run.swept['data.path']}", "--out", str(run.out)]
    assert "'data.path=it'\"'\"'s $HOME'" in sweep.runs[1].command


def test_a_run_keeps_its_folder_when_the_file_grows_and_devices_tell_runs_apart(tmp_path):
    few = sweep_of(tmp_path, 'preset = "synthetic"\n[grid]\nmesh.devices = [1, 2]')
    more = sweep_of(tmp_path, 'preset = "synthetic"\n[grid]\nseed = [1, 0]\nmesh.devices = [8, 2, 1]')
    assert len({run.out for run in more.runs}) == 6
    assert [run.out for run in few.runs] == [more.runs[5].out, more.runs[4].out]


@pytest.mark.full
@settings(max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_as_many_runs_as_the_product(tmp_path_factory, lengths):
    keys = ("seed", "embedding.dim", "train.batch_size")
    lists = "\n".join(f"{key} = {list(range(1, n + 1))}" for key, n in zip(keys, lengths, strict=False))
    sweep = sweep_of(tmp_path_factory.mktemp("sweep"), f'preset = "synthetic"\n[grid]\n{lists}')
    product = 1
    for n in lengths:
        product *= n
    assert len(sweep.runs) == len({run.command for run in sweep.runs}) == product


ONE = 'preset = "synthetic"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"names no preset"),
        ("preset = 3", r"names no preset"),
        (ONE, r"varies nothing"),
        (ONE + "[grid]", r"varies nothing"),
        (ONE + "[zip]", r"varies nothing"),
        (ONE + "gird = 1", r"unknown key 'gird'\. Did you mean grid\?"),
        (
            ONE + "seed = [1, 2]",
            r"unknown key 'seed'\. A sweep file has the keys preset, .* stand under overrides, \[grid\]",
        ),
        (ONE + "[grid]\nseed = 3", r"grid, seed is 3; expected a list"),
        (ONE + "grid = [1]", r"grid is \[1\]; expected a table of lists"),
        (ONE + "[grid]\nseed = []", r"grid, seed is an empty list"),
        (ONE + "[grid]\nseed = [2020-01-01]", r'grid, seed holds "2020-01-01"; expected texts, numbers'),
        (ONE + "[grid]\nmodel.top = [[[1]]]", r"grid, model\.top holds \[1\]"),
        (
            ONE + "[grid]\nseed = [1, 2]\nembedding.dmi = [4]",
            r"run 0 \(seed=1, embedding\.dmi=4\): unknown key 'embedding\.dmi'\. Did",
        ),
        (ONE + "[grid]\nseed = [1, -2]", r"run 1 \(seed=-2\): seed is -2; it must be"),
        (ONE + "[grid]\nseed = [1, 2.5]", r"run 1 \(seed=2\.5\): seed=2\.5: expected an integer"),
        (ONE + "[grid]\ntrain.epochs = [1, nan]", r"train\.epochs=nan: expected an integer"),
        (ONE + "[grid]\nseed = [1000, '1e3']", r"run 1 \(seed=1e3\) has the same config as run 0"),
        (
            ONE + "[zip]\nseed = [1, 2]\nembedding.dim = [4]",
            r"under zip go in parallel, but seed has 2, embedding\.dim has 1",
        ),
        (ONE + "[grid]\nseed = [1]\n[zip]\nseed = [2]", r"seed stands under grid and under zip"),
        (ONE + "overrides = ['seed=1']\n[grid]\nseed = [1]", r"seed stands under overrides and under grid"),
        (
            ONE + "[grid]\nembedding.dim = [1]\n'embedding.dim' = [1]",
            r"embedding\.dim stands under grid and under grid",
        ),
        (ONE + "overrides = 'seed=1'\n[grid]\nseed = [1]", r'overrides is "seed=1"; expected a list of texts'),
        (ONE + "overrides = ['seed']\n[grid]\nseed = [1]", r'overrides is \["seed"\]; expected a list of texts'),
        (ONE + "overrides = ['sede=1']\n[grid]\nseed = [1]", r"unknown key 'sede'"),
        (ONE + "sort = 'auc'\n[grid]\nseed = [1]", r'sort is "auc"; expected validation\.auc, .*seconds or of several'),
        (ONE + "sort = ['test.auc']\n[grid]\nseed = [1]", r"sort is \[\"test\.auc\"\]"),
        (
            ONE + "[grid]\nembedding.optimizer = ['sgd']\nembedding.optimizer.learning_rate = [1]",
            r"not valid TOML: .*'embedding', 'optimizer'.* quotes",
        ),
        (ONE + "[grid\n", r"not valid TOML: .*line 2"),
        ("preset = 'no_such'\n[grid]\nseed = [1]", r"there is no preset 'no_such'"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        sweep_of(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'mine.toml'}: ")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    assert_refused(inside("sweep", "sise"), 2, r"no sweep 'sise'\. Did you mean size\? Sweeps: .*size")
    assert_refused(inside("sweep", tmp_path / "gone.toml"), 2, r"no file .*gone\.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert_refused(inside("sweep", tmp_path / "bytes.toml"), 2, r"bytes\.toml is not UTF-8 text")
    with pytest.raises(ConfigError, match="cannot read the sweep file"):
        read_sweep(tmp_path)


THOUSANDS = {
    key: list(range(1, 1001)) for key in ("seed", "train.batch_size", "train.steps", "embedding.dim", "data.rows")
}


def grid(lists):
    return ONE + "[grid]\n" + "".join(f'"{key}" = {values}\n' for key, values in lists.items())


def test_runs_are_counted_before_any_is_made(tmp_path):
    """Five keys of a thousand values are 10^15 runs: said at once, without a config or a run for any of them."""
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"1,000,000,000,000,000 runs, and 10,000 are the most .* seed has 1,000, "):
        sweep_of(tmp_path, grid(THOUSANDS))
    assert time.process_time() - begin < 2


def test_more_runs_are_allowed_on_demand(tmp_path):
    (tmp_path / "mine.toml").write_text(grid({"seed": [0, 1, 2], "embedding.dim": [4, 8]}))
    command = ("sweep", tmp_path / "mine.toml", "--dry-run")
    assert_refused(inside(*command, "--runs-at-most", 5), 2, r"6 runs, and 5 are .* embedding\.dim has 2.*at-most 6")
    assert len(inside(*command, "--runs-at-most", 6).out.splitlines()) == 6
    assert_refused(inside(*command, "--runs-at-most", 0), 2, r"--runs-at-most 0: give a number from 1 on")


def test_a_search_tries_no_more_values_than_a_sweep_has_runs(tmp_path):
    (tmp_path / "mine.toml").write_text(ONE + f"[search]\nseed = {list(range(10_001))}")
    with pytest.raises(ConfigError, match=r"hold 10,001 values, and 10,000 are the most.*Give ranges"):
        read_search(tmp_path / "mine.toml")


@pytest.mark.parametrize("key", ["a." * 40_000, "'a' . " * 40_000, '"a".' * 40_000])
def test_keys_of_many_parts_are_refused_at_once(tmp_path, key):
    begin = time.process_time()
    with pytest.raises(ConfigError, match="nested too deeply"):
        sweep_of(tmp_path, ONE + f"[grid]\n{key}b = [1]")
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("part", ["a", '"a b"', '"="', "'#'", r'"\""', '""', "'''"])
@pytest.mark.parametrize("before", ["", "[", "x = {", 'x = {y = """z"""", ', r'x = {y = """a.\"""""", ', "y = 'a'\n"])
def test_keys_of_many_parts_are_refused_wherever_they_stand(tmp_path, part, before):
    (tmp_path / "s.toml").write_text(before + " . ".join([part] * 65) + " = 1\n")
    with pytest.raises(ConfigError, match="not valid TOML" if part == "'''" else "nested too deeply"):
        read_toml(tmp_path / "s.toml")


@pytest.mark.parametrize(
    "value", ['"{}"', "'{}'", '"""\n{}""""', "'''{}'''", "1 # {}", r'"\" {}"', '["x", """"{}"""""]', '"""\\"""{}"""']
)
def test_texts_and_comments_may_hold_many_dots(tmp_path, value):
    text = f"a.b = {value.format(' . '.join('a' * 100))}\nc.d = 1.5\n"
    (tmp_path / "s.toml").write_text(text)
    assert read_toml(tmp_path / "s.toml") == tomllib.loads(text)


def test_runs_of_more_digits_than_python_writes_are_counted(tmp_path):
    keys = "".join(f"a{number} = [1, 2]\n" for number in range(15_000))
    with pytest.raises(ConfigError, match="stands for 1,000,000,000,000,000,000 or more runs, and 10,000 are the most"):
        sweep_of(tmp_path, ONE + "[grid]\n" + keys)


def test_dry_run_prints_the_lines_and_touches_nothing(tmp_path):
    (tmp_path / "mine.toml").write_text(FULL)
    command = ("sweep", tmp_path / "mine.toml", "--out", tmp_path / "out", "--dry-run")
    lines = inside(*command).out.splitlines()
    sweep = read_sweep(tmp_path / "mine.toml", tmp_path / "out")
    assert lines == [run.command for run in sweep.runs]
    result = inside(*command, "--json").result
    assert [run["command"] for run in result["runs"]] == lines
    assert result["runs"][3]["swept"] == sweep.runs[3].swept and result["runs"][3]["index"] == 3
    assert not (tmp_path / "out").exists()
    for wrong in (-1, 8):
        done = inside("sweep", tmp_path / "mine.toml", "--index", wrong)
        assert_refused(done, 2, rf"--index {wrong}: .* has the runs 0 to 7")


def test_the_shipped_sweeps_are_valid():
    files = sorted((presets.preset_files.find_sweep("size").parent).glob("*.toml"))
    searches = [file for file in files if "[search]" in file.read_text().splitlines()]
    assert len(files) > len(searches) > 0
    for file in files:
        if file in searches:
            assert read_search(file).trials > 1
        else:
            assert len(read_sweep(file).runs) > 1
