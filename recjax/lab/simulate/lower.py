"""Schedules on a network, as the engine plays them: for all ranks, or for one that stands for all.

The shortcut. Take a message of a schedule, and its hop number j: the ranks send it over N links. If, for every message
and hop, these N links are all different, and any two such sets of links are equal or disjoint, then one rank is enough.
For by induction over time all links of a set ("class") see the same messages arrive at the same times, one copy of
each, and all ranks receive the same at the same times; ties are broken by the message, never by the rank. So one rank
plays against one link of each class, and receives what it sends. This is checked for every message, not assumed: a
tree, a way that is longer for some ranks than for others, or unequal sizes end it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from recjax.errors import ConfigError
from recjax.lab.simulate.collectives import Phase, Schedule, Send
from recjax.lab.simulate.topology import Topology

TICKS_PER_NS = 10**6  # a tick is a femtosecond: times are integers, so that equal times are equal
TICKS_PER_S = 10**9 * TICKS_PER_NS

# (links, ticks on each, receiving actor, bytes, connection: the same for all messages from one actor to one rank)
Message = tuple[tuple[int, ...], tuple[int, ...], int, float, int]


class NotSymmetricError(Exception):
    """One rank cannot stand for all; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A schedule for a chunk of some size on a network; an actor is a rank, or the one that stands for all.

    Attributes:
      sends: step -> actor -> messages.
      receives: arrivals to wait for, of step s and actor a at [s * actors + a].
      starts_with_delay, sender_waits: as in `Schedule`.
      most_sends: of one actor in a step.
    """

    sends: list[list[tuple[Message, ...]]]
    receives: list[int]
    starts_with_delay: bool
    sender_waits: bool
    most_sends: int


class Network:
    """A topology for `actors` actors: its links, and programs on them.

    Attributes:
      actors: how many.
      latency: ticks of each link.
      stands_for: ranks that each actor is, and links of the topology that each link is.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        bandwidth, latency = topology.per_link()
        self.actors, self.stands_for = topology.size, 1
        self.bandwidth: list[float] = bandwidth.tolist()
        self.latency: list[int] = np.rint(latency * TICKS_PER_NS).astype(int).tolist()
        self._made: dict[Any, Program] = {}
        self._keep: list[object] = []  # what the keys of _made name by id

    def member(self, groups: np.ndarray) -> list[bool]:
        """Returns whether each actor belongs to one of the groups."""
        inside = np.zeros(self.topology.size, bool)
        inside[groups.ravel()] = True
        return inside.tolist()

    def program(self, schedule: Schedule, groups: np.ndarray, size_bytes: float) -> Program:
        """The schedule in every group at once.

        Args:
          schedule: of as many members as a group has.
          groups: int [groups, members].
          size_bytes: M of the schedule's shares.
        """
        key = (id(schedule), groups.tobytes(), groups.shape, size_bytes)
        if key not in self._made:
            self._keep.append(schedule)
            self._made[key] = self._lower(schedule, groups, size_bytes)
        return self._made[key]

    def _lower(self, schedule: Schedule, groups: np.ndarray, size_bytes: float) -> Program:
        steps: dict[int, tuple[list[tuple[Message, ...]], list[int]]] = {}
        for step in schedule.steps:
            if id(step) not in steps:
                steps[id(step)] = self._step(
                    [_everywhere(send, groups, self.topology.size) for send in step], size_bytes
                )
        found = [steps[id(step)] for step in schedule.steps]
        most = max((len(messages) for sends, _ in found for messages in sends), default=0)
        receives = [
            count + schedule.sender_waits * len(messages)
            for sends, counts in found
            for messages, count in zip(sends, counts, strict=True)
        ]
        sends = [messages for messages, _ in found]
        return Program(sends, receives, schedule.starts_with_delay, schedule.sender_waits, most)

    def _step(self, sends: list[Send], size_bytes: float) -> tuple[list[tuple[Message, ...]], list[int]]:
        ranks = np.arange(self.topology.size)
        messages: list[list[Message]] = [[] for _ in ranks]
        receives = np.zeros(len(ranks), int)
        for send in sends:
            senders = np.flatnonzero(send.to >= 0)
            receivers = send.to[senders]
            np.add.at(receives, receivers, 1)
            routes = self.topology.routes(senders, receivers).T.tolist()
            sizes = (np.broadcast_to(send.share, len(ranks))[senders] * size_bytes).tolist()
            for rank, to, route, size in zip(senders.tolist(), receivers.tolist(), routes, sizes, strict=True):
                links = tuple(link for link in route if link >= 0)
                messages[rank].append((links, self.ticks(links, size), to, size, rank * len(ranks) + to))
        return [tuple(m) for m in messages], receives.tolist()

    def ticks(self, links: tuple[int, ...], size_bytes: float) -> tuple[int, ...]:
        """Time that so many bytes keep each of the links busy."""
        return tuple(round(size_bytes * TICKS_PER_S / self.bandwidth[link]) for link in links)

    def one_of(self, link: int) -> int:
        """A link of the topology that this one is, or stands for."""
        return link

    def switch(self, link: int) -> tuple[int, int] | None:
        """The switch that a link leaves and how many of its ports the link stands for; None if it leaves a rank."""
        found = self.topology.switch(link)
        return None if found is None else (found[0], 1)


class Quotient(Network):
    """The network with one rank for all, and one link for each class of links.

    Raises:
      NotSymmetricError: from `program`, where one rank cannot stand for all.
    """

    def __init__(self, topology: Topology, connections: bool = False) -> None:
        """The quotient of a topology; with `connections` pairs of ranks are distinguished, too."""
        super().__init__(topology)
        self._connection_of = np.full(topology.size**2, -1) if connections else None
        self._connections = 0
        self._bandwidths, self._latencies = self.bandwidth, self.latency
        self.actors, self.stands_for = 1, topology.size
        self.bandwidth, self.latency = [], []
        self._class_of = np.full(topology.links, -1)
        self._first: list[int] = []  # class -> one of its links

    def member(self, groups: np.ndarray) -> list[bool]:
        """Always: every rank does the same."""
        if groups.size != self.topology.size:
            raise NotSymmetricError("an operation is of only some of the ranks")
        return [True]

    def _step(self, sends: list[Send], size_bytes: float) -> tuple[list[tuple[Message, ...]], list[int]]:
        ranks = np.arange(self.topology.size)
        messages: list[Message] = []
        for send in sends:
            if not np.array_equal(np.sort(send.to), ranks):
                raise NotSymmetricError("some ranks send or receive what others do not, as in a tree")
            sizes = np.unique(send.share)
            if len(sizes) > 1:
                raise NotSymmetricError("the ranks send unequal sizes")
            links = tuple(self._class(hop) for hop in self.topology.routes(ranks, send.to) if hop.max() >= 0)
            size = float(sizes[0]) * size_bytes
            messages.append((links, self.ticks(links, size), 0, size, self._connection(ranks, send.to)))
        return [tuple(messages)], [len(messages)]

    def _connection(self, ranks: np.ndarray, to: np.ndarray) -> int:
        """A number for the pairs of ranks that a message goes between, which stand for one connection."""
        if self._connection_of is None:
            return 0
        pairs = ranks * len(ranks) + to
        known = np.unique(self._connection_of[pairs])
        if len(known) > 1:
            raise NotSymmetricError("connections that see the same in one collective do not in another")
        if known[0] < 0:
            self._connections += 1
            self._connection_of[pairs] = self._connections
        return int(self._connection_of[pairs[0]])

    def _class(self, links: np.ndarray) -> int:
        if links.min() < 0:
            raise NotSymmetricError("a message has a longer way from some ranks than from others")
        known = self._class_of[links]
        if len(np.unique(links)) < len(links):
            raise NotSymmetricError("several ranks send the same message over one link")
        if known[0] < 0 and (known < 0).all():
            self._class_of[links] = len(self._first)
            self._first.append(int(links[0]))
            self.bandwidth.append(self._bandwidths[links[0]])
            self.latency.append(self._latencies[links[0]])
            return len(self._first) - 1
        if (known != known[0]).any():
            raise NotSymmetricError("links that see the same in one collective do not in another")
        return int(known[0])

    def one_of(self, link: int) -> int:
        """One link of the class."""
        return self._first[link]

    def switch(self, link: int) -> tuple[int, int] | None:
        """A switch of the class, of which the link is all ports."""
        return self.topology.switch(self._first[link])


def _everywhere(send: Send, groups: np.ndarray, size: int) -> Send:
    """A send within a group as one of all ranks: `to` int [size]; -1 also for ranks outside all groups."""
    to = np.full(size, -1)
    to[groups] = np.where(send.to >= 0, groups[:, send.to], -1)
    share = send.share
    if isinstance(share, np.ndarray):
        share = np.zeros(size)
        share[groups] = send.share
    return Send(to, share)


def groups_of(topology: Topology, phase: Phase, groups: np.ndarray | None) -> np.ndarray:
    """The ranks that run a phase together: those given, or those of its dimensions.

    Raises:
      ConfigError: a rank that does not exist, or stands in two groups.
    """
    if groups is None:
        return topology.groups(phase.dims)
    ranks = groups.ravel()
    if ranks.min(initial=0) < 0 or ranks.max(initial=0) >= topology.size or len(np.unique(ranks)) < len(ranks):
        raise ConfigError(
            f"a collective's groups {groups.tolist()} must name each rank at most once, from 0 to {topology.size - 1}."
        )
    return groups
