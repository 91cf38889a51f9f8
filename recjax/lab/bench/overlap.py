"""Operations that are scheduled beside each collective of a compiled step.

An accelerator's compiler starts a collective, lets other operations run, and waits for it later; its program's text
has both ends in the order in which they are issued. What lies between them overlaps with the collective. (XLA's CPU
backend runs what is ready on threads as they come free, in no order that the text would tell: see a profile.)
"""

from __future__ import annotations

import collections
import re
from typing import Any

from recjax.lab.bench.breakdown import part_of, scopes
from recjax.planning.compiled_collectives import KINDS, TRITON_COLLECTIVE, phase_of
from recjax.utils.hlo import bodies

_OPERATION = re.compile(r"^(?:\([^%\"]*\)|\S+) ([\w-]+)\((.*)$")
_COLLECTIVE = re.compile(rf"^({'|'.join(KINDS)})(-start|-done)?$")
# On a TPU a collective may be one with the products that run beside it: a fusion begins it, others carry it on.
_FUSED = re.compile(r"^async-collective(-start|-done)([.\d]*)$")
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
_ALLOCATION = 'custom_call_target="AllocateBuffer"'


def flights(hlo: str) -> list[dict[str, Any]]:
    """The collectives of a compiled step in the order in which they start.

    Args:
      hlo: text of a scheduled program.

    Returns:
      For each: "name", "kind", "phase", "asynchronous", and "beside": part of the step (see `breakdown`) ->
      number of operations issued between its start and its end, without those that only name or begin something.
    """
    scope_of = scopes(hlo)
    computations = _computations(hlo)
    fused = {name for _, _, rest in sum(computations.values(), []) for name in re.findall(r"calls=%([\w.-]+)", rest)}
    found: list[dict[str, Any]] = []
    for operations in (lines for name, lines in computations.items() if name not in fused):
        open_now: dict[str, collections.Counter[str]] = {}
        for name, opcode, rest in operations:
            kind, end, key = _collective(name, opcode, rest, computations)
            if end == "-done":
                open_now.pop(key, None)
                continue
            idle = opcode in _NO_WORK or opcode.endswith(("-start", "-done")) or end or _ALLOCATION in rest
            for beside in () if idle else open_now.values():
                beside[part_of(scope_of.get(name, ""))] += 1
            if kind:
                phase, beside = phase_of(scope_of.get(name, "")), collections.Counter()
                flight = {"name": name, "kind": kind, "phase": phase, "asynchronous": end == "-start", "beside": beside}
                found.append(flight)
                if end:
                    open_now[key] = beside
    return [{**flight, "beside": dict(flight["beside"])} for flight in found]


def _computations(hlo: str) -> dict[str, list[tuple[str, str, str]]]:
    """Computation -> its operations: name, opcode, and the rest of the line."""
    return {
        computation: [(line.name, m.group(1), m.group(2)) for line in lines if (m := _OPERATION.match(line.rest))]
        for computation, lines in bodies(hlo)[0].items()
    }


def _collective(
    name: str, opcode: str, rest: str, computations: dict[str, list[tuple[str, str, str]]]
) -> tuple[str, str | None, str]:
    """Kind of a collective ("" if it is none), which end of it this is (None: all of it), and what both ends share."""
    called, operand = (re.search(pattern, rest) for pattern in (r"calls=%([\w.-]+)", r"%([\w.-]+)"))
    inside = computations.get(called.group(1), []) if called else []
    kinds = [found.group(1) for _, opcode, _ in inside if (found := _COLLECTIVE.match(opcode))]
    if match := _FUSED.match(name):
        return next(iter(kinds), "collective"), match.group(1), f"fused{match.group(2)}"
    if opcode == "fusion-done" and operand:
        return "", "-done", operand.group(1)
    if opcode.startswith("fusion") and TRITON_COLLECTIVE in rest:
        return next(iter(kinds), "collective"), opcode.removeprefix("fusion") or None, name
    if match := _COLLECTIVE.match(opcode):
        return match.group(1), match.group(2), operand.group(1) if match.group(2) == "-done" and operand else name
    return "", None, ""
