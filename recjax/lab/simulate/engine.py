"""The event loop: messages on links, and steps of programs.

A link serves one message at a time, whole, in the order of arrival: it is busy for bytes/bandwidth, and the message is
at the other end its latency later ("packet-less" store and forward). As a link works in the order of arrival, when a
message leaves it is known once it arrives, so a hop is one event, and the first and the last hop are none of their own.

Equal times are ordered by the message, never by the rank; `lower` relies on it.
"""

from __future__ import annotations

import gc
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from recjax.lab.simulate.lower import Message, Network, Program

# (time, label, actor, serial, run, message, step, hop), of which the first four tell any two events apart. A message
# is about to enter its link number `hop` (1 or more; the first is entered as it is sent). Without one, the actor goes
# on with the step after `step`, `hop` -1 if its messages are copied already. Without a run, `message` is a function.
Event = tuple[int, int, int, int, Any, Any, int, int]
HOPS = 4096  # labels leave room for so many hops of a message


class Run:
    """One chunk's phase under way: a program, and how far each actor is.

    Attributes:
      program: what to do.
      missing, latest: of step s and actor a at [s * actors + a]: messages to come, and when the last one came.
      waiting: the step in which each actor waits for messages; -1 for none.
      done: called with (actor, time) when an actor is through.
    """

    __slots__ = ("done", "label", "latest", "missing", "program", "stride", "waiting")

    def __init__(self, program: Program, label: int, actors: int, done: Callable[[int, int], None]) -> None:
        self.program, self.label, self.done = program, label, done
        self.stride = (program.most_sends + 1) * HOPS
        self.missing = program.receives.copy()
        self.latest = [0] * len(self.missing)
        self.waiting = [-1] * actors

    def forget(self) -> None:
        """Lets go of what only a run under way needs."""
        self.missing, self.latest = [], []

    @property
    def labels(self) -> int:
        """Number of labels that its events use."""
        return self.stride * (len(self.program.sends) + 1)


class Engine:
    """Plays programs on a network.

    Attributes:
      network: whose links and latencies.
      now: ticks.
      bytes_on: bytes that each link has served, as far as the time has come.
      events: how many there were.
      lost: segments that were lost and sent again; always 0 here, where nothing is.
    """

    def __init__(self, network: Network, endpoint_ticks: int, copy_ticks: int, congestion: bool = True) -> None:
        """An engine at time 0.

        Args:
          network: to play on; its programs are made already, for a link may be new with each.
          endpoint_ticks: from a message's arrival until its receiver goes on.
          copy_ticks: from the moment a rank could send until the messages of a step are at the network.
          congestion: whether messages wait for each other; without, as in analytical models, every link serves any
            number at once, and a message takes the time of its slowest link and the latencies of all.
        """
        self.network, self.now, self.events, self.lost = network, 0, 0, 0
        self.serial = 0  # of events that share time, label and actor
        links = len(network.latency)
        self.bytes_on = [0.0] * links
        self._free = [0] * links
        self._latency, self._actors = network.latency, network.actors
        self._heap: list[Event] = []  # of each link only what comes out of it next
        self._outputs: list[deque[Event]] = [deque() for _ in range(links)]
        self._endpoint, self._copy, self._congestion = endpoint_ticks, copy_ticks, congestion

    def at(self, time: int, label: int, actor: int, call: Callable[[int, int], None]) -> None:
        """Calls `call(actor, time)` then. Among equal times negative labels come before all messages."""
        self.serial += 1
        heapq.heappush(self._heap, (time, label, actor, self.serial, None, call, 0, 0))

    def run(self, program: Program, label: int, done: Callable[[int, int], None]) -> Run:
        """A run of a program, whose events have labels from `label` on; see `Run`."""
        return Run(program, label, self.network.actors, done)

    def begin(self, run: Run, actor: int) -> None:
        """An actor starts on a run, now."""
        if run.program.starts_with_delay and run.program.sends and self._endpoint:
            self._resume_at(self.now + self._endpoint, run, actor, -1)
        else:
            self._next_step(run, actor, -1, self.now)

    def play(self) -> int:
        """Until nothing is left to happen; returns the time."""
        collects = gc.isenabled()
        gc.disable()  # millions of live tuples without one cycle: the collector would take half the time
        try:
            self._play()
        finally:
            if collects:
                gc.enable()
        return self.now

    def _play(self) -> None:
        heap, outputs, enter = self._heap, self._outputs, self._enter
        pop, replace = heapq.heappop, heapq.heapreplace
        count = 0
        while heap:
            time, label, actor, _, run, what, step, hop = heap[0]
            self.now = time
            count += 1
            if hop > 0:  # a message has come out of a link; the next one that comes out takes its place in the heap
                output = outputs[what[0][hop - 1]]
                output.popleft()
                if output:
                    replace(heap, output[0])
                else:
                    pop(heap)
                enter(time, label + 1, actor, run, what, step, hop)
                continue
            pop(heap)
            if run is None:
                what(actor, time)
            else:
                self._next_step(run, actor, step, time, copied=hop < 0)
        self.events += count

    def _next_step(self, run: Run, actor: int, step: int, now: int, copied: bool = False) -> None:
        """Goes on from a step that is complete until it has to wait."""
        program, actors = run.program, self.network.actors
        steps = len(program.sends)
        step += 1
        while step < steps:
            messages = program.sends[step][actor]
            if messages:
                if self._copy and not copied:
                    self._resume_at(now + self._copy, run, actor, step - 1, -1)
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
        heapq.heappush(self._heap, (time, label, actor, 0, run, None, step, hop))

    def _send(self, run: Run, actor: int, step: int, now: int, messages: Sequence[Message]) -> None:
        label = run.label + step * run.stride
        if not self._congestion:
            for links, ticks, receiver, size, _ in messages:
                for link in links:
                    self.bytes_on[link] += size
                time = now + max(ticks) + sum(self._latency[link] for link in links)
                self._deliver(run, step, actor, receiver, time)
            return
        for message in messages:
            self._enter(now, label, actor, run, message, step, 0)
            label += HOPS

    def _enter(self, now: int, label: int, actor: int, run: Run, message: Message, step: int, hop: int) -> None:
        """A message is at a link: it takes its place there, and comes out of it later."""
        links, ticks, receiver, size, _ = message
        link = links[hop]
        end = self._free[link]
        if end < now:
            end = now
        end += ticks[hop]
        self._free[link] = end
        self.bytes_on[link] += size
        end += self._latency[link]
        hop += 1
        if hop == len(links):
            self._deliver(run, step, actor, receiver, end)
            return
        self._leave(link, (end, label, actor, 0, run, message, step, hop))

    def _leave(self, link: int, event: Event) -> None:
        """A message will come out of a link, after all that entered it before."""
        output = self._outputs[link]
        if not output:
            heapq.heappush(self._heap, event)
        output.append(event)

    def _deliver(self, run: Run, step: int, sender: int, receiver: int, time: int) -> None:
        """A message will be at its receiver at that time."""
        self._arrive(run, step, receiver, time)
        if run.program.sender_waits:
            self._arrive(run, step, sender, time)

    def _arrive(self, run: Run, step: int, actor: int, time: int) -> None:
        at = step * self._actors + actor
        if time > run.latest[at]:
            run.latest[at] = time
        run.missing[at] -= 1
        if not run.missing[at] and run.waiting[actor] == step:
            run.waiting[actor] = -1
            self._resume_at(run.latest[at] + self._endpoint, run, actor, step)
