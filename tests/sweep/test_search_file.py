"""Search files, and every mistake in one."""

import sys

import pytest
from support.commands import assert_refused, inside

from recjax.errors import ConfigError
from recjax.sweep.file import read_sweep
from recjax.sweep.search_file import read_search

GOOD = """
preset = "synthetic"
overrides = ["train.epochs=1"]
[search]
embedding.dim = [4, 8]
"train.optimizer.learning_rate" = {low = 0.01, high = 1.0, log = true}
train.batch_size = {low = 128, high = 512, step = 128}
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "mine.toml").write_text(text)
        return tmp_path / "mine.toml"

    return write


class Trial:
    """Takes the place of Optuna's: the greatest value of each range, the last choice."""

    def suggest_categorical(self, key, choices):
        return choices[-1]

    def suggest_int(self, key, low, high, step, log):
        assert isinstance(step, int)
        return high

    def suggest_float(self, key, low, high, step, log):
        return high


def test_a_search_has_defaults_and_dimensions_in_the_order_of_the_file(written):
    search = read_search(written(GOOD))
    assert str(search.out) == "runs/tune-mine"
    assert (search.sort, search.trials, search.sampler, search.pruner) == ("validation.auc", 30, "tpe", "quartile")
    swept = {dimension.key: dimension.suggest(Trial()) for dimension in search.dimensions}
    assert swept == {"embedding.dim": "8", "train.optimizer.learning_rate": "1.0", "train.batch_size": "512"}
    run = search.run(7, swept)
    assert run.out.name == "trial-0007"
    config = run.config
    assert (config.embedding.dim, config.train.optimizer.learning_rate, config.train.batch_size) == (8, 1.0, 512)
    assert config.train.epochs == 1


def test_other_trials_are_the_same_study_and_other_ranges_are_not(written, tmp_path):
    first = read_search(written(GOOD))
    assert read_search(written("trials = 4\nseed = 3\n" + GOOD)).identity == first.identity
    assert read_search(written(GOOD), trials=4).trials == 4
    for old, new in (("[4, 8]", "[4]"), ("high = 1.0", "high = 2.0"), ("epochs=1", "epochs=2")):
        assert read_search(written(GOOD.replace(old, new))).identity != first.identity


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[search]", "[serach]", "unknown key 'serach'. Did you mean search?"),
        ("[search]", "[grid]", "is for `recjax sweep`"),
        ('preset = "synthetic"', "", "names no preset"),
        ("overrides", 'sort = "test.auc"\noverrides', "chosen by validation, not by test"),
        ("overrides", "trials = 0\noverrides", "trials is 0; expected an integer from 1"),
        ("overrides", "warmup = 1.5\noverrides", "warmup is 1.5; expected an integer from 0"),
        ("overrides", 'sampler = "cma"\noverrides', 'sampler is "cma"; expected tpe or random'),
        ("[4, 8]", "[]", "embedding.dim is \\[\\]; expected a list of values, or a range"),
        ("[4, 8]", "[4, 4]", "holds 4 twice"),
        ("[4, 8]", '["wide"]', "embedding.dim=wide: expected an integer"),
        ("[4, 8]", "{low = 4}", "high is null; expected a number"),
        ("[4, 8]", "{low = 8, high = 4}", "low must be less"),
        ("[4, 8]", "{low = 4, high = 8, base = 2}", "unknown key 'base'"),
        ("[4, 8]", "{low = 4.5, high = 8.5}", "embedding.dim=4.5: expected an integer"),
        ("low = 0.01", "low = 0", "with log = true it must be more than 0"),
        ("step = 128", "step = 0", "step is 0"),
        ("train.epochs=1", "embedding.dim=8", "stands under overrides"),
        ("embedding.dim", "embedding.dimm", "unknown key 'embedding.dimm'"),
    ],
)
def test_mistakes_are_named_with_the_file_and_the_key(written, old, new, message):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(ConfigError, match=message) as raised:
        read_search(written(text))
    assert str(raised.value).startswith(str(written(text)))


def test_a_sweep_sends_a_search_to_tune(written):
    with pytest.raises(ConfigError, match="that is for `recjax tune`"):
        read_sweep(written(GOOD))


def test_without_optuna_the_extra_is_named(written, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = inside("tune", written(GOOD), "--out", tmp_path / "study")
    assert_refused(done, 2, r'pip install -c constraints\.txt -e "\.\[tune\]"')
    assert not (tmp_path / "study").exists()
