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


def test_modules_with_slow_tests_go_first_and_stay_together():
    class Item:
        def __init__(self, path, slow):
            self.path, self.slow = path, slow

        def get_closest_marker(self, name):
            return name if self.slow else None

    items = [Item(*item) for item in (("a", False), ("b", False), ("b", True), ("c", False), ("d", True))]
    expected = [items[k] for k in (1, 2, 4, 0, 3)]
    tiers.slow_first(items)
    assert items == expected
