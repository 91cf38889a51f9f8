"""The hook that keeps fast tests fast."""

import pytest
from support import tiers


def test_a_slow_test_is_named_with_its_remedy():
    tiers.check(tiers.LIMIT_S, lambda: 1.0)
    with pytest.raises(pytest.fail.Exception, match=r"took 12\.1 s of CPU; the limit is 12\.0\. .*@pytest\.mark\.full"):
        tiers.check(12.1, lambda: 1.0)


def test_on_a_machine_that_is_slower_now_the_limit_is_higher():
    tiers.check(18.0, lambda: 1.5)
    with pytest.raises(pytest.fail.Exception, match=r"took 18\.1 s of CPU; the limit is 18\.0\."):
        tiers.check(18.1, lambda: 1.5)
    assert tiers.slowness() >= 1


def test_modules_with_slow_tests_go_first_stay_together_and_come_in_the_order_of_how_they_compile():
    class Item:
        def __init__(self, path, *marks):
            self.path, self.marks = path, {mark.name: mark for mark in marks}

        def get_closest_marker(self, name):
            return self.marks.get(name)

    slow, light = pytest.mark.full.mark, pytest.mark.light_compile.mark
    optimised = pytest.mark.light_compile(optimised=True).mark
    made = (("a",), ("b", light), ("b", light, slow), ("c",), ("d", slow), ("e", optimised, slow), ("f", light, slow))
    items = [Item(*item) for item in made]
    expected = [items[k] for k in (4, 5, 1, 2, 6, 0, 3)]
    tiers.slow_first(items)
    assert items == expected


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
