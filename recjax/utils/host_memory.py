"""Memory that is left on the host, and that this process has taken."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could still take without swapping, None where the system does not say (it is not Linux).

    In a container with a limit of its own (cgroup version 2), what is left of that if it is less. Files that the system
    keeps in memory only for speed count as available.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, min(left, limit - used + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):  # no container, or "max": no limit
        return left


def peak_bytes(proc: Path = Path("/proc")) -> int:
    """The most bytes of the host's memory that this process has held at a time, so far."""
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):  # it is not Linux; where the C library counts in bytes it is macOS
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
