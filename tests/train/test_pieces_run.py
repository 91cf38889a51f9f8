"""Runs whose rows come in pieces: how many is free when a run goes on, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import SMALL, assert_refused, inside, lines_of

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


def test_more_pieces_than_the_shortest_list_has_rows_are_refused(preset: Path, tmp_path: Path) -> None:
    done = inside("train", preset, *SMALL, "embedding.exchange.pieces=9", "--out", tmp_path / "run")
    assert_refused(done, 2, "pieces is 9; it must be 1 to 8")


def test_a_run_goes_on_in_another_number_of_pieces(preset: Path, tmp_path: Path) -> None:
    ends = []
    for first, then in (("1", "1"), ("3", "2")):
        out = tmp_path / first
        for steps, pieces in (("2", first), ("4", then)):
            settings = (f"train.steps={steps}", "mesh.devices=2", f"embedding.exchange.pieces={pieces}")
            done = inside("train", preset, *settings, "--out", out)
            assert done.status == 0, done.err
        ends.append([(line["step"], line["loss"]) for line in lines_of(out, "train")])
    assert ends[0] == ends[1] and [step for step, _ in ends[0]] == [1, 2, 3, 4]
