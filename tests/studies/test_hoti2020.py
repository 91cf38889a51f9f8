"""`recjax study hoti2020`: its files, what it says, and its older name, `recjax simulate hoti2020`."""

import json

import pytest
from support.commands import assert_refused, inside


@pytest.mark.full
def test_the_study_at_a_small_size(tmp_path):
    done = inside("study", "hoti2020", "--ranks", 16, "--chunks", 2, "--out", tmp_path, "--json")
    result = done.result
    assert json.loads((tmp_path / "hoti2020.json").read_text()) == result
    assert {path.name for path in tmp_path.iterdir()} == {
        "hoti2020.json", "systems.png", "layers.png", "scheduling.png", "chunks.png", "copies.png",
        "lone_all_reduce.png", "transport.png",
    }  # fmt: skip
    stated = [o for o in result["observations"] if o["source"] == "stated"]
    assert any("3x" in o["statement"] for o in stated) and any("50x" in o["statement"] for o in stated)
    assert all(isinstance(o["holds"], bool) and o["found"] for o in result["observations"])
    assert result["assumptions"]
    assert "hoti2020: transport" in done.err


def test_a_part_of_the_study(tmp_path):
    some = ("simulate", "hoti2020", "--ranks", 16, "--chunks", 1, "--out", tmp_path)
    done = inside(*some, "--experiments", "lone_all_reduce")
    assert {path.name for path in tmp_path.iterdir()} == {"hoti2020.json", "lone_all_reduce.png"}
    # Sixteen ranks, direct, one chunk: N s at a port against s, when latency does not count.
    line = next(line for line in done.out.splitlines() if "(direct, 1 chunk(s))" in line)
    assert "beyond it 16.0x at 256 MiB" in line
    assert_refused(inside(*some, "--experiments", "system"), 2, "'system' is unknown. There are systems")
    assert_refused(inside(*some, "--ranks", 100), 2, "--ranks 100")
