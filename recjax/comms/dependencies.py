"""Dependencies between the collectives of a compiled program, read from its text."""

from __future__ import annotations

import re

from recjax.comms.compiled import collectives

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)$")


def dependencies(hlo: str) -> dict[str, tuple[str, ...]]:
    """For each collective of a program those that it waits for, without those that follow from others.

    A collective within a loop or a called computation is taken for the operation that calls it.

    Args:
      hlo: text of an optimised program, as for `recjax.comms.compiled.collectives`.

    Returns:
      Name -> names, in the order of the text.
    """
    names = {c.name for c in collectives(hlo)}
    inside: dict[str, list[str]] = {}  # computation -> its collectives
    refers: dict[str, list[str]] = {}  # instruction -> what its line names
    members: list[str] = []
    entry: list[str] = []
    for line in hlo.splitlines():
        if start := _COMPUTATION.match(line):
            inside[start.group(2)] = members = []
            if start.group(1):
                entry = members
        elif match := _INSTRUCTION.match(line):
            name, rest = match.groups()
            members.append(name)
            refers[name] = re.findall(r"%([\w.-]+)", rest.partition("metadata=")[0])

    def called(name: str, seen: frozenset[str] = frozenset()) -> list[str]:
        """Collectives within what an instruction calls."""
        own = [name] if name in names else []
        for other in refers.get(name, ()):
            if other in inside and other not in seen:
                own += [c for member in inside[other] for c in called(member, seen | {other})]
        return own

    order = {c.name: place for place, c in enumerate(collectives(hlo))}
    reach: dict[str, frozenset[str]] = {}  # instruction -> all collectives that are done once its result is there
    found: dict[str, tuple[str, ...]] = {}
    for name in entry:  # in the text an instruction comes after its operands
        waits = frozenset(c for other in refers[name] for c in reach.get(other, ()))
        own = frozenset(called(name))
        for collective in own:
            implied = frozenset(c for other in waits for c in reach[other] if c != other)
            found[collective] = tuple(sorted(waits - implied, key=order.__getitem__))
            reach[collective] = waits | {collective}
        reach[name] = waits | own
    return found
