"""The network: ranks in one or more dimensions, the links of each, and the way a message takes.

A topology is a product of dimensions, the innermost first: `fully_connected:8,switch:4` is 32 ranks, rank i + 8 j being
number i of node j. A dimension joins the ranks that differ in its coordinate alone, so here 4 fully connected nodes of
8, and 8 switches of 4 ports, one for each position in a node ("rails"). `ring:4,ring:4` is a torus, which may also be
written `torus:4x4`.

Every link is directed, so all are full duplex. A message crosses the dimensions from the first to the last, and is
stored and forwarded at each hop:

    ring             two links a rank, to the next and to the previous one; the shorter way, ties go to the next
    fully_connected  a link from every rank to every other one
    switch           an uplink and a downlink a rank: two hops
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from recjax.errors import ConfigError

KINDS = {"ring": 2, "fully_connected": None, "switch": 2}  # kind -> links a rank, None for one to every rank


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension of a topology.

    Attributes:
      kind: of KINDS.
      size: ranks that each of its networks joins.
      bandwidth_bytes_per_s: of every link, in each direction.
      latency_ns: of every link.
    """

    kind: str
    size: int
    bandwidth_bytes_per_s: float
    latency_ns: float

    @property
    def links_per_rank(self) -> int:
        """Number of links that begin (or, for a downlink, end) at a rank; if fully connected, its own is unused."""
        return KINDS[self.kind] or self.size


@dataclasses.dataclass(frozen=True)
class Topology:
    """A product of dimensions, the innermost first. Rank r has coordinate r // (sizes before d) % size in d."""

    dims: tuple[Dimension, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(dim.size for dim in self.dims)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def links(self) -> int:
        """Number of links, unused ones included."""
        return self.size * sum(dim.links_per_rank for dim in self.dims)

    def groups(self, dims: Sequence[int]) -> np.ndarray:
        """The ranks that differ in these dimensions alone.

        Returns:
          int [groups, members]; within a group the first of `dims` varies fastest.
        """
        ranks = np.arange(self.size).reshape(self.shape[::-1])
        axes = [len(self.dims) - 1 - d for d in dims]
        moved = np.moveaxis(ranks, axes[::-1], range(-len(axes), 0))
        return moved.reshape(-1, math.prod(self.shape[d] for d in dims))

    def per_link(self) -> tuple[np.ndarray, np.ndarray]:
        """Bandwidth in bytes/s and latency in ns, both float [links]."""
        counts = [self.size * dim.links_per_rank for dim in self.dims]
        bandwidth = np.repeat([dim.bandwidth_bytes_per_s for dim in self.dims], counts)
        return bandwidth, np.repeat([dim.latency_ns for dim in self.dims], counts)

    def routes(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The links from each source to its target, in order.

        Args:
          source: int [n], ranks.
          target: int [n], where each sends to.

        Returns:
          int [hops, n]; -1 where a message has no such hop. The others keep their order.
        """
        hops: list[np.ndarray] = []
        at, stride, base = source.copy(), 1, 0
        for dim in self.dims:
            here, there = at // stride % dim.size, target // stride % dim.size
            moves = here != there
            after = at + (there - here) * stride
            if dim.kind == "switch":
                hops += [np.where(moves, base + 2 * at, -1), np.where(moves, base + 2 * after + 1, -1)]
            elif dim.kind == "fully_connected":
                hops.append(np.where(moves, base + at * dim.size + there, -1))
            else:
                ahead = (there - here) % dim.size
                forward = ahead <= dim.size - ahead
                left = np.where(forward, ahead, dim.size - ahead)
                step = np.where(forward, 1, -1)
                for hop in range(int(left.max(initial=0))):
                    now = at + ((here + hop * step) % dim.size - here) * stride
                    hops.append(np.where(hop < left, base + 2 * now + ~forward, -1))
            at, stride, base = after, stride * dim.size, base + self.size * dim.links_per_rank
        return np.array(hops, int).reshape(len(hops), len(source))

    def link_name(self, link: int) -> str:
        """For people: where a link is, and what it joins."""
        d, rank, which = self._place(link)
        dim, stride = self.dims[d], math.prod(self.shape[:d])
        here = rank // stride % dim.size
        name = f"{dim.kind}:{dim.size}" + (f" (dimension {d})" if len(self.dims) > 1 else "")
        if dim.kind == "switch":
            return f"{name}, " + (f"switch -> rank {rank}" if which else f"rank {rank} -> switch")
        there = which if dim.kind == "fully_connected" else (here + (-1 if which else 1)) % dim.size
        return f"{name}, rank {rank} -> rank {rank + (there - here) * stride}"

    def link_kind(self, link: int) -> tuple[int, str]:
        """A link's dimension, and what it is there, for people: one text for all links alike."""
        d, _, which = self._place(link)
        kind, size = self.dims[d].kind, self.dims[d].size
        kinds = {"switch": ("uplinks", "downlinks"), "ring": ("to the next", "to the previous")}
        return d, f"{kind}:{size}" + (f", {kinds[kind][which]}" if kind in kinds else "")

    def switch(self, link: int) -> tuple[int, int] | None:
        """The switch that a link leaves, as a number, and how many output ports it has; None if it leaves a rank."""
        d, rank, which = self._place(link)
        if self.dims[d].kind != "switch" or not which:
            return None
        stride = math.prod(self.shape[:d])
        first = rank - rank // stride % self.dims[d].size * stride  # the switch's first rank
        return d * self.size + first, self.dims[d].size

    def _place(self, link: int) -> tuple[int, int, int]:
        """Dimension, rank, and number among that rank's links of the dimension."""
        for d, dim in enumerate(self.dims):
            if link < self.size * dim.links_per_rank:
                return d, *divmod(link, dim.links_per_rank)
            link -= self.size * dim.links_per_rank
        raise ValueError(f"no link {link}")


def read_topology(text: str, bandwidths: Sequence[float], latencies: Sequence[float]) -> Topology:
    """A topology from its text, such as "ring:8", "fully_connected:8,switch:4" or "torus:4x4".

    Args:
      text: kinds and sizes, the innermost first.
      bandwidths: bytes/s, one for all dimensions or one for each.
      latencies: ns, likewise.

    Raises:
      ConfigError: an unknown kind, a size below 1, or as many bandwidths as nobody can assign.
    """
    parts: list[tuple[str, int]] = []
    for word in text.split(","):
        kind, colon, sizes = word.strip().partition(":")
        if kind == "torus":
            parts += [("ring", _size(size, text)) for size in sizes.split("x")]
        elif kind in KINDS and colon:
            parts.append((kind, _size(sizes, text)))
        else:
            raise ConfigError(
                f"--topology {text}: {word!r} is no dimension. Write KIND:SIZE with a kind of {', '.join(KINDS)} (or "
                "torus:4x4x2 for rings), several with commas, the innermost first: fully_connected:8,switch:4."
            )

    def spread(name: str, values: Sequence[float]) -> list[float]:
        if len(values) not in (1, len(parts)):
            raise ConfigError(
                f"--{name} has {len(values)} values for the {len(parts)} dimension(s) of --topology {text}. "
                "Give one for all, or one for each dimension with commas between."
            )
        return list(values) * (len(parts) if len(values) == 1 else 1)

    rates, times = spread("bandwidth", bandwidths), spread("latency", latencies)
    return Topology(tuple(Dimension(*part, b, a) for part, b, a in zip(parts, rates, times, strict=True)))


def _size(text: str, whole: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"--topology {whole}: {text!r} is no number of ranks. Write for example switch:8.")
    return int(text)
