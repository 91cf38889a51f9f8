"""The engine of the optional kernels: the same events in the same order and the same results, several times faster.

It is C++ (kernels/src/simulate.h), called by ctypes without JAX. `engine` takes it where recjax-kernels is installed,
unless RECJAX_KERNELS=off. Python goes on to do what is done once for a chunk: operations, admission, phases.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from recjax.errors import ConfigError
from recjax.lab.simulate.engine import HOPS, Engine
from recjax.lab.simulate.lower import TICKS_PER_NS, Network, NotSymmetricError, Program
from recjax.lab.simulate.tcp import LOSES, Tcp, TcpEngine, cut, ports_of

_INTERFACE = 1  # of the library: both numbers rise together when what is called here changes
_LATEST = 1 << 61  # of all times and labels, in the library's integers of 64 bits
_LONGEST = 1 << 56  # of a latency, a delay and a message on a link: 72 s, so that no sum of a few overflows
_CALL, _THROUGH, _LATE, _ASYMMETRIC = range(1, 5)  # what `recjax_simulator_play` returns


class TooLateError(Exception):
    """A time or label is too large for the library; Python's integers have no such end."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library of recjax-kernels, None where it is not installed or off.

    Raises:
      ConfigError: it was built from another version of recjax.
    """
    if os.environ.get("RECJAX_KERNELS") == "off":
        return None
    spec = importlib.util.find_spec("recjax_kernels")
    if spec is None or not spec.submodule_search_locations:
        return None
    # not imported: that would import JAX
    found = [path for folder in spec.submodule_search_locations for path in Path(folder).glob("_kernels*.so")]
    loaded = ctypes.CDLL(str(found[0])) if found else None
    interface = getattr(loaded, "recjax_simulator_interface", lambda: 0)
    if loaded is None or interface() != _INTERFACE:
        raise ConfigError(
            "the installed recjax-kernels was built from another version of recjax. Build it again (`pip install "
            "./kernels` in recjax's folder), or set RECJAX_KERNELS=off."
        )
    pointer, whole, place = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, result, arguments in (
        ("new", pointer, [pointer] * 5),
        ("delete", None, [pointer]),
        ("program", whole, [pointer, whole, ctypes.c_bool, ctypes.c_bool, whole, whole, *[pointer] * 6]),
        ("run", whole, [pointer, whole, whole]),
        ("forget", None, [pointer, whole]),
        ("begin", ctypes.c_bool, [pointer, whole, place]),
        ("at", None, [pointer, whole, whole, place, whole]),
        ("play", place, [pointer, pointer]),
        ("state", None, [pointer, pointer, pointer]),
    ):
        function = getattr(loaded, "recjax_simulator_" + name)
        function.restype, function.argtypes = result, arguments
    return loaded


def engine(
    network: Network, endpoint_ticks: int, copy_ticks: int, congestion: bool, tcp: Tcp | None, plain: bool = False
) -> Engine | CompiledEngine:
    """The fastest engine that there is; see `Engine` and `TcpEngine`. With `plain`, Python's.

    Raises:
      ConfigError: see `library`.
    """
    if not plain and library() is not None:
        return CompiledEngine(network, endpoint_ticks, copy_ticks, congestion, tcp)
    if tcp is not None:
        return TcpEngine(network, endpoint_ticks, copy_ticks, tcp)
    return Engine(network, endpoint_ticks, copy_ticks, congestion)


class CompiledRun:
    """A run of the library; see `Run`."""

    __slots__ = ("done", "forget", "number")

    def __init__(self, number: int, done: Callable[[int, int], None], forget: Callable[[], None]) -> None:
        self.number, self.done, self.forget = number, done, forget


class CompiledEngine:
    """Plays programs on a network, as `Engine` and, with `tcp`, as `TcpEngine` do; attributes as there."""

    def __init__(
        self, network: Network, endpoint_ticks: int, copy_ticks: int, congestion: bool = True, tcp: Tcp | None = None
    ) -> None:
        """An engine at time 0; see `Engine` and `TcpEngine`.

        `play` raises what theirs raise, but `run` the ConfigError of a segment that fits no buffer. All may raise
        TooLateError.
        """
        loaded = library()
        assert loaded is not None, "there is no library to play with"
        self._library, self.network, self._tcp = loaded, network, tcp
        self.now, self.events, self.lost = 0, 0, 0
        self.bytes_on = [0.0] * len(network.latency)
        self._calls: dict[int, Callable[[int, int], None]] = {}
        self._numbers = itertools.count()
        self._runs: list[CompiledRun | None] = []
        self._programs: dict[int, tuple[int, int, Program]] = {}  # by id: number, labels, and what keeps the id
        self._connections: dict[int, int] = {}  # of those that the network numbers, numbers without gaps
        self._found = np.zeros(3, np.int64)
        places = ports_of(network, tcp)
        buffers = {switch: number for number, switch in enumerate(dict.fromkeys(place[0] for place in places if place))}
        buffer_of = np.array([buffers[place[0]] if place else -1 for place in places], np.int32)
        ports = np.array([place[1] if place else 0.0 for place in places])
        whole = _integers(
            [
                len(places),
                network.actors,
                endpoint_ticks,
                copy_ticks,
                congestion,
                tcp is not None,
                network.stands_for == 1,
                bool(tcp and tcp.start_segments),
                len(buffers),
                min(round(tcp.timeout_ns * TICKS_PER_NS), _LATEST) if tcp else 0,
            ],
            _LATEST,
        )
        real = [tcp.window_bytes, tcp.most_segment_bytes, tcp.first_window_bytes, tcp.room_bytes] if tcp else [0.0] * 4
        given = whole, np.array(real), _integers(network.latency), buffer_of, ports
        self._handle = loaded.recjax_simulator_new(*(array.ctypes.data for array in given))

    def __del__(self) -> None:
        """Gives the library's memory back."""
        if handle := getattr(self, "_handle", None):
            self._library.recjax_simulator_delete(handle)

    def at(self, time: int, label: int, actor: int, call: Callable[[int, int], None]) -> None:
        """See `Engine.at`."""
        if time > _LATEST:
            raise TooLateError
        number = next(self._numbers)
        self._calls[number] = call
        self._library.recjax_simulator_at(self._handle, time, label, actor, number)

    def run(self, program: Program, label: int, done: Callable[[int, int], None]) -> CompiledRun:
        """See `Engine.run`."""
        known = self._programs.get(id(program)) or self._program(program)
        if label + known[1] > _LATEST:
            raise TooLateError
        number = self._library.recjax_simulator_run(self._handle, known[0], label)
        run = CompiledRun(number, done, functools.partial(self._forget, number))
        self._runs.append(run)
        return run

    def begin(self, run: CompiledRun, actor: int) -> None:
        """See `Engine.begin`."""
        if self._library.recjax_simulator_begin(self._handle, run.number, actor):
            run.done(actor, self.now)

    def play(self) -> int:
        """See `Engine.play`."""
        collects = gc.isenabled()
        gc.disable()  # as there
        try:
            self._play()
        finally:
            if collects:
                gc.enable()
        counts, bytes_on = np.zeros(2, np.int64), np.zeros(len(self.bytes_on))
        self._library.recjax_simulator_state(self._handle, counts.ctypes.data, bytes_on.ctypes.data)
        (self.events, self.lost), self.bytes_on = counts.tolist(), bytes_on.tolist()
        return self.now

    def _play(self) -> None:
        play, handle, runs, calls = self._library.recjax_simulator_play, self._handle, self._runs, self._calls
        found, where = self._found, self._found.ctypes.data
        while kind := play(handle, where):
            number, actor, now = found.tolist()
            self.now = now
            if kind == _THROUGH:
                run = runs[number]
                assert run is not None
                run.done(actor, now)
            elif kind == _CALL:
                calls.pop(number)(actor, now)
            elif kind == _LATE:
                raise TooLateError
            else:
                raise NotSymmetricError(LOSES)
        self.now = int(found[2])

    def _forget(self, number: int) -> None:
        self._library.recjax_simulator_forget(self._handle, number)
        self._runs[number] = None

    def _program(self, program: Program) -> tuple[int, int, Program]:
        """Gives a program to the library."""
        messages = [message for step in program.sends for of_actor in step for message in of_actor]
        if self._tcp is None:
            pieces = [(message, 1, 0) for message in messages]
        else:
            known = {id(message): message for message in messages}  # equal steps are the same
            made = {key: cut(message, self.network, self._tcp) for key, message in known.items()}
            pieces = [made[id(message)] for message in messages]
        first = np.cumsum([0, *(len(of_actor) for step in program.sends for of_actor in step)], dtype=np.int64)
        whole: list[int] = []
        sizes: list[float] = []
        links: list[int] = []
        ticks: list[int] = []
        for (ways, busy, receiver, size, connection), count, back in pieces:
            number = self._connections.setdefault(connection, len(self._connections)) if self._tcp else 0
            whole += [len(ways), receiver, number, count, back]
            sizes.append(size)
            links += ways
            ticks += busy
        stride = (program.most_sends + 1) * HOPS
        arrays = (
            first,
            np.array(program.receives, np.int32),
            _integers(whole),
            np.array(sizes, float),
            np.array(links, np.int32),
            _integers(ticks),
        )
        number = self._library.recjax_simulator_program(
            self._handle,
            len(program.sends),
            program.starts_with_delay,
            program.sender_waits,
            stride,
            len(self._connections),
            *(array.ctypes.data for array in arrays),
        )
        known_now = self._programs[id(program)] = number, stride * (len(program.sends) + 1), program
        return known_now


def _integers(values: Sequence[int], most: int = _LONGEST) -> np.ndarray:
    if max(values, default=0) > most:
        raise TooLateError
    return np.array(values, np.int64)
