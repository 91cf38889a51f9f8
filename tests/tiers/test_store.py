"""Rows behind caches, in memory and on disk, against a dict of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recjax.errors import ConfigError, TrainingError
from recjax.tiers.disk import OnDisk
from recjax.tiers.store import Budget, InMemory, RowStore

HOMES = 3000


def whole_blocks(patched: pytest.MonkeyPatch) -> None:
    """Has the disk refuse writes that are not of whole blocks, as some do."""
    write = os.pwrite

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        if at % 4096 or len(data) % 4096:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data, at)

    patched.setattr(os, "pwrite", pwrite)


@pytest.fixture(params=["memory", "disk", "disk, narrow", "disk, wide", "disk, blocks"])
def store(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RowStore, int]]:
    record = {"disk, wide": 5000, "disk, narrow": 100}.get(request.param, 576)
    if request.param == "disk, blocks":
        whole_blocks(monkeypatch)
    places: Any = InMemory(record, Budget(None, ""))
    if request.param != "memory":
        places = OnDisk(tmp_path, "some", record, 90 * (record + 9))
        assert not list(tmp_path.iterdir())  # nobody else shall find it, nor this process after a crash
    made = RowStore(HOMES, places)
    yield made, record
    made.close()


def test_it_holds_what_was_written(store: tuple[RowStore, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recjax.tiers.store._AT_ONCE", 37)
    rows, record = store
    rng = np.random.default_rng(0)
    truth: dict[int, np.ndarray] = {}
    for step in range(24):
        homes_K = rng.choice(HOMES if step % 2 else 300, rng.integers(1, 150), replace=False).astype(np.int32)
        records = rng.integers(0, 256, (len(homes_K), record), np.uint8)
        rows.write(homes_K, records)
        truth |= dict(zip(homes_K.tolist(), records, strict=True))
        asked_K = rng.permutation(np.array(sorted(truth)))[:100].astype(np.int32)
        assert rows.is_written(np.arange(HOMES)).tolist() == [home in truth for home in range(HOMES)]
        assert (rows.read(asked_K) == np.stack([truth[home] for home in asked_K.tolist()])).all()
    assert rows.written == len(truth)
    assert rows.written_between(100, 200).tolist() == [home for home in truth if 100 <= home < 200]
    every = np.array(sorted(truth), np.int32)
    assert (rows.read(every) == np.stack([truth[home] for home in every.tolist()])).all()
    if isinstance(rows.places, OnDisk):
        padded = {100: 128, 576: 1024, 5000: 8192}[record]
        assert 0 < rows.places.file_bytes - 4096 <= -(-len(truth) * padded // 4096) * 4096


def test_more_than_the_budget_is_refused() -> None:
    rows = RowStore(HOMES, InMemory(64, Budget(64 * 100, "tier.dram_bytes")))
    rows.write(np.arange(100, dtype=np.int32), np.zeros((100, 64), np.uint8))
    with pytest.raises(TrainingError, match=r"more than the 6.2 KiB of tier.dram_bytes.*tier.disk=DIR"):
        rows.write(np.array([100], np.int32), np.zeros((1, 64), np.uint8))


def filled(folder: Path) -> OnDisk:
    places = OnDisk(folder, "some", 576, 64 * 585)
    numbers = np.arange(400, dtype=np.int32)
    places.write(numbers, np.repeat(numbers.astype(np.uint8)[:, None], 576, axis=1))
    return places


def test_a_flipped_bit_is_noticed_and_named(tmp_path: Path) -> None:
    places = filled(tmp_path)
    descriptor = os.open(f"/proc/self/fd/{places._descriptor}", os.O_RDWR)
    byte = os.pread(descriptor, 1, 4096 + 17 * 1024 + 5)[0]
    os.pwrite(descriptor, bytes([byte ^ 16]), 4096 + 17 * 1024 + 5)
    os.close(descriptor)
    with pytest.raises(TrainingError, match=r"record 17 of .*recjax-some.*is damaged.*scratch file of tier.disk"):
        places.read(np.arange(30))
    assert (places.read(np.arange(18, 30))[:, 0] == np.arange(18, 30)).all()
    places.close()


def test_a_full_disk_and_one_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = filled(tmp_path)

    def fails(number: int) -> Any:
        def call(*_: Any) -> int:
            raise OSError(number, os.strerror(number))

        return call

    with monkeypatch.context() as patched:
        patched.setattr(places._transfers, "queued", False)
        patched.setattr(os, "pwritev", fails(errno.ENOSPC))
        with pytest.raises(TrainingError, match=r"No space left.*Free some space.*scratch file of tier.disk"):
            places.write(np.arange(400, 600, dtype=np.int32), np.zeros((200, 576), np.uint8))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fails(errno.EIO))
        with pytest.raises(TrainingError, match=r"recjax-some.*cannot be read: Input/output error"):
            places.read(np.arange(30))
    assert (places.read(np.arange(300))[:, 0] == np.arange(300).astype(np.uint8)).all()
    places.close()


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tier.disk: a file for rows cannot be made in /proc"):
        OnDisk(Path("/proc"), "some", 576, 1000)
