"""`recjax replay`: what it leaves out, what it keeps of a stopped sweep, and its settings."""

import dataclasses
import json

import pytest
from support.commands import assert_refused, inside
from support.traces import by_hand, save

from recjax.lab.replay import microbenchmark


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(by_hand(), tmp_path_factory.mktemp("trace"))


def hosts():
    """Four ranks on two hosts: those of the same number on both reduce together, then all."""
    whole = by_hand()
    across = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    ranks = {
        rank: tuple(dataclasses.replace(e, group=across[rank]) if len(e.group) == 2 else e for e in events)
        for rank, events in whole.ranks.items()
    }
    return dataclasses.replace(whole, ranks=ranks)


def test_collectives_that_shrinking_leaves_out_are_named(tmp_path):
    folder = save(hosts(), tmp_path)
    done = inside("replay", folder, "--shrink", 2, "--repeats", 1, "--json")
    assert done.result["left_out"] == [
        {"phase": "dense_grads", "kind": "all_reduce", "count": 2},
        {"phase": "dense_grads", "kind": "reduce_scatter", "count": 2},
    ]
    text = inside("replay", folder, "--shrink", 2, "--repeats", 1).out
    assert "left out by --shrink" in text and "2 all_reduce (dense_grads)" in text


def test_a_rank_without_a_file_is_named(folder, tmp_path):
    for rank in (0, 1, 3):
        name = f"trace.{rank}.json"
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    done = inside("replay", tmp_path, "--repeats", 1)
    assert "no file of rank 2" in done.out, done.err
    assert "left out" not in done.out


def test_settings_of_the_mesh(folder):
    """As launch/local.sh adds them to every command."""
    assert inside("replay", folder, "mesh.platform=cpu", "mesh.devices=4", "--repeats", 1).status == 0
    assert_refused(inside("replay", folder, "mesh.devices=2"), 2, "4 ranks are to be replayed", "--shrink")
    assert_refused(inside("replay", folder, "mesh.hosts=2"), 2, "mesh.platform and mesh.devices alone")
    assert_refused(inside("replay", folder, "mesh.platform=abacus"), 2, "platform")
    assert_refused(inside("replay", "mesh.devices=2"), 2, "either the folder of a trace, or --sweep")
    assert_refused(inside("replay", "--sweep", "mesh.devices=2", "--devices", 4), 2, "mesh.devices=2")


class Slow:
    """A sweep that is stopped in its third pass."""

    def __init__(self, *_: object) -> None:
        self.passes = 0

    def measure(self, _: int) -> None:
        if self.passes == 2:
            raise KeyboardInterrupt
        self.passes += 1

    def result(self):
        return {"passes": self.passes}


def test_a_sweep_that_is_stopped_keeps_its_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(microbenchmark, "Sweep", Slow)
    done = inside("replay", "--sweep", "mesh.devices=2", "--out", tmp_path / "sweep.json")
    assert done.status == 130 and "--out has what the passes" in done.err
    assert json.loads((tmp_path / "sweep.json").read_text()) == {"passes": 2}
