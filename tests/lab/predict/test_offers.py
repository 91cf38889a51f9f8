"""`recjax plan --devices`: the figures of a table for who buys, against each other and closed forms."""

import pytest
from support.commands import assert_refused, inside, write_preset

from recjax.lab.predict import offers


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    path = write_preset(tmp_path_factory.mktemp("preset"))
    path.write_text(path.read_text().replace('plan="row_wise"', 'plan="auto"'))
    return path


def asked(preset, *more):
    return inside("plan", preset, "--devices", "4,1,16", "--machine", "h200", *more)


def test_offers_agree_with_themselves_and_are_drawn(preset, tmp_path):
    found = asked(preset, "--price", "3.6", "--out", tmp_path, "--json").result
    assert (tmp_path / "offers.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "offers.json").is_file()
    assert [(row["devices"], row["hosts"]) for row in found["offers"]] == [(1, 1), (4, 1), (16, 2)]
    for row in found["offers"]:
        assert row["samples_per_s"] == pytest.approx(64 / row["step_ms"] * 1e3)
        assert row["cost_per_million"] == pytest.approx(3.6 / 3600 * row["devices"] * 1e6 / row["samples_per_s"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["devices"])
        assert row["memory_gib"]["total"] < row["usable_gib"] == pytest.approx(0.92 * 141e9 / 2**30)
        assert sum(row["plan"].values()) == 3
    alone, _, most = found["offers"]
    assert alone["exposed_ms"] == 0 < most["exposed_ms"] and alone["speedup"] == 1
    text = offers.to_text(found)
    assert "NOT measured" in text and "per million samples" in text and "the host is taken to keep up" in text


def test_what_does_not_fit_says_so_and_a_plan_that_is_given_is_taken(preset):
    found = asked(preset, "planner.memory_gib=0.00004").out
    assert "does not fit" in found and "no plan fits a device" in found
    given = asked(preset, "plan=row_wise", "--json").result
    assert [row["plan"] for row in given["offers"]] == [{"row_wise": 3}] * 3


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        (("--devices", "8,x"), "give numbers of devices"),
        (("--devices", "8", "--price", "0"), "--price 0"),
        (("--devices", "8", "--predict"), "compares numbers of devices"),
        (("--price", "2"), "--price belongs to --devices"),
    ],
)
def test_mistakes_are_refused(preset, more, pattern):
    machine = ("--machine", "h200") if "--devices" in more else ()
    assert_refused(inside("plan", preset, *more, *machine), 2, pattern)
