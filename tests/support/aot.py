"""Programs compiled for accelerators that nobody here has, and what a compiled program consists of."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from recjax.config.run import RunConfig
from recjax.lab.predict.targets import devices, moved
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_batches, abstract_inputs, abstract_state
from recjax.train.first_batch import sample
from recjax.train.trainer import Trainer
from recjax.utils.hlo import Instruction, Program, read_program

DEVICES = 8
STEPS = 4  # of a call


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for a target.

    Attributes:
      text: of the optimised program.
      memory: what it takes, as XLA says.
      trainer: whose it is.
      capacities: for which.
      seconds: that compiling took.
    """

    text: str
    memory: Any
    trainer: Trainer
    capacities: dict[str, int]
    seconds: float

    @functools.cached_property
    def program(self) -> Program:
        return read_program(self.text)


@functools.cache
def compiled(config: RunConfig, target: str, what: str, ragged: bool = False) -> Compiled:
    """The program `what` of a config for a target: train_step, routed by the host; predict; or steps, `STEPS` a call.

    With `ragged` ids and rows travel without padding, which a config for CPUs cannot ask for.
    """
    trainer = build_trainer(config, weights=False)
    capacities = sample(trainer).capacities
    if ragged:
        embedding = dataclasses.replace(trainer.config.embedding, ragged=True)
        trainer = dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, embedding=embedding))
    trainer = moved(trainer, target)
    state = abstract_state(trainer)
    if what == "steps":
        lowered = trainer.step_program.lower(state, abstract_batches(trainer, capacities, STEPS))
    elif what == "train_step":
        lowered = trainer.step_program.lower(state, abstract_inputs(trainer, capacities))
    else:
        lowered = trainer.predict_program.lower(state, abstract_inputs(trainer, capacities))
    started = time.monotonic()
    made = lowered.compile()
    seconds = time.monotonic() - started
    return Compiled(made.as_text() or "", made.memory_analysis(), trainer, capacities, seconds)


def compiled_alone(function: Callable[..., Any], target: str, *shapes: jax.ShapeDtypeStruct) -> Program:
    """A function of arrays for one device of a target; the first array is donated."""
    one = SingleDeviceSharding(devices(target, DEVICES)[0])
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for x in shapes]
    return read_program(jax.jit(function, donate_argnums=0).lower(*given).compile().as_text() or "")


def instructions(program: Program) -> Iterator[Instruction]:
    """All instructions, also those inside fusions and loops."""
    for computation in program.computations.values():
        yield from computation.instructions.values()


FLOATS = ("f64", "f32", "bf16", "f16")


def unordered_sums(program: Program) -> list[str]:
    """Scatters that add floats up and may meet one place twice: on a GPU in whatever order they come."""
    found = []
    for instruction in instructions(program):
        if instruction.opcode != "scatter" or "unique_indices=true" in instruction.attributes:
            continue
        body = program.computations[instruction.called("to_apply")]
        if body.root.opcode == "add" and body.root.arrays[0].dtype in FLOATS:
            found.append(f"{instruction.name} {instruction.arrays[0]} of {instruction.scope}")
    return found


def slow_sorts(program: Program) -> list[str]:
    """Sorts that GPUs have no library for: of more than a key and one value."""
    return [f"{i.name} of {i.scope}" for i in instructions(program) if i.opcode == "sort" and len(i.operands) > 2]


_NO_KERNEL = set(
    """
    parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id while conditional call
    opt-barrier
    """.split()
)


def launches(program: Program) -> int:
    """Operations that a device is given in one run of the program, iterations of loops counted."""

    def of(name: str) -> int:
        total = 0
        for instruction in program.computations[name].instructions.values():
            if instruction.opcode == "while":
                trips = instruction.trips or 1
                total += trips * (of(instruction.called("body")) + of(instruction.called("condition")))
            elif instruction.opcode == "conditional":
                total += max(of(branch) for branch in instruction.branches())
            elif instruction.opcode == "call":
                total += of(instruction.called("to_apply"))
            elif instruction.opcode not in _NO_KERNEL and not instruction.opcode.endswith("-done"):
                total += 1
        return total

    return of(program.entry.name)


def trips(program: Program) -> list[int]:
    """Turns of each loop whose number the compiler knows; 0 of any other."""
    return [i.trips or 0 for i in instructions(program) if i.opcode == "while"]


def loops(program: Program) -> int:
    """Loops of the program."""
    return sum(instruction.opcode == "while" for instruction in instructions(program))


def copies(program: Program, size: int) -> list[str]:
    """Operations that make an array of `size` bytes or more, other than by scattering into one that is there.

    Arrays in a TPU's memory on the chip do not count, nor does writing one of those back to what the program returns.
    """
    fused = {i.called("calls") for i in instructions(program) if i.opcode == "fusion"}  # in which nothing is stored
    stored = [c for c in program.computations.values() if c.name not in fused]
    found, returned = [], _written_back(program)
    for instruction in (i for computation in stored for i in computation.instructions.values()):
        made = instruction.arrays
        if instruction.opcode in ("copy-start", "slice-start"):  # which name what they are given, too
            made = made[:1] if instruction.opcode == "copy-start" else made[len(instruction.operands) :]
        largest = max((array.bytes for array in made if not array.on_chip), default=0)
        if largest < size or instruction.opcode in _NO_KERNEL or _scatters(program, instruction):
            continue
        if (
            "output_to_operand_aliasing" in instruction.attributes
        ):  # a kernel that works in place; XLA would copy before
            continue
        if re.fullmatch(r"(call|async)-(start|update|done)", instruction.opcode) or instruction.name in returned:
            continue
        found.append(f"{instruction.opcode} {instruction.name} of {instruction.scope}")
    return found


def _written_back(program: Program) -> set[str]:
    """Copies of an array on the chip to one that the program returns, which is in place if that one was donated."""
    entry, found = program.entry.instructions, set()
    for done in (entry[name] for name in program.entry.root.operands if entry[name].opcode == "copy-done"):
        start = entry[done.operands[0]]
        if start.arrays[1].on_chip:
            found |= {start.name, done.name}
    return found


def _scatters(program: Program, instruction: Instruction) -> bool:
    """Returns True if its result is that of a scatter into its operand."""
    if instruction.opcode != "fusion":
        return instruction.opcode == "scatter"
    return _scatters(program, program.computations[instruction.called("calls")].root)
