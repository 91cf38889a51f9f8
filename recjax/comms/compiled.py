"""Reads the collectives out of a compiled program's text (optimised HLO)."""

from __future__ import annotations

import dataclasses
import math
import re

# jax.named_scope names that mark where in the step an instruction comes from
PHASES = (
    "route",
    "id_exchange",
    "gather",
    "row_exchange",
    "pool",
    "dense_forward",
    "dense_backward",
    "dense_grads",
    "grad_exchange",
    "finite_check",
    "sparse_update",
    "dense_update",
)
KINDS = ("all-to-all", "ragged-all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute",
         "collective-broadcast")  # fmt: skip
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4,
              "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}  # fmt: skip

# `%name = RESULT kind(OPERANDS), ...`; asynchronous ones end in -start (counted) and -done (not)
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%(\S+) = (.*?) ({'|'.join(KINDS)})(-start)?\((.*)$")
_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}"  # every device by number; or empty, for all
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # [groups,size]<=[dims], perhaps transposed
    r"|mesh\[.*?\] ?\{.*?\})"  # mesh['axis'=size,...] {'axis',...}
)
_SHAPE = re.compile(r"\b([a-z]+\d*|pred)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      name: of the instruction.
      kind: "all-to-all", "all-reduce", ...
      phase: the innermost of PHASES in its scope, "" if none.
      result_bytes: bytes of its result on one device (padding included).
      shapes: (dtype, dimensions) of every array in its result.
      groups: the text that says which devices take part.
      group_size: devices in each group; 0 if the text leaves it open.
    """

    name: str
    kind: str
    phase: str
    result_bytes: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    groups: str
    group_size: int


def collectives(hlo: str | None) -> list[Collective]:
    """All collectives of a compiled program, in the order of its text.

    Args:
      hlo: `jax.jit(f).lower(...).compile().as_text()`.
    """
    found = []
    for line in (hlo or "").splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, result, kind, start, rest = match.groups()
        if start and result.startswith("(("):  # (operands, results, ...): the results are the second group
            result = result.split("), (", 1)[-1]
        shapes = tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _SHAPE.findall(result))
        if start and not result.startswith("(") or (start and len(shapes) == 2 and kind != "all-reduce"):
            shapes = shapes[-1:]  # (operand, result)
        total = sum(ITEM_BYTES[dtype] * math.prod(dims) for dtype, dims in shapes)
        scope = re.search(r'op_name="([^"]*)"', rest)
        groups = re.search(
            r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\] ?\{.*?\})", rest
        )
        text = groups.group(1) if groups else ""
        found.append(Collective(name, kind, _phase(scope.group(1) if scope else ""), total, shapes, text, _size(text)))
    return found


def _phase(scope: str) -> str:
    words = re.split(r"[/()]", scope)
    return next((w for w in reversed(words) if w in PHASES), "")


def _size(groups: str) -> int:
    """Devices per group, from any of the three ways in which XLA writes them."""
    if groups.startswith("{{"):
        return groups[2:].split("}")[0].count(",") + 1
    if groups.startswith("["):
        return int(groups[1:].split("]")[0].split(",")[1])
    if groups.startswith("mesh"):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", groups)}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", groups.split("]", 1)[1]))
    return 0
