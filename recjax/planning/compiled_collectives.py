"""The collectives of a compiled program, read from its text (optimised HLO), and the bytes that they send."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.routed import Routing
from recjax.embedding.sharded import exchanges_of
from recjax.utils.hlo import Array
from recjax.utils.phases import PHASES

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

# `%name = RESULT kind(OPERANDS), ...`; asynchronous ones end in -start (counted) and -done (not)
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%(\S+) = (\([^%\"]*\)|\S+) ({'|'.join(KINDS)})(-start)?\((.*)$")
TRITON_COLLECTIVE = "__triton_collective"  # the back end of a fusion that is a collective, on a GPU
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_FUSION = re.compile(r"^\s*(?:ROOT )?%(\S+) = .*? (fusion|fusion-start)\(.*\bcalls=%([\w.-]+)")
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
      name: of the instruction; of a collective within a fusion that of the fusion, as a profile has it.
      kind: "all-to-all", "all-reduce", ...
      phase: the innermost of PHASES in its scope, "" if none.
      result_bytes: bytes of its result on one device (padding included).
      shapes: (dtype, dimensions) of every array in its result.
      groups: the text that says which devices take part.
      group_size: devices in each group; 0 if the text leaves it open.
      phases: of its arrays, the one with the most bytes first. They are several where the compiler has joined
        collectives, such as the gradients of small replicated tables with dense ones; `phase` is one of them.
    """

    name: str
    kind: str
    phase: str
    result_bytes: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    groups: str
    group_size: int
    phases: tuple[str, ...] = ()


def collectives(hlo: str | None) -> list[Collective]:
    """All collectives of a compiled program, in the order of its text.

    XLA may make a collective a fusion: small all-reduces among GPUs with links between them, and on TPUs those beside
    which products run, of which a first fusion begins what others carry on and end. Each is one collective.

    Args:
      hlo: `jax.jit(f).lower(...).compile().as_text()`.
    """
    lines = (hlo or "").splitlines()
    fusions = _fusions(lines)
    inside = ""
    found: list[tuple[int, Collective]] = []
    for number, line in enumerate(lines):
        if begun := _COMPUTATION.match(line):
            inside = begun.group(1)
            continue
        collective = _collective(line)
        if collective is not None and inside in fusions:
            found += [(at, dataclasses.replace(collective, name=name)) for at, name in fusions[inside]]
        elif collective is not None:
            found.append((number, collective))
    return [collective for _, collective in sorted(found, key=lambda one: one[0])]


def _fusions(lines: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Computation within a fusion -> line and name of those that begin what it does; none if they carry it on."""
    found: dict[str, list[tuple[int, str, bool]]] = {}
    for number, line in enumerate(lines):
        if match := _FUSION.match(line):
            name, opcode, called = match.groups()
            begins = opcode == "fusion-start" or name.startswith("async-collective-start")
            found.setdefault(called, []).append((number, name, begins or TRITON_COLLECTIVE in line))
    parts = any(name.startswith("async-collective-start") for of in found.values() for _, name, _ in of)
    return {called: [(at, name) for at, name, begins in of if begins or not parts] for called, of in found.items()}


def _collective(line: str) -> Collective | None:
    """The collective of a line, None if it has none."""
    if match := _INSTRUCTION.match(line):
        name, result, kind, start, rest = match.groups()
        if start and result.startswith("("):
            elements = _elements(result)
            if kind != "all-reduce" or elements[0].startswith("("):  # which may also give its results alone
                result = elements[1]  # of (operands, results, context...)
        shapes = tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _SHAPE.findall(result))
        sizes = [Array(*shape).bytes for shape in shapes]
        scope = re.search(r'op_name="([^"]*)"', rest)
        groups = _GROUPS.search(rest)
        text = groups.group(1) if groups else ""
        return Collective(
            name,
            kind,
            phase_of(scope.group(1) if scope else ""),
            sum(sizes),
            shapes,
            text,
            len(members(text, 0)[0]),
            _phases(scope.group(1) if scope else "", sizes),
        )
    return None


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


def phase_of(scope: str) -> str:
    """The innermost of PHASES in an instruction's scope (its op_name), "" if none."""
    around = scope.rpartition("/")[0]  # without the operation itself, which may bear the name of a phase
    words = re.split(r"[/()]", around)
    return next((w for w in reversed(words) if w in PHASES), "")


def _phases(scope: str, sizes: Sequence[int]) -> tuple[str, ...]:
    """The phases of arrays of these sizes; of a joined collective the scope is PREFIX/(FIRST:SECOND:...)."""
    each = [phase_of(part) for part in scope.split(":")]
    total = dict.fromkeys(each, 0)
    for phase, size in zip(each, sizes, strict=False):  # without a scope for each array they stay in order
        total[phase] += size if len(each) == len(sizes) else 0
    return tuple(sorted((phase for phase in total if phase), key=lambda phase: -total[phase])) or ("",)


def members(groups: str, devices: int) -> list[list[int]]:
    """The devices of each group, by their numbers in the mesh, from any of the three ways in which XLA writes them.

    Args:
      groups: `Collective.groups`.
      devices: how many the program runs on; they are one group where the text leaves it open.
    """
    if groups.startswith("{{"):
        return [[int(n) for n in group.split(",")] for group in groups[2:-2].split("},{")]
    if groups.startswith("["):
        shape, _, order = groups.partition("<=")
        return np.reshape(_iota(order), _numbers(shape)).tolist()
    if groups.startswith("mesh"):
        return _mesh_members(groups)
    return [list(range(devices))]


def _mesh_members(groups: str) -> list[list[int]]:
    """Members of mesh['axis'=size,...], device_ids=(...) {'axis',...}."""
    mesh, _, taken = groups.partition("{")
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    order = re.search(r"device_ids=\((.*)\)", mesh)
    if order is None:
        ids = list(range(math.prod(sizes.values())))
    else:
        ids = _iota(order.group(1)) if order.group(1).startswith("[") else _numbers(order.group(1))
    # Every axis is cut in three, for 'axis':(m)n takes the part of size n that has m parts before it.
    cut = {axis: (1, size, 1) for axis, size in sizes.items()}
    names = []
    for axis, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", taken):
        names.append(axis)
        if size:
            cut[axis] = int(before), int(size), sizes[axis] // int(before) // int(size)
    inner = [3 * list(sizes).index(axis) + 1 for axis in names]
    outer = [i for i in range(3 * len(sizes)) if i not in inner]
    shape = [n for axis in sizes for n in cut[axis]]
    found = np.reshape(ids, shape).transpose(outer + inner)
    return found.reshape(-1, math.prod(shape[i] for i in inner)).tolist()


def _iota(text: str) -> list[int]:
    """[dims], or [dims]T(permutation): the numbers from 0 in that shape, transposed and made flat."""
    dims, _, permutation = text.partition("T")
    found = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return [int(n) for n in (found.transpose(_numbers(permutation)) if permutation else found).ravel()]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


# What a ring sends, in units of (N - 1) / N of the result.
_RING = {"all-reduce": lambda size: 2, "reduce-scatter": lambda size: size}


def wire_bytes(
    hlo: str, bound: BoundPlan, routing: Routing, item_bytes: int, hosts: int | None = None, samples: int = 0
) -> list[dict[str, Any]]:
    """The collectives of a compiled step and the bytes that leave a device for another one, the mean over devices.

    Whether they cross hosts is read from the collectives' groups of devices.

    Args:
      hlo: text of the compiled step.
      bound: the bound plan.
      routing: of one batch, which tells what of an exchange is useful; counts of the first devices alone will do.
      item_bytes: size of a table's element, if that is not bfloat16.
      hosts: in which all devices stand; None: the bound plan's, which are those of one replica group.
      samples: b, of one device; exchanges of pooled vectors need it.

    Returns:
      For each phase, kind and number of devices of collectives, and "between" (what they connect: "devices" of one
      host, "hosts", one device of each, or "both"): "phase", "kind", "group_size", "between", "count",
      "padded_bytes" as compiled, "useful_bytes" (equal where nothing is padded), and "across_padded_bytes" and
      "across_useful_bytes", those that leave the host. Reductions count what a ring sends that goes round host by
      host: an all-reduce 2 (N - 1) / N of its result, a reduce-scatter N - 1 times its result, 1/N of what it reduces.
    """
    useful = useful_bytes(bound, routing, item_bytes, samples)
    hosts = hosts or bound.hosts
    per_host = bound.all_devices // hosts
    found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for collective in collectives(hlo):
        group = members(collective.groups, bound.all_devices)[0]  # all are alike
        size, spanned = len(group), 1 if hosts == 1 else len({n // per_host for n in group})
        between = "devices" if spanned == 1 else "hosts" if spanned == size else "both"
        away = (size - 1) / size * _RING.get(collective.kind, lambda size: 1)(size)
        phase = collective.phases[0] if collective.phases else collective.phase  # of a joined one that of most bytes
        key = phase, collective.kind, between, size
        new = {"phase": key[0], "kind": key[1], "group_size": size, "between": between, "count": 0}
        line = found.setdefault(key, new | {"padded_bytes": 0.0, "across_padded_bytes": 0.0})
        line["count"] += 1
        line["padded_bytes"] += collective.result_bytes * away
        if collective.kind in _RING:
            crossing = spanned / size if spanned > 1 else 0.0  # of the ring's links
        else:
            crossing = (size - size // spanned) / max(1, size - 1)  # of the other devices
        line["across_padded_bytes"] += collective.result_bytes * away * crossing
    for (phase, kind, between, _), line in found.items():
        least = useful.get((phase, kind, between))
        if least is None:
            line["useful_bytes"], line["across_useful_bytes"] = line["padded_bytes"], line["across_padded_bytes"]
        else:
            line["useful_bytes"], line["across_useful_bytes"] = least, least if line["between"] == "hosts" else 0.0
    return list(found.values())


def named(line: dict[str, Any]) -> str:
    """Name of a line of `wire_bytes`."""
    across = " across hosts" if line["between"] == "hosts" else ""
    return f"{line['phase'] or 'elsewhere'} ({line['kind']}{across})"


def useful_bytes(
    bound: BoundPlan, routing: Routing, item_bytes: int, samples: int
) -> dict[tuple[str, str, str], float]:
    """Useful bytes of the exchanges that leave a device, by (phase, kind, between): the mean over devices."""
    total: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for exchange in exchanges_of(bound):
        counts: Any = routing.groups.get(exchange.name) or routing.pooled.get(exchange.name)
        for event in exchange.events(collections.defaultdict(int), samples, item_bytes):
            if event.places is None or event.piece == 0:  # all pieces together
                whole = dataclasses.replace(event, places=None)
                sent_NxN = exchange.sent_bytes(whole, counts, samples, item_bytes)
                if sent_NxN is not None:
                    total[event.phase, event.kind, event.between(bound.devices // bound.hosts)] += _leaving(sent_NxN)
    return total


def _leaving(sent_NxN: np.ndarray) -> float:
    """Mean over devices, as far as they were counted, of the bytes that each sends to others or is sent by them."""
    return float(sent_NxN.sum() - np.trace(sent_NxN)) / min(sent_NxN.shape)
