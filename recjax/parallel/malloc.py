"""Asks glibc's allocator, in commands that train or prepare data, for huge pages and to keep what is given back.

XLA asks again for the arrays of every step, some hundred MB. By default glibc returns blocks of that size to the system
at once, so that Linux hands out and clears 4600 pages in every step of bench_multihot; and it does so in pages of 4
KiB, with which rows of large tables miss the TLB. Tunables that glibc reads when a process starts change both. On two
cores a step of bench_kaggle16 took 90 ms with huge pages and 127 without (JAX 0.10.2; one of bench_multihot 200 either
way), and with memory kept too 85 instead of 89 (JAX 0.12.0.1, medians of two runs each by turns). Blocks above 1 GiB,
such as large tables, still go back to the system when they are freed.

Every thread keeps an arena of its own, as it is by default. In a single one threads wait for each other. On two cores
of an AMD EPYC steps took so many times as long in one arena (JAX 0.10.2, by turns): movietweetings on eight devices
1.2, on one 1.5 to 2.1; synthetic on two 1.4; bench_kaggle16 on eight 1.15 to 1.9, on one as long. On an H100 with 16
cores, where XLA tries kernels in many threads, the first step of bench_kaggle16 came after 60 to 70 s in one arena, and
comes after 24 to 26 with one for every thread. In return only the first arena can hold blocks of 64 MiB and more, so
that those of other threads do go back: a step of bench_multihot, which has such blocks, took 0.9 times as long in one
arena.

What the process starts gets none of it: once glibc has read the tunables they leave the environment. A recjax command
among the children sets its own; others that are to have them are started within `passed_on`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_TUNABLES = "GLIBC_TUNABLES"
_NO_RESTART = "RECJAX_NO_REEXEC"
_RESTARTED = "RECJAX_RESTARTED"  # for the moment of the restart: the process, so that no child takes it for its own
_ARROW = "ARROW_DEFAULT_MEMORY_POOL"
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_KEEP = (f"glibc.malloc.mmap_threshold={2**30}", f"glibc.malloc.trim_threshold={2**30}")
_HUGE = "glibc.malloc.hugetlb=1"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_own: dict[str, str] = {}  # tunables that this process set for itself, in no environment any more


def restart_with_tunables() -> None:
    """Starts this command again, in the same process, with the tunables set; returns where that is of no use.

    That is where the user has set GLIBC_TUNABLES, and where there is no glibc. Where RECJAX_NO_REEXEC is set to
    anything, as for a debugger, which would lose the process, it returns too. Huge pages are asked for where the system
    gives them to those who ask. In the process that was started again it takes the tunables out of the environment.
    """
    if os.environ.pop(_RESTARTED, None) == str(os.getpid()):  # a restart keeps the process
        _own[_TUNABLES] = os.environ.pop(_TUNABLES, "")
        return
    if _own or os.environ.get(_NO_RESTART) or _TUNABLES in os.environ or not _glibc():
        return
    os.environ |= environment() | {_RESTARTED: str(os.getpid())}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def passed_on() -> Iterator[None]:
    """Gives processes that are started within it the tunables that this one was started again with, if it was.

    For those that are compared with it, or train in its stead. The environment is that of all threads.
    """
    added = {} if _TUNABLES in os.environ else _own
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def environment() -> dict[str, str]:
    """Returns the tunables for this system as environment variables. Arrow takes its memory from glibc, too."""
    asked = [*_KEEP, *([_HUGE] if _huge_on_request() else [])]
    return {_TUNABLES: ":".join(asked), _ARROW: os.environ.get(_ARROW, "system")}


def return_memory() -> None:
    """Has blocks of 4 MiB and more go back to the system when they are freed, from now on; nothing where no glibc is.

    For runs that share memory out by bytes: what XLA and NumPy take for a moment must not stay with the process.
    """
    if _glibc():
        library = ctypes.CDLL(None)
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            library.mallopt(option, 2**22)


def keep_freed_memory() -> None:
    """Makes glibc reuse the memory of freed arrays of up to 31 MiB; elsewhere it does nothing.

    By default every array of more than 128 KiB gets fresh pages, which the system fills with zeros: 40% of the
    processor time of reading prepared blocks. The threshold rises to the largest block that was ever freed, up to
    32 MiB (mallopt(3), M_MMAP_THRESHOLD), so freeing one such block once is enough. It is never touched, so it costs
    nothing; at most 62 MiB of free memory are held back.
    """
    import numpy as np  # not with this module, which the command line imports

    np.empty(31 << 20, np.uint8)


def return_free() -> None:
    """Gives the system what of the heap is free now, for example after a compilation; nothing where no glibc is."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        return False


def _huge_on_request() -> bool:
    try:
        return "[madvise]" in _SYSTEM.read_text("utf-8")
    except OSError:
        return False
