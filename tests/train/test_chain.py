"""Chains of checkpoints: how they read, what a damaged or missing link does, and which of them are kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support import increments as increment_support
from support.checkpoints import names, no_report
from support.increments import arrays_of, check, save, steps_that_read_well

from recjax.errors import TrainingError
from recjax.train.checkpoint import array_store, manifest
from recjax.train.checkpoint.chain import Chain, steps_that_stay
from recjax.train.checkpoint.checkpoints import Checkpoints

TESTS = str(Path(increment_support.__file__).parents[1])


def save_chain(checkpoints: Checkpoints, *steps: int) -> Chain:
    """A whole checkpoint and increments after it."""
    chain: Chain = ()
    for step in steps:
        chain = save(checkpoints, step, chain)
    return chain


def test_a_chain_reads_as_a_whole_checkpoint(tmp_path: Path) -> None:
    """Rows that come in an increment, change in several, or do not change at all (steps 5 and 10)."""
    with Checkpoints(tmp_path, 20) as checkpoints:
        chain = save_chain(checkpoints, 1, 2, 4, 5, 9, 10, 11)
        assert [link.step for link in chain] == [1, 2, 4, 5, 9, 10, 11]
        assert checkpoints.newest(no_report, check) == 11
        assert checkpoints.newest(no_report, lambda restored: restored.chain) == chain
        assert checkpoints.restore(1, lambda restored: restored.chain) == chain[:1]
    assert steps_that_read_well(tmp_path) == [1, 2, 4, 5, 9, 10, 11]
    forms = [json.loads((tmp_path / f"{step:08}" / "manifest.json").read_text())["format"] for step in (1, 2, 11)]
    assert forms == [1, 3, 3]
    assert [link.bytes for link in chain[:2]] == [array_store.size_bytes(arrays_of(*of)) for of in ((1,), (2, 1))]


def in_place_of(link: Path) -> None:
    """Another whole checkpoint of the same step, right in itself."""
    shutil.rmtree(link)
    with Checkpoints(link.parent.parent / "other", 2) as checkpoints:
        checkpoints.save(2, arrays_of(2), {"of": 2, "by": "another"})
    os.rename(link.parent.parent / "other" / link.name, link)


def flip(link: Path) -> None:
    largest = max((p for p in (link / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "it goes on from checkpoint 00000002, which is missing"),
        (flip, "it goes on from checkpoint 00000002, which is damaged: state/.* is altered: its sha256 differs"),
        (lambda link: (link / "manifest.json").unlink(), "00000002, which is not the one .*: its manifest.json is an"),
        (in_place_of, "it goes on from checkpoint 00000002, which is not the one that it was made after"),
    ],
)
def test_a_missing_or_damaged_link_is_named_and_the_newest_whole_chain_is_used(
    damage: Any, words: str, tmp_path: Path
) -> None:
    with Checkpoints(tmp_path / "all", 9) as checkpoints:
        chain = save_chain(checkpoints, 1, 2, 3)
        assert checkpoints.holds(chain)
        damage(tmp_path / "all" / "00000002")
        assert checkpoints.holds(chain) == (damage is flip)  # which the manifests alone do not show
        with pytest.raises(TrainingError, match=rf"checkpoint .*00000003 is damaged: .*{words}"):
            checkpoints.restore(3, check)
        reports: list[str] = []
        used = 2 if damage is in_place_of else 1
        assert checkpoints.newest(reports.append, lambda restored: restored.step) == used
        assert f"checkpoint {tmp_path / 'all' / '00000003'} is damaged: it goes on from" in reports[0]
        assert f"The one before it, of step {used}, is used instead" in reports[0]
        assert len(reports) == (2 if damage not in (shutil.rmtree, in_place_of) else 1)
        save(checkpoints, 4, chain[:1])  # the run goes on from there
        assert checkpoints.newest(no_report, check) == 4
    stay = ["00000002"] if damage is in_place_of else []
    assert names(tmp_path / "all") == ["00000001", *stay, "00000004"]


def test_without_a_whole_checkpoint_each_is_named(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 9) as checkpoints:
        save_chain(checkpoints, 1, 2, 3)
        shutil.rmtree(tmp_path / "00000001")
        missing = r"it goes on from checkpoint 00000001, which is missing"
        with pytest.raises(TrainingError, match=rf"none of the 2 .* in 00000003, {missing}; in 00000002, {missing}"):
            checkpoints.newest(no_report, check)


def test_links_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four checkpoints of a chain need its first, which is damaged; it is read once to find that out."""
    with Checkpoints(tmp_path, 9) as checkpoints:
        save_chain(checkpoints, 1, 2, 3, 4)
        flip(tmp_path / "00000001")
        looked_at: list[str] = []
        plain = manifest.verify

        def verify(folder: Path, share: tuple[int, int]) -> Any:
            looked_at.append(folder.name)
            return plain(folder, share)

        monkeypatch.setattr(manifest, "verify", verify)
        with pytest.raises(TrainingError, match="none of the 4 checkpoints"):
            checkpoints.newest(no_report, check)
        assert sorted(looked_at) == ["00000001", "00000002", "00000003", "00000004"]


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ([{"step": 1}], "does not say after which"),
        ([{"step": "1", "manifest": "", "bytes": 1}], "does not say after which"),
        ([{"step": 1, "manifest": "", "bytes": 1, "more": 1}], "does not say after which"),
        (7, "does not say after which"),
        ([{"step": 2, "manifest": "", "bytes": 1}] * 2, "does not say after which"),
        ([{"step": 9, "manifest": "", "bytes": 1}], "goes on from checkpoint 00000009, which is missing"),
    ],
)
def test_a_chain_that_is_none_is_damage(chain: Any, words: str, tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 9) as checkpoints:
        save_chain(checkpoints, 1, 2)
        file = tmp_path / "00000002" / "manifest.json"
        text = json.dumps(json.loads(file.read_text()) | {"chain": chain}).encode()
        file.write_bytes(text)
        (tmp_path / "00000002" / "manifest.sha256").write_bytes(manifest._checksum_line(text))
        with pytest.raises(TrainingError, match=words):
            checkpoints.restore(2, check)
        save(checkpoints, 3)  # what stays is found all the same


def test_an_increment_of_another_table_is_damage(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 9) as checkpoints:
        chain = save_chain(checkpoints, 1)
        arrays = arrays_of(2, 1)
        arrays["written"]["user"]["table"] += 1
        checkpoints.save(2, arrays, {"of": 2}, after=chain)
        checkpoints.wait()
        with pytest.raises(TrainingError, match="cannot be laid over the checkpoints before it: .*'user'"):
            checkpoints.restore(2, check)


# Steps of checkpoints, of increments with the steps that they need, and what they have pinned.
CASES: list[tuple[dict[int, tuple[int, ...]], dict[int, int], int, set[int]]] = [
    ({1: (), 2: (), 3: ()}, {}, 2, {2, 3}),
    ({1: (), 2: (1,), 3: (1, 2)}, {}, 2, {1, 2, 3}),
    ({1: (), 2: (1,), 3: (1, 2), 4: ()}, {}, 2, {1, 2, 3, 4}),
    # Of two that need the same whole one, a damaged file of it would be the end: the last of the chain before stays.
    ({1: (), 2: (1,), 3: (1, 2), 4: (), 5: (4,)}, {}, 2, {1, 2, 3, 4, 5}),
    ({1: (), 2: (1,), 3: (1, 2), 4: (), 5: (4,), 6: (4, 5)}, {}, 2, {1, 2, 3, 4, 5, 6}),
    ({1: (), 2: (1,), 3: (1, 2), 4: (), 5: (4,), 6: ()}, {}, 2, {4, 5, 6}),
    ({1: (), 2: (1,), 3: (1, 2), 4: (), 5: (), 6: (5,)}, {}, 2, {4, 5, 6}),
    ({1: (), 2: (1,), 3: (1, 2), 4: (), 5: ()}, {5: 2}, 2, {1, 2, 4, 5}),  # the best one, and what it needs
    ({1: (), 2: (1,), 3: (1, 2), 4: (), 5: ()}, {3: 1}, 2, {4, 5}),  # what went has pinned nothing
    ({1: (), 2: (), 3: (1,), 4: (1, 3), 5: (1, 3, 4)}, {2: 7}, 2, {1, 2, 3, 4, 5}),
    ({1: (), 2: (1,), 3: (1, 2)}, {}, 3, {1, 2, 3}),
]


@pytest.mark.parametrize(("chains", "pinned", "keep", "stay"), CASES)
def test_what_a_kept_one_needs_stays(
    chains: dict[int, tuple[int, ...]], pinned: dict[int, int], keep: int, stay: set[int]
) -> None:
    def content_of(step: int) -> dict[str, Any]:
        links = [{"step": link, "manifest": "", "bytes": 1} for link in chains.get(step, ())]
        return {"pinned": pinned.get(step)} | ({"chain": links} if links else {})

    assert steps_that_stay(list(chains), keep, content_of) & set(chains) == stay


def test_retention_on_disk_keeps_what_is_needed(tmp_path: Path) -> None:
    """Chains of three, of which step 5 is the best one: after each save all that is there reads well."""
    with Checkpoints(tmp_path, 2) as checkpoints:
        chain: Chain = ()
        for step in range(1, 13):
            chain = save(checkpoints, step, chain if len(chain) < 3 else (), pinned=5 if step >= 5 else None)
            assert checkpoints.steps() == steps_that_read_well(tmp_path)
    assert checkpoints.steps() == [4, 5, 7, 8, 9, 10, 11, 12]


# Saves chains of three steps, and dies in the last save, before it renames, removes or writes something the n-th time.
DIES = """
import os, pathlib, shutil, signal, sys
sys.path.insert(0, sys.argv[2])
from support.increments import Checkpoints, save
from recjax.train.checkpoint import manifest

folder, calls = pathlib.Path(sys.argv[1]), int(sys.argv[3])

def counted(plain):
    def call(path, *given, **named):
        global calls
        if step == 7 and folder in (pathlib.Path(path).parent, pathlib.Path(path).parent.parent):
            calls -= 1
            if calls == 0:
                if plain is remove and pathlib.Path(path).is_dir():  # half removed
                    (pathlib.Path(path) / "manifest.json").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return plain(path, *given, **named)
    return call

remove = shutil.rmtree
os.rename, shutil.rmtree = counted(os.rename), counted(remove)
manifest.write_whole = counted(manifest.write_whole)
chain = ()
with Checkpoints(folder, 2) as checkpoints:
    for step in range(1, 8):
        chain = save(checkpoints, step, chain if len(chain) < 3 else ())
"""


@pytest.mark.full
def test_kill_9_at_any_place_leaves_only_whole_chains(tmp_path: Path) -> None:
    """Step 7 begins the third chain, so that the first one goes."""
    seen: list[list[int]] = []
    for place in range(1, 20):
        folder = tmp_path / str(place)
        command = [sys.executable, "-c", DIES, str(folder), TESTS, str(place)]
        child = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, err = child.communicate(timeout=120)
        assert child.returncode in (0, -signal.SIGKILL), err
        seen.append(steps_that_read_well(folder))
        with Checkpoints(folder, 2) as checkpoints:  # the run goes on from the newest
            chain = checkpoints.newest(no_report, lambda restored: restored.chain)
            assert chain is not None
            save(checkpoints, 8, chain)
        assert steps_that_read_well(folder) == ([4, 5, 6, 7, 8] if 7 in seen[-1] else [1, 2, 3, 4, 5, 6, 8])
        assert not [name for name in names(folder) if not name.isdigit()]
        if child.returncode == 0:
            break
    before, after = [1, 2, 3, 4, 5, 6], [4, 5, 6, 7]
    going = [[*before[:n], *after] for n in (3, 2, 2, 1, 1, 0)]  # renamed, removed; the newest first
    assert seen == [before, before, before, *going, after], seen  # its manifest, the checksum, its name
