"""The part of a training's state that the host holds: rows that are not on the devices, and maps from keys to rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from recjax.embedding.dynamic.tables import DynamicTables
from recjax.tiers.tier import Tier


@dataclasses.dataclass(frozen=True)
class HostState:
    """Parts of a state that the host holds. They change in place with each step: they are of the newest state alone.

    Attributes:
      tier: the rows that are not on the devices; None: all are.
      ids: which keys have which rows; None: no table gives rows to keys.
    """

    tier: Tier | None = None
    ids: DynamicTables | None = None

    def clear(self) -> None:
        """Starts again: rows are at their initial values, and no key has one."""
        for part in (self.tier, self.ids):
            if part is not None:
                part.clear()

    def admit(self, state: Any, admission: Any) -> Any:
        """Brings rows to the devices, and draws those that were given to keys; `state`, a `TrainState`, is used up."""
        part = self.tier or self.ids
        return state if part is None else part.admit(state, admission)

    def close(self) -> None:
        """Ends the threads of the rows, and gives memory and files back."""
        if self.tier is not None:
            self.tier.close()


EMPTY = HostState()
