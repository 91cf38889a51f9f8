"""Addresses of the rows in a group's buffer: from slots back to tables and storage positions, on the device.

A row has an owner and, in the owner's part of the buffer, a *home*: one of R numbers that its segment, band and storage
position determine (`BoundSegment.locate`). The *slot* is the row of the buffer that holds it: the home itself, but in
a cache (`Group.cached`), whose R slots hold some of more homes, in each step others. Then the device has an int32 array
with the home of each slot, split as the buffer is; the host, which routes, has the way back (`recjax.tiers.directory`).

Whatever depends on a row (rounding, initial values, export, import, the order of a sum over rows) asks for its
position, never for its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.layout import Group

if TYPE_CHECKING:
    from recjax.embedding.bands import Band

NO_HOME = -1  # of a slot of a cache that holds no row
# From homes [M] to (number of a segment, storage position, whether there is such a row); else any position.
Locate = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
Homes = dict[str, jax.Array]  # name of a cache -> int32 [versions * parts * R], the home of each slot


def locator(group: Group, part: jax.Array) -> Locate:
    """Returns what `Places.locator` does, for a part of a group's buffer, int32 []."""
    places = Places(*map(jnp.asarray, Places.of(group)))
    return places.locator([segment.band for segment in group.segments], part)


class Places(NamedTuple):
    """Places of a group's T segments in the P parts of its buffer, as arguments of a program. All int32.

    Attributes:
      offset_PxT: where a segment's rows start.
      first_PxT: the first of them, by its number in the segment's band.
      stop_PxT: the one after the last.
    """

    offset_PxT: Any
    first_PxT: Any
    stop_PxT: Any

    @classmethod
    def of(cls, group: Group) -> Places:
        """Returns the places of a group's segments."""
        owner_P = np.asarray(group.place(np.arange(group.parts))[0])
        offsets = [np.asarray(s.offsets)[owner_P] for s in group.segments]
        bounds = [s.split.bounds(owner_P) for s in group.segments]
        columns = offsets, [first for first, _ in bounds], [stop for _, stop in bounds]
        return cls(*(np.stack(column, axis=1).astype(np.int32) for column in columns))

    def locator(self, bands: Sequence[Band | None], part: Any) -> Locate:
        """From homes in one part of the buffer back to tables and rows, on the device.

        Args:
          bands: those of the segments; None is one of all rows.
          part: int32 [], which one.
        """
        offset_T, first_T, stop_T = self.offset_PxT[part], self.first_PxT[part], self.stop_PxT[part]

        def locate(homes_M: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            t_M = jnp.searchsorted(offset_T, homes_M, side="right") - 1
            number_M = first_T[t_M] + homes_M - offset_T[t_M]
            used_M = number_M < stop_T[t_M]
            position_M = number_M
            for t, band in enumerate(bands):
                if band is not None and band.chosen is not None:
                    mine_M = (t_M == t) & used_M
                    position_M = jnp.where(mine_M, band.position(jnp.where(mine_M, number_M, 0)), position_M)
            return t_M, position_M, used_M

        return locate


def homes_of(slots_M: jax.Array, homes_R: jax.Array | None, beyond: int = 0) -> jax.Array:
    """The homes of some slots of this device's part; of slots at R or beyond numbers at R or beyond, all different.

    Args:
      slots_M: int32.
      homes_R: int32 [R], of a cache; None: every slot is its own home.
      beyond: added to slots at R or beyond: what brings them beyond all homes.
    """
    if homes_R is None:
        return slots_M
    inside_M = slots_M < homes_R.shape[0]
    return jnp.where(inside_M, homes_R.at[jnp.where(inside_M, slots_M, 0)].get(), slots_M + beyond)
