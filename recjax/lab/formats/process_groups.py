"""Process groups of a trace: by number, or of all ranks where a file gives their number alone.

Events of a group share one tuple, so that a short line that stands for thousands of ranks takes no memory for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recjax.errors import DataError
from recjax.lab.formats.trace import MAX_RANKS, Event

_SIZES = 64  # of groups that are given by their size; real files have one or two


class AllRanks:
    """The groups of ranks 0 to N - 1 of one file."""

    def __init__(self) -> None:
        """None so far."""
        self._groups: dict[int, tuple[int, ...]] = {}

    def first(self, size: int, place: str) -> tuple[int, ...]:
        """Ranks 0 to `size` - 1, the same tuple for the same size; `place` is for messages.

        Raises:
          DataError: more than a trace may have, or too many sizes for one file.
        """
        if size not in self._groups:
            if size > MAX_RANKS or len(self._groups) == _SIZES:
                raise DataError(
                    f"{place}: a group of {size:,} ranks that it does not list. A trace has at most {MAX_RANKS:,} "
                    f"ranks, and groups of {_SIZES} sizes without a list."
                )
            self._groups[size] = tuple(range(size))
        return self._groups[size]


def world_of(events: Iterable[Event], least: int) -> int:
    """Returns how many ranks there are for the groups of these events: `least`, or more."""
    groups = {id(event.group): event.group for event in events}
    return max([least, *(max(group) + 1 for group in groups.values() if group)])


def process_groups(groups: Sequence[tuple[int, ...]], world: int) -> dict[tuple[int, ...], int]:
    """The groups of a trace by number: 0 is all ranks in order, the others as they come."""
    everyone = tuple(range(world))
    return {group: number for number, group in enumerate(dict.fromkeys((everyone, *groups)))}
