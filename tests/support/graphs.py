"""What waits for what in a compiled step."""

from __future__ import annotations

from recjax.planning.graph import Graph


def behind(graph: Graph, part: str, kernels: str) -> list[frozenset[int]]:
    """For each all-to-all of a part of the step the kernels of another part that it waits for, by their places."""
    waits: list[frozenset[int]] = []
    found = []
    for number, node in enumerate(graph.nodes):
        own = frozenset[int]().union(*(waits[n] for n in node.waits_for))
        if node.kind == "kernel" and node.part == kernels:
            own |= {number}
        if node.kind == "collective" and node.part == part and node.opcode.startswith("all-to-all"):
            found.append(own)
        waits.append(own)
    return found
