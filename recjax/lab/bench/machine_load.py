"""Load by other processes while something was measured. A speed says little on a machine that is shared."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


class Others:
    """Watches from its making on. Linux only; elsewhere `share` is None."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Takes the processes `pids`, this one, and those that they have started and waited for as ours."""
        self._pids = [os.getpid(), *pids]
        self._start = self._now()

    def share(self) -> float | None:
        """CPU time of all other processes over what all cores had, since the start: 0 is a quiet machine."""
        if self._start is None or (now := self._now()) is None:
            return None
        wall, busy, own = (a - b for a, b in zip(now, self._start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds: of the clock, all processes' CPU time, our own."""
        tick = os.sysconf("SC_CLK_TCK")
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
            own = 0
            for pid in self._pids:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += sum(map(int, fields[11:15]))  # the last two: of children that have been waited for
        except (OSError, ValueError):
            return None
        return time.monotonic(), (user + nice + system + irq + softirq + steal) / tick, own / tick
