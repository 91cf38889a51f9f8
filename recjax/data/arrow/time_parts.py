"""Parts of a time that make features: year, month, day, weekday, hour, minute, by the clock of a time zone."""

from __future__ import annotations

import zoneinfo

import numpy as np

from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import placed
from recjax.errors import ConfigError

PARTS = ("year", "month", "day", "weekday", "hour", "minute")  # month and day from 1, weekday 0 on Monday
USUAL = ("hour", "weekday")
_LEAST, _MOST = -62_135_596_800, 253_402_300_800  # seconds since 1970 of the years 1 to 9999
_UNITS = ((10**11, 1), (10**14, 10**3), (10**17, 10**6))  # so late is a number of seconds, ms and us


def check_zone(name: str) -> None:
    """Refuses a name of no time zone (ConfigError)."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(
            f"columns: there is no time zone {name!r}. Write for example zone=Europe/Berlin; UTC needs none."
        ) from None


def units_of(most: float) -> int:
    """Units in a second of times whose latest is so large a number: they are seconds, ms, us or ns since 1970."""
    return next((units for bound, units in _UNITS if most < bound), 10**9)


def outside(seconds: np.ndarray) -> np.ndarray:
    """Returns where seconds since 1970 are no time of the years 1 to 9999: bool [n]; False for NaN."""
    return (seconds < _LEAST) | (seconds >= _MOST)


def coded(seconds: np.ndarray, part: str, zone: str) -> Coded:
    """A part of each time.

    Args:
      seconds: since 1970 in UTC, float64 [n], NaN where missing.
      part: one of PARTS.
      zone: of the clock; "": UTC.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    present = ~(np.isnan(seconds) | outside(seconds))
    whole = np.floor(seconds[present]).astype(np.int64)
    times = pa.array(whole).cast(pa.timestamp("s", zone or None))
    found = (pc.day_of_week if part == "weekday" else getattr(pc, part))(times).to_numpy(zero_copy_only=False)
    values, back = np.unique(found.astype(np.int64), return_inverse=True)
    return placed(values, back, present)
