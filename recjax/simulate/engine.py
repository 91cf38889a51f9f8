"""The event loop: messages on links, and steps of programs.

A link serves one message at a time, whole, in the order of arrival: it is busy for bytes/bandwidth, and the message is
at the other end its latency later ("packet-less" store and forward). As a link works in the order of arrival, when a
message leaves it is known once it arrives, so a hop is one event, and the first and the last hop are none of their own.

Equal times are ordered by the message, never by the rank; `lower` relies on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from recjax.simulate.lower import Message, Network, Program

_HOPS = 4096  # labels leave room for so many hops of a message


class Run:
    """One chunk's phase under way: a program, and how far each actor is.

    Attributes:
      program: what to do.
      missing, latest: of step s and actor a at [s * actors + a]: messages to come, and when the last one came.
      waiting: the step in which each actor waits for messages; -1 for none.
      done: called with (actor, time) when an actor is through.
    """

    __slots__ = ("done", "label", "latest", "left", "missing", "program", "stride", "waiting")

    def __init__(self, program: Program, label: int, actors: int, done: Callable[[int, int], None]) -> None:
        self.program, self.label, self.done = program, label, done
        self.stride = (program.most_sends + 1) * _HOPS
        self.missing = program.receives.copy()
        self.latest = [0] * len(self.missing)
        self.waiting = [-1] * actors

    @property
    def labels(self) -> int:
        """How many labels its events use."""
        return self.stride * (len(self.program.sends) + 1)


class Engine:
    """Plays programs on a network.

    Attributes:
      network: whose links and latencies.
      now: ticks.
      bytes_on: bytes that each link has served, as far as the time has come.
      events: how many there were.
    """

    def __init__(self, network: Network, endpoint_ticks: int, copy_ticks: int, congestion: bool = True) -> None:
        """An engine at time 0.

        Args:
          network: to play on.
          endpoint_ticks: from a message's arrival until its receiver goes on.
          copy_ticks: from the moment a rank could send until the messages of a step are at the network.
          congestion: whether messages wait for each other; without, every link serves any number at once.
        """
        self.network, self.now, self.events = network, 0, 0
        links = len(network.latency)
        self.bytes_on = [0.0] * links
        self._free = [0] * links
        self._heap: list[tuple[int, int, int, Any, Any, int, int]] = []
        self._endpoint, self._copy, self._congestion = endpoint_ticks, copy_ticks, congestion

    def at(self, time: int, label: int, actor: int, call: Callable[[int, int], None]) -> None:
        """Calls `call(actor, time)` then. Among equal times negative labels come before all messages."""
        heapq.heappush(self._heap, (time, label, actor, None, call, 0, 0))

    def begin(self, run: Run, actor: int) -> None:
        """An actor starts on a run, now."""
        if run.program.starts_with_delay and run.program.sends and self._endpoint:
            self._resume_at(self.now + self._endpoint, run, actor, -1)
        else:
            self._next_step(run, actor, -1, self.now)

    def play(self) -> int:
        """Until nothing is left to happen; returns the time."""
        heap, pop = self._heap, heapq.heappop
        count = 0
        while heap:
            time, _, actor, run, what, step, hop = event = pop(heap)
            self.now = time
            count += 1
            if run is None:
                what(actor, time)
            elif what is None:
                self._next_step(run, actor, step, time, copied=hop == 1)
            else:
                self._arrive(event)
        self.events += count
        return self.now

    def _next_step(self, run: Run, actor: int, step: int, now: int, copied: bool = False) -> None:
        """Goes on from a step that is complete until it has to wait."""
        program, actors = run.program, self.network.actors
        steps = len(program.sends)
        step += 1
        while step < steps:
            messages = program.sends[step][actor]
            if messages:
                if self._copy and not copied:
                    self._resume_at(now + self._copy, run, actor, step - 1, 1)
                    return
                self._send(run, actor, step, now, messages)
            copied = False
            at = step * actors + actor
            if program.receives[at]:
                if run.missing[at]:
                    run.waiting[actor] = step
                    return
                ready = run.latest[at] + self._endpoint
                if ready > now:
                    self._resume_at(ready, run, actor, step)
                    return
            step += 1
        run.done(actor, now)

    def _resume_at(self, time: int, run: Run, actor: int, step: int, hop: int = 0) -> None:
        label = run.label + (step + 2) * run.stride - 1
        heapq.heappush(self._heap, (time, label, actor, run, None, step, hop))

    def _send(self, run: Run, actor: int, step: int, now: int, messages: Sequence[Message]) -> None:
        label = run.label + step * run.stride
        for message in messages:
            self._arrive((now, label, actor, run, message, step, 0))
            label += _HOPS

    def _arrive(self, event: tuple[int, int, int, Any, Any, int, int]) -> None:
        """A message is at a link: it takes its place there, and is at the next one, or its receiver's, later."""
        now, label, actor, run, message, step, hop = event
        links, ticks, receiver, size = message
        link = links[hop]
        end = now + ticks[hop]
        if self._congestion:
            if self._free[link] > now:
                end = self._free[link] + ticks[hop]
            self._free[link] = end
        self.bytes_on[link] += size
        end += self.network.latency[link]
        hop += 1
        if hop < len(links):
            heapq.heappush(self._heap, (end, label + 1, actor, run, message, step, hop))
            return
        at = step * self.network.actors + receiver
        if end > run.latest[at]:
            run.latest[at] = end
        run.missing[at] -= 1
        if not run.missing[at] and run.waiting[receiver] == step:
            run.waiting[receiver] = -1
            self._resume_at(run.latest[at] + self._endpoint, run, receiver, step)
