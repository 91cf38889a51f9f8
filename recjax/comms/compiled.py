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
    "clip",
    "sparse_update",
    "dense_update",
)
KINDS = ("all-to-all", "ragged-all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute",
         "collective-broadcast")  # fmt: skip

# `%name = RESULT kind(OPERANDS), ...`; asynchronous ones end in -start (counted) and -done (not)
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%(\S+) = (\([^%\"]*\)|\S+) ({'|'.join(KINDS)})(-start)?\((.*)$")
_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}"  # every device by number; or empty, for all
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # [groups,size]<=[dims], perhaps transposed
    r"|mesh\[[^{]*\{[^}]*\})"  # mesh['axis'=size,...] {'axis',...}, perhaps with device_ids=(...) between
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")


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
        if start and kind != "all-reduce" and result.startswith("("):
            result = _elements(result)[1]  # (operands, results, context...); of an all-reduce it is the results alone
        shapes = tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _SHAPE.findall(result))
        total = sum(_bytes(dtype, dims) for dtype, dims in shapes)
        scope = re.search(r'op_name="([^"]*)"', rest)
        groups = _GROUPS.search(rest)
        text = groups.group(1) if groups else ""
        found.append(
            Collective(name, kind, phase_of(scope.group(1) if scope else ""), total, shapes, text, _size(text))
        )
    return found


def _elements(text: str) -> list[str]:
    """The elements of a tuple type, which may be tuples themselves."""
    depth, elements = 0, [""]
    for character in text[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _bytes(dtype: str, dims: tuple[int, ...]) -> int:
    digits = re.search(r"\d+", dtype)  # the bits of one item: f32, bf16, s4, f8e4m3fn
    return -(-math.prod(dims) * (int(digits.group()) if digits else 8) // 8)


def phase_of(scope: str) -> str:
    """The innermost of PHASES in an instruction's scope (its op_name), "" if none."""
    around = scope.rpartition("/")[0]  # without the operation itself, which may bear the name of a phase
    words = re.split(r"[/()]", around)
    return next((w for w in reversed(words) if w in PHASES), "")


def _size(groups: str) -> int:
    """Devices per group, from any of the three ways in which XLA writes them."""
    if groups.startswith("{{"):
        return groups[2:].split("}")[0].count(",") + 1
    if groups.startswith("["):
        return int(groups[1:].split("]")[0].split(",")[1])
    if groups.startswith("mesh"):
        mesh, axes = groups.split("{")
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        # 'axis', or 'axis':(m)n for a part of it of size n
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes))
    return 0
