"""Options of a table in the words of who gave them: a command's, a config's or Python's, for messages."""

from __future__ import annotations

import enum
import json
import shlex

_NUMBERS = ("threshold", "split_seed")  # which Python gives without quotes


class Wording(enum.Enum):
    """Ways to give the options of a table, with an example of each."""

    COMMAND = "recjax data prepare table --from FILE label=clicked"
    CONFIG = "recjax train table data.from=FILE data.label=clicked"
    PYTHON = 'recjax.prepare(table, label="clicked", out=FOLDER)'

    def option(self, key: str, value: str) -> str:
        """An option as it is given there: label=x, data.label=x or label="x"; quoted as the shell or Python needs."""
        if self is Wording.PYTHON:
            return f"{key}={value if key in _NUMBERS else json.dumps(value, ensure_ascii=False)}"
        return shlex.quote(f"{'data.' if self is Wording.CONFIG else ''}{key}={value}")
