"""Options of a table in the words of who gave them: a command's, a config's or Python's, for messages."""

from __future__ import annotations

import enum

_NUMBERS = ("threshold", "split_seed")  # which Python gives without quotes


class Wording(enum.Enum):
    """Ways to give the options of a table, with an example of each."""

    COMMAND = "recjax data prepare table --from FILE label=clicked"
    CONFIG = "recjax train table data.from=FILE data.label=clicked"
    PYTHON = 'recjax.prepare(table, label="clicked", out=FOLDER)'

    def option(self, key: str, value: str) -> str:
        """An option as it is given there: label=x, data.label=x or label="x"."""
        if self is Wording.PYTHON and key not in _NUMBERS:
            return f'{key}="{value}"'
        return f"{'data.' if self is Wording.CONFIG else ''}{key}={value}"
