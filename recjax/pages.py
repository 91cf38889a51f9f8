"""Huge pages for what a run on CPU allocates.

XLA asks the system anew for the arrays of every step, some hundred MB. Linux hands memory out in pages of 4 KiB, each
of which is cleared when it is first touched, and rows of large tables then miss the TLB. With pages of 2 MiB a step of
bench_kaggle16 took 90 ms instead of 127, one of bench_multihot 200 as before (two cores, JAX 0.10.2, median of the last
rounds). glibc asks for those if its tunable `glibc.malloc.hugetlb` is 1 when a process starts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TUNABLES = "GLIBC_TUNABLES"
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Starts this command anew, in the same process, with the tunable set; returns where that is of no use.

    That is where the user has set GLIBC_TUNABLES, where the system gives huge pages to nobody or to everybody, and
    where there is no such system.
    """
    if _TUNABLES in os.environ or not _wanted():
        return
    os.environ[_TUNABLES] = "glibc.malloc.hugetlb=1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _wanted() -> bool:
    try:
        return "[madvise]" in _SYSTEM.read_text("utf-8")
    except OSError:
        return False
