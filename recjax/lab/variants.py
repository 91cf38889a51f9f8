"""`--vary KEY=A,B,...`: every combination of values of some settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from recjax.errors import ConfigError

Variant = tuple[str, list[tuple[str, str]]]  # what to call it, and its (key, value)


def variants(varied: Sequence[str], example: str) -> list[Variant]:
    """Every combination, the last one's values changing fastest; one without settings if nothing varies.

    Args:
      varied: texts KEY=A,B,..., or KEY+KEY=A,B,... for settings that take the same value. Values that have commas
        themselves stand with semicolons between.
      example: for the error.

    Raises:
      ConfigError: a text of another form.
    """
    choices: list[list[Variant]] = []
    for text in varied:
        keys, _, values = text.partition("=")
        each = values.split(";" if ";" in values else ",")
        if not all(each) or not all(keys.split("+")):
            raise ConfigError(
                f"--vary {text}: write KEY=A,B,..., for example {example}; KEY+KEY=A,B,... for settings that go "
                "together; and semicolons between values that have commas."
            )
        choices.append([(f"{keys}={v}", [(key, v) for key in keys.split("+")]) for v in dict.fromkeys(each)])
    return [
        (",".join(name for name, _ in chosen), [pair for _, pairs in chosen for pair in pairs])
        for chosen in itertools.product(*choices)
    ]
