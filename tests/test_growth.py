"""No reader's time or memory grows out of proportion to its input, wherever that is made larger."""

import ctypes
import dataclasses
import functools
import gc
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from support import fuzzing, growth, shop
from support.fuzz_target import Target

from recjax.data.arrow.row_filter import parse
from recjax.utils import units
from recjax.utils.text import masked

pytestmark = pytest.mark.full

SIZE = 2**15  # bytes of the smallest input; the others are 2 and 4 times as large
SLACK, FLOOR_S = 1.5, 0.1  # of a time that is linear, and what no time is below
MULTIPLE, ALWAYS_BYTES = 100, 2**22  # of memory, by the bytes that the larger input has more


class Steady:
    """Random numbers by which every checksum is renewed."""

    def random(self):
        return 0.5


def prepared(target, folder, grow, size):
    """Writes the files at this size into an empty folder; returns their bytes."""
    folder.mkdir()
    target.write(folder)
    grow(folder, size)
    target.touch(folder, Steady())
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def cpu_of(target, folder):
    """Seconds of CPU, of all threads, that the reader takes for files, which it may refuse."""
    begin = time.process_time()
    try:
        target.read(folder)
    except target.refusals:
        pass
    return time.process_time() - begin


def peak_of(read):
    """Most bytes of memory that this process takes meanwhile beyond what it has, native libraries included."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again without being seen
    Path("/proc/self/clear_refs").write_text("5")  # from now on the peak counts anew
    before = status_bytes("VmRSS")
    read()
    return status_bytes("VmHWM") - before


def status_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory are Linux's")
def test_the_peak_of_memory_is_seen():
    len([bytes(1000) for _ in range(100_000)])  # and freed
    assert peak_of(lambda: len([bytes(1000) for _ in range(60_000)])) > 50_000_000
    assert peak_of(lambda: np.ones(10_000_000).sum()) > 70_000_000
    assert peak_of(lambda: None) < 10_000_000


def faults_of_growth(target, folder, way, grow):
    """Where time or memory grow faster than files that are made 1, 2 and 4 times as large, in words."""
    wrong = []
    folders = [folder / str(times) for times in (1, 2, 4)]
    sizes = [prepared(target, f, grow, t * SIZE) for f, t in zip(folders, (1, 2, 4), strict=True)]
    times = [cpu_of(target, folder) for folder in folders]
    for large in (1, 2):
        most = SLACK * max(times[0], FLOOR_S) * sizes[large] / sizes[0]
        if times[large] > most and min(cpu_of(target, folders[large]) for _ in range(2)) > most:
            wrong.append(f"{way}: {times} s for {sizes} bytes")
    peaks = [peak_of(functools.partial(cpu_of, target, folder)) for folder in (folders[0], folders[2])]
    if peaks[1] - peaks[0] > ALWAYS_BYTES + MULTIPLE * max(0, sizes[2] - sizes[0]):
        wrong.append(f"{way}: {peaks} bytes of memory for {sizes[0]} and {sizes[2]} bytes")
    return wrong


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_time_and_memory_grow_with_the_input(tmp_path, name):
    target = fuzzing.TARGETS[name]
    (tmp_path / "good").mkdir()
    target.write(tmp_path / "good")
    target.read(tmp_path / "good")  # imports
    wrong = []
    for number, (way, grow) in enumerate(growth.ways(target, tmp_path / "good")):
        (tmp_path / str(number)).mkdir()
        wrong += faults_of_growth(target, tmp_path / str(number), way, grow)
    assert not wrong, "\n".join(wrong)


def wide(size):
    """One long text of the shop's tags among many short ones."""
    return tagged(["a" * (size // 8), *["b"] * (size // 6)])


def tagged(tags):
    return json.dumps({"candidates": [shop.rows()[0] | {"tags": tags}]})


def of_text(read):
    """A reader of one text."""
    return Target(lambda folder: None, lambda folder: read((folder / "text").read_text()))


HOSTILE = {  # what is written -> reader, its only file, and the file's content of about so many bytes
    "a text cut off at a backslash": ("request", "r.json", lambda size: "{" * 700 + '"' + '\\"' * (size // 2) + "\\"),
    "texts of unlike lengths": ("request", "r.json", wide),
    "many texts beside one of 1,024 bytes": (
        "request",
        "r.json",
        lambda size: tagged(["a" * 1024, *["b"] * (4 * size)]),
    ),
    "a key of quoted parts": ("sweep, TOML", "s.toml", lambda size: ".".join(['"a b"'] * (size // 6)) + " = 1"),
    "a key of other quoted parts": ("sweep, TOML", "s.toml", lambda size: " . ".join(["'='"] * (size // 6)) + " = 1"),
    "a parameter behind a parameter": (of_text(masked), "text", lambda size: "s3://" + "?key" * (size // 4)),
    "a name of a parameter": (of_text(masked), "text", lambda size: "s3://?" + "key" * (size // 3)),
    "blanks in a condition": (of_text(lambda text: parse([text])), "text", lambda size: "a" + " " * size + "b"),
    "digits without a unit": (of_text(units.read_bytes), "text", lambda size: "1" * size + "!1"),
    "blanks behind a number": (of_text(units.read_bytes), "text", lambda size: "1" + " " * size + "1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_strangers_write_takes_time_and_memory_of_its_size(tmp_path, name):
    reader, file, content = HOSTILE[name]
    target = fuzzing.TARGETS[reader] if isinstance(reader, str) else reader
    target = dataclasses.replace(target, write=lambda folder: None, touch=lambda folder, rng: None)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / file).write_text(content(10))
    cpu_of(target, tmp_path / "warm")  # imports
    wrong = faults_of_growth(target, tmp_path, name, lambda folder, size: (folder / file).write_text(content(size)))
    assert not wrong, "\n".join(wrong)
