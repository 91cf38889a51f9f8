"""Cases that `recjax calibrate` times, and the compiled programs that they run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
      kernel: the class that it belongs to, as in the machine file.
      sizes: as `machine.SIZES` has them.
      make: compiles it and gives what to run; running it waits for its end, or gives the seconds of the part of it that
        counts.
      held_out: whether it is left out of the points, to see how well they predict it.
      dispatched: whether it is a compiled program, whose dispatch is to be subtracted.
      beside: compiles what several threads do at a time, to count how many of them make progress; None if one does it.
    """

    kernel: str
    sizes: dict[str, float]
    make: Callable[[], Run]
    held_out: bool = False
    dispatched: bool = True
    beside: Callable[[], Run] | None = None


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that is made for as long as a case is measured: all of them together would take gigabytes.

    Attributes:
      shape: of it.
      dtype: of it.
      make: gives it, in memory that was written to.
    """

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], jax.Array]


class Program:
    """A compiled function with its arguments; running it waits for its result."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Argument | jax.Array], in_place: bool) -> None:
        """Compiles it. With `in_place` the result takes the first argument's place, and is it the next time."""
        self._arguments, self._in_place = arguments, in_place
        jitted = jax.jit(function, donate_argnums=0 if in_place else ())
        self._compiled = jitted.lower(*shapes(arguments)).compile()
        self._held: list[jax.Array] = []

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Keeps the arguments meanwhile, all of them made and written; outside they are made for each run."""
        self._held = [a.make() if isinstance(a, Argument) else a for a in self._arguments]
        try:
            jax.block_until_ready(self._held)
            yield
        finally:
            self._held = []

    def __call__(self) -> Any:
        """Runs it, and returns its result where that is no argument of the next run."""
        if not self._held:
            with self.ready():
                return self()
        result = jax.block_until_ready(self._compiled(*self._held))
        if not self._in_place:
            return result
        self._held[0] = result
        return None


def shapes(arguments: Sequence[Argument | jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Returns what a function is compiled for that takes these."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]


def runner(function: Callable[..., Any], *arguments: Argument | jax.Array) -> Run:
    """Compiles a function for these arguments; running it waits for its result."""
    return Program(function, arguments, False)


def in_place(function: Callable[..., Any], *arguments: Argument | jax.Array) -> Run:
    """Compiles a function whose result takes its first argument's place, and is its first argument the next time."""
    return Program(function, arguments, True)
