"""Dependencies among the kernels and collectives of a compiled step."""

from __future__ import annotations

from recjax.planning.graph import Graph


def fetching(graph: Graph) -> list[frozenset[int]]:
    """For each all-to-all of rows the kernels that gather what it sends, by their places in the graph."""
    waits: list[frozenset[int]] = []
    found = []
    for number, node in enumerate(graph.nodes):
        own = frozenset[int]().union(*(waits[n] for n in node.waits_for))
        gathers = node.opcode == "custom-call" or any(work.kernel.startswith("gather") for work in node.works)
        if node.kind == "kernel" and node.part in ("gather", "row_exchange") and gathers:
            own |= {number}
        if node.kind == "collective" and node.part == "row_exchange" and node.opcode.startswith("all-to-all"):
            found.append(own)
        waits.append(own)
    return found
