"""A transport like TCP: segments, a window for each pair of ranks, acknowledgements, and losses at full switch ports.

Every ordered pair of ranks has a connection. Its messages are cut into segments, which are stored and forwarded one by
one. A connection has at most a window of bytes under way; a segment stops counting when its acknowledgement is back:
the acknowledgement delay and the latencies of the way after it has arrived (acknowledgements take no bandwidth).

A switch has one buffer for all its output ports, which holds a segment from its arrival until its port has sent it. A
segment that finds no room is lost, and sent again a timeout later. Senders queue without loss. One rank stands for all
only as long as nothing is lost, for who of several loses the last room is a matter of order.

The window is fixed, or it is that of the receiver and the sender has one of its own, as Reno and its kin: it begins at
some segments and grows with every acknowledgement, by as many bytes as are acknowledged ("slow start": it doubles in a
round trip) until a loss has halved it, and from there by a segment in a round trip. After a timeout it begins at one
segment again. Between messages it stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import deque
from typing import Any

from recjax.errors import ConfigError
from recjax.lab.simulate.engine import HOPS, Engine, Run
from recjax.lab.simulate.lower import TICKS_PER_NS, Message, Network, NotSymmetricError

LOSES = "TCP loses segments, and who loses them is a matter of order"  # why one rank stands for all no longer


@dataclasses.dataclass(frozen=True)
class Tcp:
    """Parameters of the transport.

    Attributes:
      window_bytes: that a connection may have under way.
      ack_delay_ns: from the arrival of a segment until its acknowledgement leaves.
      buffer_bytes: of a switch, for all its output ports.
      segment_bytes: that travel together, at most; a window at most.
      timeout_ns: from a loss until the segment is sent again.
      start_segments: that a sender's own window begins with; 0: it has none, and sends as much as `window_bytes` lets.
    """

    window_bytes: float
    ack_delay_ns: float = 0.0
    buffer_bytes: float = math.inf
    segment_bytes: float = 65536.0
    timeout_ns: float = 1e7
    start_segments: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what could never send anything."""
        if min(self.window_bytes, self.segment_bytes, self.buffer_bytes, self.timeout_ns) <= 0 or self.ack_delay_ns < 0:
            raise ConfigError(
                "TCP's window, segment, switch buffer and timeout must be above 0, the ack delay 0 or more."
            )
        if self.start_segments < 0:
            raise ConfigError(f"TCP begins with {self.start_segments} segments; give 1 or more, or 0 for none.")

    @property
    def most_segment_bytes(self) -> float:
        """Bytes of a segment, at most."""
        return min(self.segment_bytes, self.window_bytes)

    @property
    def first_window_bytes(self) -> float:
        """Bytes that a connection may have under way at first."""
        return min(self.window_bytes, self.start_segments * self.most_segment_bytes or math.inf)

    @property
    def room_bytes(self) -> float:
        """Bytes that a switch has room for, with a little more for rounding."""
        return self.buffer_bytes * (1 + 1e-12)


def cut(message: Message, network: Network, tcp: Tcp) -> tuple[Message, int, int]:
    """The segments of a message: as few as can be, of equal size.

    Returns:
      one of them, how many there are, and the ticks from its arrival until its acknowledgement is back.

    Raises:
      ConfigError: it is larger than a switch's buffer.
    """
    links, _, receiver, size, connection = message
    count = max(1, math.ceil(size / tcp.most_segment_bytes))
    part = size / count
    if part > tcp.buffer_bytes:
        raise ConfigError(
            f"a switch buffer of {tcp.buffer_bytes:,.0f} bytes never holds a segment of {part:,.0f}: it "
            "would be lost forever. Take a larger buffer or smaller segments."
        )
    back = round(tcp.ack_delay_ns * TICKS_PER_NS) + sum(network.latency[link] for link in links)
    return (links, network.ticks(links, part), receiver, part, connection), count, back


def ports_of(network: Network, tcp: Tcp | None) -> list[tuple[int, int] | None]:
    """Switch that each link leaves, and the ports that the link stands for; None where nothing is lost."""
    limited = tcp is not None and not math.isinf(tcp.buffer_bytes)
    return [network.switch(link) if limited else None for link in range(len(network.latency))]


class _Connection:
    """Messages that a pair of ranks has under way, and those that wait for the window."""

    __slots__ = ("acks", "flying", "queue", "threshold", "waking", "window")

    def __init__(self, window: float) -> None:
        self.window = window  # bytes that may be under way
        self.threshold = math.inf  # of the window, up to which it doubles in a round trip
        self.flying = 0.0  # bytes
        self.acks: deque[tuple[int, float]] = deque()  # (time, bytes) of acknowledgements on their way
        self.queue: deque[tuple[int, int, Run, int, Any]] = deque()  # (label, actor, run, step, segment)
        self.waking = False


class _Buffer:
    """Contents of a switch."""

    __slots__ = ("held", "leaving")

    def __init__(self) -> None:
        self.held = 0.0  # bytes
        self.leaving: list[tuple[int, float]] = []  # a heap of (time, bytes)

    def take(self, now: int, until: int, size: float, room: float) -> bool:
        """Holds so many bytes until then, if with them it holds at most `room` now."""
        leaving, held = self.leaving, self.held
        while leaving and leaving[0][0] <= now:
            held -= heapq.heappop(leaving)[1]
        if not leaving:
            held = 0.0  # but for rounding
        fits = held + size <= room
        if fits:
            held += size
            heapq.heappush(leaving, (until, size))
        self.held = held
        return fits


class TcpEngine(Engine):
    """The engine with this transport in place of whole messages; attributes as there."""

    def __init__(self, network: Network, endpoint_ticks: int, copy_ticks: int, tcp: Tcp) -> None:
        """An engine at time 0; see `Engine`.

        `play` raises ConfigError if a segment is larger than a switch's buffer, and NotSymmetricError at the first loss
        where one rank stands for several.
        """
        super().__init__(network, endpoint_ticks, copy_ticks)
        self._tcp, self._segment, self._first_window = tcp, tcp.most_segment_bytes, tcp.first_window_bytes
        self._connections: dict[int, _Connection] = {}
        self._timeout = round(tcp.timeout_ns * TICKS_PER_NS)
        places = ports_of(network, tcp)
        buffers = {place[0]: _Buffer() for place in places if place}
        # of each link the buffer before it and the ports that it stands for
        self._buffers = [(buffers[place[0]], place[1]) if place else None for place in places]
        self._room = tcp.room_bytes
        # by the message's id, which the first part keeps: a segment, how many, and an acknowledgement's time on its way
        self._segments: dict[int, tuple[Message, Message, int, int]] = {}

    def _send(self, run: Run, actor: int, step: int, now: int, messages: Any) -> None:
        label = run.label + step * run.stride
        for message in messages:
            connection = self._connections.get(message[4])
            if connection is None:
                connection = self._connections[message[4]] = _Connection(self._first_window)
            known = self._segments.get(id(message))
            if known is None:
                known = self._segments[id(message)] = (message, *cut(message, self.network, self._tcp))
            _, piece, count, back = known
            left = [count]  # segments of this message that are not there yet
            segment = (label, actor, run, step, (*piece, connection, left, back))
            connection.queue.extend(itertools.repeat(segment, count))
            self._push(connection, now)
            label += HOPS

    def _push(self, connection: _Connection, now: int) -> None:
        """Sends what the window lets through."""
        acks = connection.acks
        while acks and acks[0][0] <= now:
            size = acks.popleft()[1]
            connection.flying -= size
            if connection.window < self._tcp.window_bytes:
                slow = connection.window >= connection.threshold
                connection.window += self._segment * size / connection.window if slow else size
                connection.window = min(connection.window, self._tcp.window_bytes)
        if not acks and connection.flying < 1e-6:
            connection.flying = 0.0  # but for rounding
        queue = connection.queue
        while queue:
            size = queue[0][4][3]
            if connection.flying and connection.flying + size > connection.window * (1 + 1e-12):
                self._wake(connection)
                return
            connection.flying += size
            label, actor, run, step, segment = queue.popleft()
            self._enter(now, label, actor, run, segment, step, 0)

    def _wake(self, connection: _Connection) -> None:
        """Goes on when the next acknowledgement is back, if one is on its way."""
        if connection.acks and not connection.waking:
            connection.waking = True
            label, actor = connection.queue[0][:2]
            self.at(connection.acks[0][0], label, actor, functools.partial(self._woken, connection))

    def _woken(self, connection: _Connection, actor: int, now: int) -> None:
        connection.waking = False
        self._push(connection, now)

    def _enter(self, now: int, label: int, actor: int, run: Run, message: Any, step: int, hop: int) -> None:
        links, ticks, receiver, size, _, connection, left, back = message
        link = links[hop]
        end = self._free[link]
        if end < now:
            end = now
        end += ticks[hop]
        before = self._buffers[link]
        if before is not None and not before[0].take(now, end, size * before[1], self._room):
            self._lose(now, label, actor, run, message, step, hop)
            return
        self._free[link] = end
        self.bytes_on[link] += size
        end += self._latency[link]
        hop += 1
        if hop < len(links):
            self.serial += 1
            self._leave(link, (end, label, actor, self.serial, run, message, step, hop))
            return
        connection.acks.append((end + back, size))
        if connection.queue:
            self._wake(connection)
        left[0] -= 1
        if left[0]:
            at = step * self._actors + receiver
            run.latest[at] = max(run.latest[at], end)
        else:
            self._deliver(run, step, actor, receiver, end)

    def _lose(self, now: int, label: int, actor: int, run: Run, message: Any, step: int, hop: int) -> None:
        if self.network.stands_for > 1:
            raise NotSymmetricError(LOSES)
        self.lost += 1
        if self._tcp.start_segments:
            connection = message[5]
            connection.threshold = max(connection.window / 2, 2 * self._segment)
            connection.window = self._segment
        again = functools.partial(self._again, label - hop, run, message, step)
        self.at(now + self._timeout, label, actor, again)

    def _again(self, label: int, run: Run, message: Any, step: int, actor: int, now: int) -> None:
        self._enter(now, label, actor, run, message, step, 0)
