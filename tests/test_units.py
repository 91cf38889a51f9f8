"""Sizes, rates and times as people write them: one grammar for all verbs."""

import pytest

from recjax.errors import ConfigError
from recjax.lab.trace import replay_verb
from recjax.utils.units import bus_factor, read_bytes, read_rate, read_time, read_whole_bytes, size_text

SIZES = {"8": 8, "64KiB": 65536, "1.5MiB": 1572864, "64kB": 64000, "2 GiB": 2**31, "1e3B": 1000, "0.5KiB": 512}


@pytest.mark.parametrize("text, size", SIZES.items())
def test_a_size_is_read_alike_by_every_verb(text, size, monkeypatch):
    assert read_bytes(text) == read_whole_bytes(text, "--min") == size
    asked = []
    monkeypatch.setattr("recjax.lab.replay.microbenchmark.sweep", lambda mesh, kinds, sizes, *_: asked.extend(sizes))
    options = {
        "collective": None,
        "min": text,
        "max": text,
        "factor": 2,
        "devices": 2,
        "repeats": 1,
        "overrides": [],
        "out": None,
    }
    replay_verb._sweep(type("Options", (), options))
    assert asked == [size]


@pytest.mark.parametrize("text", ["0", "0.5", "-1", "1.0001KiB", "64KB/s", "many"])
def test_what_is_no_whole_size_is_refused(text):
    with pytest.raises(ConfigError, match="--min"):
        read_whole_bytes(text, "--min")


def test_rates_and_times():
    assert (read_rate("100Gb/s"), read_rate("1GiB/s"), read_rate("8bps")) == (12.5e9, 2**30, 1)
    assert (read_time("1.5us"), read_time("0"), read_time("2ms")) == (1500, 0, 2e6)
    assert size_text(1536) == "1.5 KiB" and size_text(1023) == "1,023 B"


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_to_all", 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
        ("barrier", 0),
    ],
)
def test_factors_of_nccl_tests(kind, factor):
    assert bus_factor(kind, 8) == factor
    assert bus_factor(kind, 1) == 0
