"""The range of a setting; how values are read and written is tested through the configs, in test_overrides.py."""

import dataclasses
import math

import pytest

from recjax.errors import ConfigError
from recjax.settings.values import check_ranges


@dataclasses.dataclass
class Options:
    count: int | None = 3
    share: float = 0.5
    sizes: tuple[int, ...] = (1, 2, 9)


def check(**changes):
    check_ranges(Options(**changes), count=(1, None), share=(0, 0.9), sizes=(1, 9))


@pytest.mark.parametrize(
    "changes", [{}, {"count": 1}, {"count": 10**30}, {"count": None}, {"share": 0.9}, {"share": 0.0}, {"sizes": ()}]
)
def test_what_is_in_range(changes):
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, r"^count is 0; it must be at least 1\.$"),
        ({"share": 0.91}, r"^share is 0.91; it must be 0 to 0.9\.$"),
        ({"share": math.nan}, "^share is nan"),
        ({"sizes": (1, 10, 0)}, r"^sizes is 10; it must be 1 to 9\.$"),
        ({"sizes": (0,)}, "^sizes is 0"),
    ],
)
def test_what_is_out_of_range(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(**changes)
