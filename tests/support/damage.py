"""Damage to raw files for tests: what must make no difference to a reader, and what it must refuse."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from support.commands import Done, assert_refused, inside

# Changes to a text file after which it must read the same.
HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "BOM": lambda data: b"\xef\xbb\xbf" + data,
    "no last line end": lambda data: data.removesuffix(b"\n"),
    "all": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n").removesuffix(b"\r\n"),
}

_HEADER = b"{'descr': '<i8', 'fortran_order': False, 'shape': (2L,), }".ljust(117) + b"\n"
# An .npy file [3, 17] as Python 2 wrote it: NumPy warns while it reads it.
NPY_OF_PYTHON_2 = b"\x93NUMPY\x01\x00v\x00" + _HEADER + bytes([3, *7 * [0], 17, *7 * [0]])


def zipped(file: Path) -> Path:
    """Replaces a file by its gzipped copy."""
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    return packed


def empty(file: Path) -> str:
    """Leaves nothing of the file. Each of these returns what the error must match."""
    file.write_bytes(b"")
    return f"{file.name} is empty"


def cut_gzip(file: Path) -> str:
    """Gzips the file, and cuts the end off."""
    packed = zipped(file)
    packed.write_bytes(packed.read_bytes()[:-7])
    return f"{packed.name} is no complete gzip file"


def no_gzip(file: Path) -> str:
    """Gives the plain file a name in .gz."""
    file.rename(file.with_name(f"{file.name}.gz"))
    return f"{file.name}.gz is no complete gzip file"


def folder(file: Path) -> str:
    """Puts a folder in its place."""
    file.unlink()
    file.mkdir()
    return f"{file.name} is a folder where a file should be"


def missing(file: Path) -> str:
    """Removes it."""
    file.unlink()
    return f"has neither {file.name}"


def extra_field(file: Path) -> str:
    """Adds a comma, a tab, a bar and two colons to the last line: one of them begins a field too many."""
    file.write_bytes(file.read_bytes().removesuffix(b"\n") + b",\t|::\n")
    return rf"{file.name}:{file.read_bytes().count(bytes([10]))}: "


def blank_line(file: Path) -> str:
    """Adds an empty line."""
    file.write_bytes(file.read_bytes() + b"\n")
    return rf"{file.name}:{file.read_bytes().count(bytes([10]))}: "


FATAL = (empty, cut_gzip, no_gzip, folder, missing, extra_field, blank_line)


def assert_prepares_or_refuses(
    kind: str, write: Callable[[Path], Path], name: str, rows: int, place: Path, *overrides: str
) -> None:
    """`recjax data prepare KIND` on good files and on damaged ones, and `recjax train KIND` on what it made.

    Args:
      kind: the dataset, which has a preset of the same name.
      write: makes good raw files in a folder, and returns it.
      name: the file that is damaged.
      rows: of the good files.
      place: an empty folder.
      *overrides: options of the preparation.
    """
    out = place / "out"

    def prepare(raw: Path) -> Done:
        return inside("data", "prepare", kind, "--from", raw, "--out", out, "--json", *overrides)

    raw = write(place / "raw")
    message = blank_line(raw / name)  # more of it: tests/data/test_raw_files.py
    assert_refused(prepare(raw), 3, message)
    assert os.listdir(place) == ["raw"], "nothing is left that a later run would trust"
    shutil.rmtree(raw)
    assert_refused(prepare(place / "raw"), 3, "--from")
    raw = write(place / "raw")
    made = prepare(raw).result
    assert sum(made["rows"].values()) == rows and made["dataset"] == kind
    assert sorted(os.listdir(place)) == ["out", "raw"]
    assert prepare(raw).result == made
    assert inside("data", "info", out, "--json").result["fingerprint"] == made["fingerprint"]
    run = ("train", kind, "train.steps=1", "train.batch_size=8", "mesh.devices=2", "--out", place / "run")
    wrong = inside(*run, f"data.path={out}", "data.on_error=skip", *(f"data.{override}" for override in overrides))
    assert_refused(wrong, 3, "prepared with on_error=stop, but the config says skip")
    assert_refused(inside(*run), 3, f"recjax data prepare {kind} --from PATH --out DIR")
    done = inside(*run, f"data.path={out}", *(f"data.{override}" for override in overrides))
    assert done.status == 0, done.err
