"""Dependences of instructions, read from the text of a compiled program."""

from __future__ import annotations

import re


def ancestors(hlo: str) -> dict[str, set[str]]:
    """Instruction -> all that it depends on within its computation, itself included."""
    found: dict[str, set[str]] = {}
    for line in hlo.splitlines():  # operands stand before their users
        if match := re.match(r"^\s+(?:ROOT )?%(\S+) = (.*)$", line):
            name, rest = match.groups()
            found[name] = {name}.union(*(found.get(other, set()) for other in re.findall(r"%([\w.-]+)", rest)))
    return found
