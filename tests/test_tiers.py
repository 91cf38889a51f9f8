"""The hook that keeps fast tests fast."""

import pytest
from support import tiers


def test_a_slow_test_is_named_with_its_remedy():
    tiers.check(tiers.LIMIT_S)
    with pytest.raises(pytest.fail.Exception, match=r"took 2\.1 s of CPU; the limit is 2\. .* @pytest\.mark\.full"):
        tiers.check(2.1)
