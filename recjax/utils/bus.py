"""Bus bandwidth: what a collective's time says of the links, whatever its kind (NVIDIA's nccl-tests, PERFORMANCE.md).

The algorithm bandwidth is the message's size over the time, the size being the larger one of a rank's buffers. Times a
factor it is the rate at which each rank's link was used, if the algorithm sends as little as it can.
"""

from __future__ import annotations


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that cross each rank's link for each byte of a message of this kind; 0 for one rank, and for a barrier."""
    if ranks < 2 or kind == "barrier":
        return 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_to_all", "all_gather", "reduce_scatter", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0
