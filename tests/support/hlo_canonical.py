"""Optimised HLO as lines that do not depend on names, so that equal programs have equal lines.

Neither names nor numbers of instructions, computations and channels count, nor metadata, nor the order in which
instructions stand: all is numbered in a walk from the outputs. Parameters and outputs of the program are known by their
path in the arguments and results, not by their position.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

Renamed = Sequence[tuple[str, str]]  # (regular expression, what takes its place) in paths


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # what stands in the brackets and names no operand: a constant's value, a parameter's number
    attributes: str
    path: str  # of a parameter of the program: where it stands in the arguments


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, the root of each in the last place."""

    header: str
    entry: str
    computations: dict[str, list[Instruction]]


def digest(hlo: str, outputs: Sequence[str], renamed: Renamed = ()) -> str:
    """Returns the sha256 of `canonical`."""
    return hashlib.sha256("\n".join(canonical(hlo, outputs, renamed)).encode()).hexdigest()


def canonical(hlo: str, outputs: Sequence[str], renamed: Renamed = ()) -> list[str]:
    """Returns the lines.

    Args:
      hlo: text of the optimised program.
      outputs: path of each result, in order.
      renamed: for paths of parameters and results.
    """
    module = parse(hlo)

    def now(path: str) -> str:
        for old, new in renamed:
            path = re.sub(old, new, path)
        return path

    entry = module.computations[module.entry]
    root = entry[-1]
    results = root.operands if root.opcode == "tuple" else (root.name,)
    if len(results) != len(outputs):
        raise ValueError(f"the program has {len(results)} results, but {len(outputs)} paths are given")
    paths = [now(path) for path in outputs]
    order = sorted(range(len(paths)), key=lambda k: (paths[k], k))
    walk = _Walk(module, now)
    body, numbers = walk.computation(
        [i for i in entry if i is not root or root.opcode != "tuple"], [results[k] for k in order], program=True
    )
    lines = [*walk.lines, "program {", *body, "}", *(f"output {paths[k]} = {numbers[results[k]]}" for k in order)]
    inputs = {int(i.literal): now(i.path) for i in entry if i.opcode == "parameter"}
    alias = re.findall(r"\{(\d*)\}: \((\d+), \{\}, ([\w-]+)\)", _attribute(module.header, "input_output_alias"))
    lines += sorted(f"{paths[int(to or 0)]} takes the place of {inputs[int(of)]}, {how}" for to, of, how in alias)
    return lines + [f"{name}={_attribute(module.header, name)}" for name in ("num_partitions", "replica_count")]


class _Walk:
    """Numbers what it reaches, in that order."""

    def __init__(self, module: Module, now: Callable[[str], str]) -> None:
        self.module, self.now = module, now
        self.lines: list[str] = []  # of the computations that are called
        self.computations: dict[str, str] = {}
        self.channels: dict[str, str] = {}

    def computation(
        self, instructions: list[Instruction], roots: Sequence[str], program: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """The lines of one computation, and the number of each of its instructions."""
        by_name = {i.name: i for i in instructions}
        numbers: dict[str, str] = {}
        lines = []
        # What no root needs comes last: unused parameters by their paths or numbers, effects in the order of the text.
        unused = sorted(
            (i for i in instructions if i.opcode == "parameter"), key=lambda i: (self.now(i.path), i.literal)
        )
        for start in (*roots, *(i.name for i in unused), *by_name):
            for name in _after_its_operands(start, by_name, numbers):
                i = by_name[name]
                literal = i.literal
                if program and i.opcode == "parameter":
                    literal = self.now(i.path)
                operands = ", ".join(numbers[o] for o in i.operands)
                attributes = self.attributes(i.attributes, numbers)
                numbers[name] = f"%{len(numbers)}"
                lines.append(f"  {numbers[name]} = {i.shape} {i.opcode}({operands}{literal}){attributes}")
        return lines, numbers

    def attributes(self, text: str, numbers: dict[str, str]) -> str:
        """Attributes with the numbers of what they name; a computation is walked when it is first called."""

        def number(found: re.Match[str]) -> str:
            name = found[1]
            if name not in self.module.computations:
                return numbers.get(name, "%later")  # of control: it orders, but passes nothing on
            if name not in self.computations:
                called = self.module.computations[name]
                lines, _ = self.computation(called, [called[-1].name])
                self.computations[name] = f"computation_{len(self.computations)}"
                self.lines += [f"{self.computations[name]} {{", *lines, "}"]
            return self.computations[name]

        text = re.sub(r"%([\w.\-]+)", number, text)
        return re.sub(
            r"channel_id=(\d+)", lambda m: "channel_id=" + self.channels.setdefault(m[1], str(len(self.channels))), text
        )


def _after_its_operands(start: str, by_name: dict[str, Instruction], done: dict[str, str]) -> Iterator[str]:
    """All that `start` needs and that is not done yet, operands first; the caller notes in `done` what it is given."""
    stack = [(start, iter(by_name[start].operands))]
    open_ = {start}
    if start in done:
        return
    while stack:
        name, operands = stack[-1]
        following = next((o for o in operands if o not in done and o not in open_), None)
        if following is None:
            stack.pop()
            open_.discard(name)
            yield name
        else:
            open_.add(following)
            stack.append((following, iter(by_name[following].operands)))


# --- text ---


def parse(hlo: str) -> Module:
    """Reads HLO as XLA prints it; a line that it does not understand is an error."""
    lines = hlo.splitlines()
    computations: dict[str, list[Instruction]] = {}
    entry, root, current = "", "", None
    for line in lines[1:]:
        stripped = line.strip()
        if current is None:
            found = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", stripped)
            if found:  # else a table of files and lines, which stands before the first
                current, root = found[2], ""
                computations[current] = []
                entry = current if found[1] else entry
        elif stripped.startswith("}"):
            computations[current].sort(key=lambda i: i.name == root)
            current = None
        elif stripped:
            instruction, is_root = _instruction(stripped)
            computations[current].append(instruction)
            root = instruction.name if is_root else root
    if not entry:
        raise ValueError("this is no HLO: it has no ENTRY")
    return Module(lines[0], entry, computations)


def _instruction(line: str) -> tuple[Instruction, bool]:
    found = re.match(r"(ROOT )?%?([\w.\-]+) = (.*)$", re.sub(r"/\*index=\d+\*/", "", line))
    if not found:
        raise ValueError(f"this is no instruction of HLO: {line}")
    rest = found[3]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else 0
    space = rest.index(" ", end)
    shape, rest = rest[:space], rest[space + 1 :]
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inside, attributes = rest[:opening], rest[opening + 1 : closing], rest[closing + 1 :]
    metadata = _attribute(attributes, "metadata")
    path = re.search(r'op_name="((?:[^"\\]|\\.)*)"', metadata)
    attributes = attributes.replace(f", metadata={metadata}", "")
    operands = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(
        found[2],
        shape,
        opcode,
        operands,
        "" if operands else inside,
        attributes,
        path[1].replace("\\'", "'") if path and opcode == "parameter" else "",
    ), bool(found[1])


def _attribute(text: str, name: str) -> str:
    """The value of `name=`, with its brackets; nothing if it is not there."""
    found = re.search(rf"\b{name}=", text)
    if not found:
        return ""
    start = found.end()
    if text[start : start + 1] == "{":
        return text[start : _closing(text, start) + 1]
    value = re.match(r"[^,\s]*", text[start:])
    return value[0] if value else ""


def _closing(text: str, opening: int) -> int:
    """Where the bracket is closed that is opened there."""
    depth = 0
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]').finditer(text, opening):
        depth += (found[0] in "({[") - (found[0] in ")}]")
        if depth == 0:
            return found.start()
    raise ValueError(f"a bracket is not closed: {text[opening : opening + 80]}")
