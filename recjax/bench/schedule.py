"""What is scheduled beside each collective of a compiled step.

An accelerator's compiler starts a collective, lets other operations run, and waits for it later; its program's text
has both ends in the order in which they are issued. What lies between them overlaps with the collective. (XLA's CPU
backend runs what is ready on threads as they come free, in no order that the text would tell: see a profile.)
"""

from __future__ import annotations

import collections
import re
from typing import Any

from recjax.bench.parts import part_of, scopes
from recjax.comms.compiled import KINDS, phase_of

_OPERATION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (?:\([^%\"]*\)|\S+) ([\w-]+)\((.*)$")
_COLLECTIVE = re.compile(rf"^({'|'.join(KINDS)})(-start|-done)?$")
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
_ALLOCATION = 'custom_call_target="AllocateBuffer"'


def flights(hlo: str) -> list[dict[str, Any]]:
    """The collectives of a compiled step in the order in which they start.

    Args:
      hlo: text of a scheduled program.

    Returns:
      For each: "name", "kind", "phase", "asynchronous", and "beside": part of the step (`recjax.bench.parts`) ->
      number of operations issued between its start and its end, without those that only name or begin something.
    """
    scope_of = scopes(hlo)
    found: list[dict[str, Any]] = []
    open_now: dict[str, collections.Counter[str]] = {}
    for line in hlo.splitlines():
        match = _OPERATION.match(line)
        if not match:
            continue
        name, opcode, rest = match.groups()
        collective = _COLLECTIVE.match(opcode)
        kind, end = collective.groups() if collective else ("", None)
        if end == "-done":
            started = re.search(r"%([\w.-]+)", rest)
            open_now.pop(started.group(1) if started else "", None)
            continue
        if (
            end is None
            and opcode not in _NO_WORK
            and not opcode.endswith(("-start", "-done"))
            and _ALLOCATION not in rest
        ):
            for beside in open_now.values():
                beside[part_of(scope_of.get(name, ""))] += 1
        if kind:
            beside = collections.Counter()
            phase = phase_of(scope_of.get(name, ""))
            found.append(
                {"name": name, "kind": kind, "phase": phase, "asynchronous": end == "-start", "beside": beside}
            )
            if end == "-start":
                open_now[name] = beside
    return [{**flight, "beside": dict(flight["beside"])} for flight in found]
