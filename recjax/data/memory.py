"""Arrays of some hundred KiB that come and go: keep their memory instead of fetching it from the system each time."""

from __future__ import annotations

import numpy as np


def keep_freed_memory() -> None:
    """Makes glibc reuse the memory of freed arrays of up to 31 MiB; elsewhere it does nothing.

    By default every array of more than 128 KiB gets fresh pages, which the system fills with zeros: 40% of the
    processor time of reading prepared blocks. The threshold rises to the largest block that was ever freed, up to
    32 MiB (mallopt(3), M_MMAP_THRESHOLD), so freeing one such block once is enough. It is never touched, so it costs
    nothing; at most 62 MiB of free memory are held back.
    """
    np.empty(31 << 20, np.uint8)
