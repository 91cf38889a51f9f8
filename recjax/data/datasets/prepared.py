"""Any prepared blocks, such as those that one's own code wrote with `recjax.data.storage.blocks.write_prepared`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Config of prepared data, whatever dataset they are of."""

    kind: ClassVar[str] = "prepared"

    path: str = ""  # folder of the prepared data
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def open(self) -> PreparedSource:
        """The prepared data.

        Raises:
          DataError: no path is given, or it holds no intact prepared data.
        """
        if not self.path:
            raise DataError("data=prepared needs the folder of the data. Give it as data.path=DIR.")
        return open_prepared(self.path, cache=self.cache)
