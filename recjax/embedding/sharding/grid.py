"""Columns over hosts, rows over the devices of each host: a device holds ceil(D / H) columns W of some rows.

The collectives are those of column-wise tables in two steps (see `columns.py`); a device gets a row from one relay of
its host, whole. Means over rows are summed across hosts.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from recjax.embedding.sharding.columns import ColumnSharding
from recjax.parallel.mesh import ACROSS_HOSTS


@dataclasses.dataclass(frozen=True)
class GridSharding(ColumnSharding):
    """Each device holds some columns, by its host, of some rows, by its place within the host."""

    kind: ClassVar[str] = "grid"
    column_axes: ClassVar[tuple[str, ...]] = ACROSS_HOSTS

    @property
    def owners(self) -> int:
        """O = E: the devices of one host share the rows."""
        return self.per_host

    @property
    def column_parts(self) -> int:
        """H."""
        return self.hosts
