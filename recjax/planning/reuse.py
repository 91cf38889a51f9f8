"""Reuse distances of a program's data: bytes that it touches between two uses of the same memory.

A kernel takes longer the farther back its data were touched, for fewer of them are still in a cache (reuse distance:
Mattson et al., IBM Systems Journal 1970). Calibration repeats a kernel with the same arrays, as near as they can be; in
a step they are not. Steps follow one another, so that weights and inputs were last touched by the step before. A new
array takes the memory of those that nobody needs any more, the last of them first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from recjax.planning.work import FREE, works
from recjax.utils.hlo import Computation, Instruction, Program

_CALLS = {"call": "to_apply", "async-start": "calls", "while": "body"}


@dataclasses.dataclass(frozen=True)
class Use:
    """Bytes that a kernel reads or writes, and how many the program touched since it last touched their memory."""

    bytes: float
    distance: float


@dataclasses.dataclass(frozen=True)
class _Piece:
    """An array in memory: who made it, and its bytes."""

    key: str
    bytes: float


def uses(program: Program) -> dict[str, tuple[Use, ...]]:
    """Kernel -> what it uses, by the names of instructions; for those of a loop in a turn after the first.

    Kernels in the branches of a conditional are left out. Where several devices share a cache, what the others touch
    meanwhile is not counted.
    """
    before = _Walk(program, {}, (), (), 0.0)
    kept = {piece.key for piece in before.run(program.entry, ())}
    step = before.clock
    ends = sorted((before.touched[key], piece.bytes) for key, piece in before.made.items() if key not in kept)
    walk = _Walk(
        program,
        {key: at - step for key, at in before.touched.items()},
        [_Room(at - step, size) for at, size in ends],
        [_Room(at, size) for at, size in reversed(ends)],
        step,
    )
    walk.run(program.entry, ())
    return walk.found


@dataclasses.dataclass
class _Room:
    """Memory of an array that nobody needs after `at`."""

    at: float
    bytes: float


class _Walk:
    """One pass over a program in its order.

    Attributes:
      clock: bytes touched since the beginning of the step.
      touched: array -> the clock at the end of its last use.
      made: arrays that kernels made, by name.
      found: what `uses` returns.
    """

    def __init__(
        self, program: Program, touched: dict[str, float], free: Sequence[_Room], later: Sequence[_Room], step: float
    ) -> None:
        """Starts with what the step before has touched, and the room that it left.

        Args:
          program: to pass over.
          touched: array -> the clock when it was last, below 0.
          free: room, the latest one last.
          later: room that this step leaves, the first one last.
          step: bytes that a step touches: as far back is memory for which there is no room.
        """
        self.clock, self.touched = 0.0, touched
        self.made: dict[str, _Piece] = {}
        self.found: dict[str, tuple[Use, ...]] = {}
        self._program, self._free, self._later, self._step = program, list(free), list(later), step

    def run(self, computation: Computation, given: Sequence[_Piece]) -> tuple[_Piece, ...]:
        """Passes over a computation that is called with these arrays; returns those of its result."""
        left = list(given)
        memory: dict[str, tuple[_Piece, ...]] = {}
        for name, instruction in computation.instructions.items():
            own = tuple(_Piece(f"{name}.{i}", float(array.bytes)) for i, array in enumerate(instruction.arrays))
            if instruction.opcode == "parameter":
                memory[name] = tuple(_taken(piece, left) for piece in own)
            elif instruction.opcode in FREE:
                memory[name] = _view(instruction, memory, own)
            else:
                asked = tuple(piece for operand in instruction.operands for piece in memory[operand])
                if called := _called(instruction):
                    for _ in range(2 if instruction.opcode == "while" else 1):
                        result = self.run(self._program.computations[called], asked)
                    memory[name] = result if len(result) == len(own) else own
                else:
                    memory[name] = self._kernel(instruction, computation, memory, own)
        return memory[computation.root.name]

    def _kernel(
        self,
        instruction: Instruction,
        inside: Computation,
        memory: Mapping[str, tuple[_Piece, ...]],
        own: tuple[_Piece, ...],
    ) -> tuple[_Piece, ...]:
        """Notes what a kernel uses, and returns the arrays of its result."""
        if instruction.opcode == "conditional":  # of which the branch that does least is taken to run
            return own
        total = sum(work.bytes for work in works(instruction, inside, self._program))
        size = sum(piece.bytes for piece in own)
        operands = [piece for name in instruction.operands for piece in memory[name]]
        in_place = total < size
        result = tuple(_like(piece, operands) for piece in own) if in_place else own
        read = max(total - (0.0 if in_place else size), 0.0)
        asked = sum(piece.bytes for piece in operands)
        found = [Use(read * p.bytes / asked, self._distance(p)) for p in operands if read * p.bytes]
        if not in_place:
            if all(piece.key in self.made for piece in own):  # in the turn of a loop before: in the same memory
                found += [Use(piece.bytes, self._distance(piece)) for piece in own if piece.bytes]
            else:
                found += self._new(size)
            self.made |= {piece.key: piece for piece in own}
        self.clock += total
        for piece in (*operands, *result):
            self.touched[piece.key] = self.clock
        self.found[instruction.name] = tuple(found)
        return result

    def _distance(self, piece: _Piece) -> float:
        return self.clock - self.touched.get(piece.key, 0.0)

    def _new(self, size: float) -> list[Use]:
        """Takes room for an array."""
        while self._later and self._later[-1].at <= self.clock:
            self._free.append(self._later.pop())
        found = []
        while size > 0 and self._free:
            room = self._free[-1]
            taken = min(size, room.bytes)
            found.append(Use(taken, self.clock - room.at))
            size -= taken
            room.bytes -= taken
            if room.bytes <= 0:
                self._free.pop()
        return [*found, Use(size, self._step)] if size > 0 else found


def _called(instruction: Instruction) -> str:
    return instruction.called(_CALLS[instruction.opcode]) if instruction.opcode in _CALLS else ""


def _taken(piece: _Piece, left: list[_Piece]) -> _Piece:
    """The first array given that has its size, which is then no longer given; or its own."""
    for other in left:
        if other.bytes == piece.bytes:
            left.remove(other)
            return other
    return piece


def _like(piece: _Piece, operands: Sequence[_Piece]) -> _Piece:
    """The operand that an update writes into."""
    return next((other for other in operands if other.bytes == piece.bytes), piece)


def _view(
    instruction: Instruction, memory: Mapping[str, tuple[_Piece, ...]], own: tuple[_Piece, ...]
) -> tuple[_Piece, ...]:
    """Arrays that an instruction names which computes nothing."""
    pieces = tuple(piece for operand in instruction.operands for piece in memory[operand])
    if instruction.opcode == "get-tuple-element":
        number = instruction.attributes.partition("index=")[2].partition(",")[0]
        place = int(number) if number.isdigit() else 0
        pieces = pieces[place : place + len(own)]
    return pieces if len(pieces) == len(own) else own
