"""Report of a training with rows on the host, in words."""

from __future__ import annotations

from collections.abc import Mapping

from recjax.utils.units import size_text


def in_short(figures: Mapping[str, int], steps: int, peak_bytes: int) -> str:
    """A paragraph on rows, disk and memory.

    Args:
      figures: as `Tier.figures` gave them at the end of the training.
      steps: of the training.
      peak_bytes: the most memory that the process has held.
    """
    touched, rows_bytes, found_bytes = (figures[key] for key in ("written_rows", "row_bytes", "directory_bytes"))
    text = f"rows that are not all on the devices: {touched:,} were touched"
    if figures["disk_bytes"] and touched and steps:
        reads = figures["records_read"] - figures["records_read_aside"]
        text += (
            f", {figures['disk_rows'] / touched:.0%} of them have a record on the disk, whose files take "
            f"{size_text(figures['disk_bytes'])} ({figures['disk_bytes'] / figures['padded_bytes']:.2f} times all "
            f"padded records); a step read {reads / steps:,.0f} records there and wrote "
            f"{figures['records_written'] / steps:,.0f}"
        )
    rest_bytes = max(0, peak_bytes - rows_bytes - found_bytes)
    return (
        f"{text}. The process took {size_text(peak_bytes)} of memory at most: {size_text(rows_bytes)} for rows, "
        f"{size_text(found_bytes)} to find them, {size_text(rest_bytes)} for all else"
    )
