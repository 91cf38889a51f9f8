"""Collective algorithms as steps of messages.

A schedule is a list of steps. In a step every rank sends its messages of that step, and goes on to the next one when it
has what the others send to it in this step. A rank that neither sends nor receives in a step passes it at once, so the
levels of a tree are steps like any other.

Sizes are shares of M, the bytes of the collective: all-reduce, broadcast, reduce: the tensor; all-to-all: what a rank
sends, its own part included; reduce-scatter: what a rank puts in; all-gather: what a rank has at the end (as in
nccl-tests). The root of a broadcast or reduce is rank 0 of its group. A `send_recv` is one message of M bytes from a
rank to another one, as a send and the receive of it; its sender leaves at once, whether or not the receiver is there.

The endpoint delay is charged for every message received, and once before the first message is sent; the trees, as in
ASTRA-sim, leave the latter out.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from recjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Send:
    """One message of every rank, or of some.

    Attributes:
      to: int [n], the receiver's place in the group; -1 for a rank that sends nothing.
      share: of M, in each message: a number, or float [n], one for each sender.
    """

    to: np.ndarray
    share: float | np.ndarray


Step = tuple[Send, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """An algorithm for n ranks.

    Attributes:
      steps: equal steps may be the same object.
      starts_with_delay: whether the first message waits for the endpoint delay.
      sender_waits: whether a sender, too, goes on only when its messages have arrived.
    """

    steps: tuple[Step, ...]
    starts_with_delay: bool = True
    sender_waits: bool = False


Algorithm = Callable[[Sequence[int]], Schedule | tuple[Schedule, ...]]  # from a shape


def _ring(steps: Callable[[int], int]) -> Algorithm:
    """Every rank sends a block to the next one, in so many steps of n ranks."""

    def made(shape: Sequence[int]) -> Schedule:
        n = math.prod(shape)
        step = (Send(np.roll(np.arange(n), -1), 1 / n),)
        return Schedule((step,) * steps(n) if n > 1 else ())

    return made


def _direct(shape: Sequence[int], times: int = 1) -> Schedule:
    """To every other rank at once: to the next first, then to the one after it, in every dimension by its own offset.

    So at any moment all ranks send to different ones.
    """
    n = math.prod(shape)
    ranks = np.arange(n)
    strides = np.cumprod([1, *shape[:-1]])
    sends = []
    for offset in range(1, n):
        to = sum(((ranks // s % size + offset // s) % size) * s for s, size in zip(strides, shape, strict=True))
        sends.append(Send(np.asarray(to), 1 / n))
    return Schedule((tuple(sends),) * times if n > 1 else ())


def _halving(shape: Sequence[int]) -> tuple[Step, ...]:
    """The halves between neighbours, the quarters between ranks two apart, and so on: large messages go short ways."""
    n = math.prod(shape)
    if n & (n - 1):
        raise ConfigError(
            f"halving_doubling pairs ranks and needs a power of two of them, not {n}. Take ring or direct."
        )
    return tuple((Send(np.arange(n) ^ (1 << i - 1), 2.0**-i),) for i in range(1, n.bit_length()))


def _halving_doubling(shape: Sequence[int]) -> Schedule:
    halving = _halving(shape)
    return Schedule(halving + halving[::-1])


def tree_parents(n: int) -> np.ndarray:
    """The first tree of the double binary tree (Sanders et al., 2009), over ranks 0..n-1.

    Rank 0 is the root and has one child. The others form a binary search tree: the number of trailing zeros of a rank
    is its height, so odd ranks are leaves. Where the parent would be n or more, the nearest ancestor below n
    takes its place.

    Returns:
      int [n]; -1 for the root.
    """
    parents = np.full(n, -1)
    for rank in range(1, n):
        low = rank & -rank
        middle = rank & ~low | low << 1  # of this rank and its sibling
        parents[rank] = middle if middle < n else rank & ~low
    return parents


def _tree_levels(parents: np.ndarray) -> tuple[list[Step], list[Step]]:
    """Steps of a tree from the leaves to the root, and back down."""
    n = len(parents)
    depth = np.zeros(n, int)
    for rank in range(n):
        at = rank
        while parents[at] >= 0:
            at, depth[rank] = parents[at], depth[rank] + 1
    deepest = int(depth.max(initial=0))
    up: list[Step] = [(Send(np.where(depth == level, parents, -1), 1.0),) for level in range(deepest, 0, -1)]
    children = [np.flatnonzero(parents == rank) for rank in range(n)]
    down: list[Step] = []
    for level in range(deepest):
        sends = []
        for which in range(max((len(c) for c in children), default=0)):
            to = [c[which] if d == level and len(c) > which else -1 for c, d in zip(children, depth, strict=True)]
            if max(to) >= 0:
                sends.append(Send(np.array(to), 1.0))
        down.append(tuple(sends))
    return up, down


def _tree(*ways: Sequence[Step]) -> Schedule:
    return Schedule(tuple(step for way in ways for step in way), starts_with_delay=False)


def _tree_broadcast(shape: Sequence[int]) -> Schedule:
    return _tree(_tree_levels(tree_parents(math.prod(shape)))[1])


def _tree_reduce(shape: Sequence[int]) -> Schedule:
    return _tree(_tree_levels(tree_parents(math.prod(shape)))[0])


def _one(n: int, sender: int, receiver: int) -> Send:
    """The whole tensor from one rank to another one."""
    return Send(np.where(np.arange(n) == sender, receiver, -1), 1.0)


def _chain_broadcast(shape: Sequence[int]) -> Schedule:
    """From rank 0 to the next one, and so on: with chunks a pipeline, as NCCL's ring is."""
    n = math.prod(shape)
    return Schedule(tuple((_one(n, rank, rank + 1),) for rank in range(n - 1)))


def _chain_reduce(shape: Sequence[int]) -> Schedule:
    n = math.prod(shape)
    return Schedule(tuple((_one(n, rank, rank - 1),) for rank in range(n - 1, 0, -1)))


def _direct_broadcast(shape: Sequence[int]) -> Schedule:
    n = math.prod(shape)
    return Schedule((tuple(_one(n, 0, rank) for rank in range(1, n)),) if n > 1 else ())


def _direct_reduce(shape: Sequence[int]) -> Schedule:
    n = math.prod(shape)
    return Schedule(((Send(np.where(np.arange(n) > 0, 0, -1), 1.0),),) if n > 1 else ())


def _first_to_last(shape: Sequence[int]) -> Schedule:
    n = math.prod(shape)
    return Schedule(((_one(n, 0, n - 1),),) if n > 1 else (), sender_waits=True)


def _all_to_next(shape: Sequence[int]) -> Schedule:
    """Every rank to the one after it: a pipeline in full flow, or a shift."""
    n = math.prod(shape)
    return Schedule(((Send(np.roll(np.arange(n), -1), 1.0),),) if n > 1 else (), sender_waits=True)


def _double_binary_tree(shape: Sequence[int]) -> tuple[Schedule, ...]:
    """Two trees, of which chunks take one by turns; a leaf of one is an inner rank of the other (for even n)."""
    n = math.prod(shape)
    first = tree_parents(n)
    moved = (n - 1 - np.arange(n)) if n % 2 == 0 else np.roll(np.arange(n), -1)  # old rank -> new rank
    second = np.full(n, -1)
    second[moved] = np.where(first >= 0, moved[first], -1)
    return _tree(*_tree_levels(first)), _tree(*_tree_levels(second))


# collective -> algorithm -> schedules of a shape; several are taken by the chunks in turn
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": _ring(lambda n: 2 * (n - 1)),
        "direct": lambda shape: _direct(shape, 2),
        "double_binary_tree": _double_binary_tree,
        "halving_doubling": _halving_doubling,
    },
    "reduce_scatter": {
        "ring": _ring(lambda n: n - 1),
        "direct": _direct,
        "halving_doubling": lambda shape: Schedule(_halving(shape)),
    },
    "all_gather": {
        "ring": _ring(lambda n: n - 1),
        "direct": _direct,
        "halving_doubling": lambda shape: Schedule(_halving(shape)[::-1]),
    },
    # in a ring every block goes on by one rank at a time until it is where it belongs
    "all_to_all": {"direct": _direct, "ring": _ring(lambda n: n * (n - 1) // 2)},
    "broadcast": {"tree": _tree_broadcast, "ring": _chain_broadcast, "direct": _direct_broadcast},
    "reduce": {"tree": _tree_reduce, "ring": _chain_reduce, "direct": _direct_reduce},
    "send_recv": {"direct": _first_to_last, "ring": _all_to_next},
}


def schedules(collective: str, algorithm: str, shape: Sequence[int]) -> tuple[Schedule, ...]:
    """The schedules of an algorithm over all ranks of a shape; chunk c takes number c modulo their count.

    Raises:
      ConfigError: no such collective or algorithm, or one that cannot serve so many ranks.
    """
    if collective not in ALGORITHMS:
        raise ConfigError(f"collective {collective!r} is unknown. There are {', '.join(ALGORITHMS)}.")
    made = ALGORITHMS[collective].get(algorithm)
    if made is None:
        raise ConfigError(
            f"{collective} has no algorithm {algorithm!r}. There are {', '.join(ALGORITHMS[collective])}, alone, or "
            "hierarchical:... with one for each dimension and commas between."
        )
    found = made(tuple(shape))
    return found if isinstance(found, tuple) else (found,)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """A part of a collective that runs by one algorithm in one set of dimensions.

    Attributes:
      dims: of the topology.
      schedules: for the ranks that differ in these dimensions; chunks take them in turn.
      share: of M that this phase works on.
    """

    dims: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    share: float


def phases(collective: str, algorithm: str, shape: Sequence[int], dims: Sequence[int] | None = None) -> list[Phase]:
    """Phases of a collective over some dimensions of a topology.

    One algorithm alone runs over all ranks of these dimensions as if they were one ("flat"). `hierarchical` (ring in
    every dimension; direct for all-to-all), `hierarchical:ring,direct` or just `ring,direct` goes dimension by
    dimension: an all-reduce reduce-scatters from the first to the last but one, all-reduces across the last, and
    all-gathers back; a reduce-scatter goes from the first to the last, an all-gather from the last to the first; an
    all-to-all exchanges, a broadcast sends and a reduce sums everything in each.

    Args:
      collective: of ALGORITHMS.
      algorithm: as above; halving-doubling and doubleBinaryTree, as ASTRA-sim spells it, are understood, too.
      shape: of the topology.
      dims: that take part; None for all.

    Raises:
      ConfigError: see `schedules`; as many algorithms as there are no dimensions; or a send_recv by dimensions.
    """
    dims = tuple(range(len(shape)) if dims is None else dims)
    sizes = [shape[d] for d in dims]
    if math.prod(sizes) == 1:
        return []  # nobody to talk to
    algorithm = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", algorithm).replace("-", "_").lower()
    word, _, rest = algorithm.partition(":")
    if word != "hierarchical" and "," not in algorithm:
        return [Phase(dims, schedules(collective, algorithm, sizes), 1.0)]
    if collective == "send_recv":
        raise ConfigError(f"send_recv is one message, which has no phases: take direct or ring, not {algorithm}.")
    names = (rest if word == "hierarchical" else algorithm).split(",")
    if names == [""]:
        names = [{"all_to_all": "direct", "broadcast": "tree", "reduce": "tree"}.get(collective, "ring")]
    names = names * len(dims) if len(names) == 1 else names
    if len(names) != len(dims):
        raise ConfigError(
            f"algorithm {algorithm}: {len(names)} names for {len(dims)} dimension(s). Give one for each dimension."
        )

    def phase(what: str, i: int) -> Phase:
        share = 1.0 if what in ("all_to_all", "broadcast", "reduce") else 1 / math.prod(sizes[:i])
        return Phase((dims[i],), schedules(what, names[i], (sizes[i],)), share)

    inward = range(len(dims) - 1)
    if collective == "all_reduce":
        scatter = [phase("reduce_scatter", i) for i in inward]
        gather = [phase("all_gather", i) for i in reversed(inward)]
        return [*scatter, phase("all_reduce", len(dims) - 1), *gather]
    order = range(len(dims))
    return [phase(collective, i) for i in (reversed(order) if collective == "all_gather" else order)]
