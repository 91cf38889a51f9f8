"""Settings of tables that are larger than the devices' memory."""

from __future__ import annotations

import dataclasses

from recjax.errors import ConfigError
from recjax.settings.values import check_ranges
from recjax.utils.units import read_whole_bytes


@dataclasses.dataclass(frozen=True)
class TierConfig:
    """Places for rows that the devices have no memory for. Sizes are bytes or texts such as 512MiB. Changes no number.

    A device holds the rows that batches name as a cache; all others are on the host.
    """

    # Bytes of a device for rows and their optimizer's state; 0: all rows are on the devices
    device_bytes: int | str = 0
    # Bytes of the host's memory, in each process, for rows that are not on the devices; 0: as many as they need
    dram_bytes: int | str = 0
    disk: str = ""  # folder on a disk for rows that dram_bytes has no room for; "": none
    look_ahead: int = 4  # later batches that decide which rows stay on the devices

    def __post_init__(self) -> None:
        check_ranges(self, look_ahead=(1, 64))
        for name in ("device_bytes", "dram_bytes"):
            self.bytes_of(name)
        if self.disk and not self.dram_bytes:
            raise ConfigError(
                "tier.disk is set, but tier.dram_bytes is not: it says how much of the host's memory rows take before "
                "they go to the disk. Set it, for example tier.dram_bytes=4GiB."
            )

    def require_used(self) -> None:
        """Refuses places for rows that the devices lack where these have all rows (ConfigError)."""
        set_ = next((name for name in ("dram_bytes", "disk") if getattr(self, name)), None)
        if set_ and not self.device_bytes:
            raise ConfigError(
                f"tier.{set_} is set, but tier.device_bytes is not: all rows are on the devices. Set it, too, for "
                "example tier.device_bytes=1GiB."
            )

    def bytes_of(self, name: str) -> int:
        """One of the sizes in bytes."""
        given = getattr(self, name)
        if isinstance(given, int):
            check_ranges(self, **{name: (0, None)})
            return given
        return 0 if not given or given == "0" else read_whole_bytes(given, f"tier.{name}")
