"""The hook that keeps fast tests fast."""

import pytest
from support import tiers


def test_a_slow_test_is_named_with_its_remedy():
    tiers.check(tiers.LIMIT_S, lambda: 1.0)
    with pytest.raises(pytest.fail.Exception, match=r"took 2\.1 s of CPU; the limit is 2\.0\. .* @pytest\.mark\.full"):
        tiers.check(2.1, lambda: 1.0)


def test_on_a_machine_that_is_slower_now_the_limit_is_higher():
    tiers.check(3.0, lambda: 1.5)
    with pytest.raises(pytest.fail.Exception, match=r"took 3\.1 s of CPU; the limit is 3\.0\."):
        tiers.check(3.1, lambda: 1.5)
    assert tiers.slowness() >= 1
