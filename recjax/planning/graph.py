"""The graph of a compiled training step: its kernels and collectives, what each has to do, and what waits for what.

One program runs on every device, so the graph is that of one device, and a collective's work that of one rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from recjax.planning.compiled_collectives import KINDS, Collective, collectives, members, phase_of
from recjax.planning.machine import COLLECTIVES
from recjax.planning.reuse import Use, uses
from recjax.planning.work import FREE, Work, works
from recjax.utils.hlo import Computation, Instruction, Program, read_program

_DONE = re.compile(r"-done(\.\d+)?$")
_ONE_KERNEL = 'xla_cpu_small_call="true"'  # a call of loops over few numbers, which XLA for CPUs compiles whole


@dataclasses.dataclass(frozen=True)
class Node:
    """A kernel, a collective, or a loop of them.

    Attributes:
      name: of the instruction.
      opcode: of the instruction.
      part: of the step, for people.
      kind: "kernel", "collective", "loop", or "wait": the end of a collective that was begun before.
      works: what it does, one after the other.
      waits_for: places of nodes that it takes something from.
      trips: how often a loop runs.
      body: of a loop or call.
      launches: kernels that it consists of; more than one where a graph is sketched and not read.
      uses: memory that a kernel touches, and how far back it was touched before; () where that is not known.
    """

    name: str
    opcode: str
    part: str
    kind: Literal["kernel", "collective", "loop", "wait"]
    works: tuple[Work, ...]
    waits_for: tuple[int, ...]
    trips: int = 1
    body: Graph | None = None
    launches: int = 1
    uses: tuple[Use, ...] = ()


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes, each after those that it waits for.

    Attributes:
      nodes: in the order of the program.
      unknown: names of loops whose number of turns, and of calls whose work, the text does not tell: they count as one
        turn and as one pass over what they are given.
    """

    nodes: tuple[Node, ...]
    unknown: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations of all kernels."""
        return sum(n.trips * ((n.body.flops if n.body else 0.0) + sum(w.flops for w in n.works)) for n in self.nodes)

    @property
    def launches(self) -> int:
        """Kernels and collectives that are started."""
        return sum(n.trips * (n.body.launches if n.body else n.launches) for n in self.nodes if n.kind != "wait")


def read_graph(text: str, devices: int, parts: Mapping[str, str] | None = None, hosts: int = 1) -> Graph:
    """The graph of a program.

    Of a conditional the branch that does least counts: those of a step look for what is wrong once something is.

    Args:
      text: of the optimised program.
      devices: how many it runs on.
      parts: instruction -> the part of the step that it belongs to; None takes the phases of the instructions' scopes.
      hosts: that these stand in, equally many in each; 1 leaves that open.

    Raises:
      ValueError: the text is no program.
    """
    program = read_program(text)
    reader = _Reader(program, {c.name: c for c in collectives(text)}, devices, parts, hosts)
    return reader.graph(program.entry)


class _Reader:
    def __init__(
        self,
        program: Program,
        found: Mapping[str, Collective],
        devices: int,
        parts: Mapping[str, str] | None,
        hosts: int,
    ) -> None:
        self._program, self._collectives, self._devices, self._parts = program, found, devices, parts
        self._hosts = hosts
        self._unknown: list[str] = []
        self._uses = uses(program)

    def graph(self, computation: Computation) -> Graph:
        nodes: list[Node] = []
        behind: dict[str, frozenset[int]] = {}  # instruction -> nodes whose ends its result waits for
        before = len(self._unknown)
        for instruction in computation.instructions.values():
            needed: frozenset[int] = frozenset().union(*(behind.get(name, ()) for name in instruction.operands))
            node = self._node(instruction, computation, tuple(sorted(needed)))
            if node is None:
                behind[instruction.name] = needed
            else:
                behind[instruction.name] = frozenset((len(nodes),))
                nodes.append(node)
        return Graph(tuple(nodes), tuple(self._unknown[before:]))

    def _node(self, instruction: Instruction, inside: Computation, needed: tuple[int, ...]) -> Node | None:
        name, opcode = instruction.name, instruction.opcode
        scope = phase_of(instruction.scope)
        part = (self._parts or {}).get(name, "") or scope or "other"
        if (collective := self._collective(instruction)) is not None:
            return Node(name, opcode, part, "collective", (self._exchange(collective),), needed)
        if _DONE.search(opcode) or (opcode == "fusion" and _DONE.search(name)):
            return Node(name, opcode, part, "wait", (), needed)
        if opcode == "while":
            trips = instruction.trips
            if trips is None:
                self._unknown.append(name)
            body = self.graph(self._program.computations[instruction.called("body")])
            return Node(name, opcode, part, "loop", (), needed, trips or 1, body)
        if opcode in ("call", "async-start"):
            called = instruction.called("to_apply") or instruction.called("calls")
            body = self.graph(self._program.computations[called])
            if _ONE_KERNEL in instruction.attributes:
                moved = max(1.0, _bytes(body))
                work = Work("elementwise", {"bytes": moved}, body.flops, moved)
                return Node(name, opcode, part, "kernel", (work,), needed)
            return Node(name, opcode, part, "loop", (), needed, 1, body)
        if opcode == "conditional":
            branches = [self.graph(self._program.computations[branch]) for branch in instruction.branches()]
            least = min(branches, key=lambda graph: (_bytes(graph), len(graph.nodes)))
            return Node(name, opcode, part, "loop", (), needed, 1, least)
        if opcode in FREE or 'custom_call_target="AllocateBuffer"' in instruction.attributes:
            return None
        found = works(instruction, inside, self._program)
        if opcode == "custom-call" and not found[0].flops:
            self._unknown.append(name)
        return Node(name, opcode, part, "kernel", found, needed, uses=self._uses.get(name, ()))

    def _collective(self, instruction: Instruction) -> Collective | None:
        """The collective that an instruction is, or that it is a fusion of."""
        if instruction.name in self._collectives:
            return self._collectives[instruction.name]
        called = instruction.called("calls") if instruction.opcode == "fusion" else ""
        if called and not _DONE.search(instruction.name):
            for inner in self._program.computations[called].instructions:
                if inner in self._collectives:
                    return self._collectives[inner]
        return None

    def _exchange(self, collective: Collective) -> Work:
        """Part of a rank in a collective; bytes as nccl-tests count them: the larger one of its buffers."""
        kind = collective.kind.removeprefix("ragged-").replace("-", "_")
        if kind not in COLLECTIVES:
            kind = "all_to_all"  # a permutation or broadcast: what it sends takes as long
        ranks = collective.group_size or self._devices
        size = collective.result_bytes * (ranks if kind == "reduce_scatter" else 1)
        if ranks == 1:  # of one device: a copy of what it is given
            return Work("copy", {"bytes": 2.0 * max(size, 1)}, 0.0, 2.0 * size)
        sizes = {"bytes": float(max(size, 1)), "devices": float(ranks)}
        if self._hosts > 1:
            group = members(collective.groups, self._devices)[0]
            sizes["hosts"] = float(len({device * self._hosts // self._devices for device in group}))
        return Work(kind, sizes, 0.0, float(size))


def _bytes(graph: Graph) -> float:
    return sum(n.trips * ((_bytes(n.body) if n.body else 0.0) + sum(w.bytes for w in n.works)) for n in graph.nodes)


assert set(KINDS) >= {kind.replace("_", "-") for kind in COLLECTIVES}
