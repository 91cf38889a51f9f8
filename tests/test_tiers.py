"""The hook that keeps fast tests fast."""

import pytest
from support import tiers


def test_a_slow_test_is_named_with_its_remedy():
    tiers.check(tiers.LIMIT_S, lambda: 1.0)
    with pytest.raises(pytest.fail.Exception, match=r"took 12\.1 s of CPU; the limit is 12\.0\. .*@pytest\.mark\.full"):
        tiers.check(12.1, lambda: 1.0)


@pytest.mark.parametrize(
    ("expression", "without"),
    [
        ("", False),
        ("full", True),
        ("full and not wide", True),
        ("wide and  full", True),
        ("gpu and wide", True),
        ("not full", False),
        ("full or wide", False),
        ("not (full and wide)", False),
    ],
)
def test_modules_without_a_marker_that_is_asked_for_are_not_imported(expression, without):
    wide = "@pytest.mark.wide\ndef test(): ...\n# mark.fuller"
    assert tiers.lacks(wide, expression) == without
    assert not tiers.lacks(f"{wide}  # mark.gpu, mark.full", expression)


def test_nor_are_those_of_which_every_test_has_a_marker_that_is_not_asked_for():
    source = "pytestmark = [pytest.mark.light_compile, pytest.mark.full]"
    assert tiers.lacks(source, "not full") and tiers.lacks(source, "light_compile and not full")
    assert not tiers.lacks(source, "full") and not tiers.lacks(source, "not wide")
    assert not tiers.lacks("@pytest.mark.full\ndef test(): ...", "not full")
