"""Programs compiled for accelerators that nobody here has: what these are, and what a compiled program consists of.

Compiling for a GPU takes JAX's CUDA plugin and NVIDIA's compilers, for a TPU libtpu: the extra `aot`. Neither needs a
device, a driver or a machine that has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from recjax.bench.compile_report import sample
from recjax.config.run import RunConfig
from recjax.embedding.bind import bind
from recjax.embedding.routing import device
from recjax.parallel.mesh import AXES, sharded
from recjax.train.compile_only import abstract_inputs, abstract_state
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer, build_trainer
from recjax.utils.hlo import Instruction, Program, read_program

DEVICES = 8
_WHEELS = {
    "h200": ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc", "nvidia.nvjitlink"),
    "v6e": ("libtpu",),
}


def missing(target: str) -> str:
    """Returns why nothing can be compiled for a target, "" if it can."""
    lacking = [name for name in _WHEELS[target] if not _found(name)]
    return f"{', '.join(lacking)} not installed: pip install -e '.[aot]'" if lacking else ""


def _found(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


def h200() -> str:
    """The description of an NVIDIA H200 that XLA takes in place of a device: figures of NVIDIA's data sheets.

    A stream_executor.GpuTargetConfigProto as text. Versions are those of the libraries that the compiler may count on.
    """
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": 228 * 1024,
        "shared_memory_per_block_optin": 227 * 1024,
        "threads_per_core_limit": 2048,
        "core_count": 132,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": 4800 * 10**9,
        "l2_cache_size": 50 * 2**20,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 141 * 2**30,
        "device_address_bits": 64,
    }
    # With the links between GPUs XLA makes small all-reduces itself; JAX 0.10 knows no such field.
    newer = "device_interconnect_info { active_links: 18 }" if jax.__version_info__ >= (0, 12) else ""
    lines = "\n".join(f"  {name}: {value}" for name, value in limits.items())
    return textwrap.dedent("""
        gpu_device_info {{
        {lines}
          cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
          device_vendor: "NVIDIA Corporation"
          platform_version: "Compute Capability 9.0a"
          name: "NVIDIA H200"
          driver_version: "13.0.0"
          runtime_version: "12.8.0"
          compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"
          {newer}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "NVIDIA H200"
    """).format(lines=lines, newer=newer)


@functools.cache
def devices(target: str) -> tuple[Any, ...]:
    """DEVICES devices of a target, for which programs can be compiled and nothing else."""
    if target == "h200":
        found = topologies.get_topology_desc("gpu", "cuda", topology=f"1x1x{DEVICES}", target_config=h200())
    else:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no machine to ask what it is
        found = topologies.get_topology_desc("v6e:2x4", "tpu")
    return tuple(found.devices)


def moved(trainer: Trainer, target: str) -> Trainer:
    """The trainer on as many devices of the target as its mesh has; nothing of it can run."""
    there = np.array(devices(target)[: trainer.mesh.devices.size]).reshape(trainer.mesh.devices.shape)
    return dataclasses.replace(trainer, mesh=Mesh(there, AXES, axis_types=(AxisType.Auto,) * len(AXES)))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for a target.

    Attributes:
      text: of the optimised program.
      memory: what it takes, as XLA says.
      trainer: whose it is.
      capacities: for which.
    """

    text: str
    memory: Any
    trainer: Trainer
    capacities: dict[str, int]

    @functools.cached_property
    def program(self) -> Program:
        return read_program(self.text)


@functools.cache
def compiled(config: RunConfig, target: str, what: str, ragged: bool = False) -> Compiled:
    """The program `what` of a config for a target: train_step, predict, or a step of routing: sort, layout.

    With `ragged` ids and rows travel without padding, which a config for CPUs cannot ask for.
    """
    trainer = build_trainer(config, weights=False)
    capacities = sample(trainer).capacities
    if ragged:
        bound = bind(trainer.plan, *specs(trainer.config, trainer.source.schema), DEVICES, ragged=True)
        trainer = dataclasses.replace(trainer, bound=bound)
    trainer = moved(trainer, target)
    state, inputs = abstract_state(trainer), abstract_inputs(trainer, capacities)
    if what == "train_step":
        lowered = trainer.step_program.lower(state, inputs)
    elif what == "predict":
        lowered = trainer.predict_program.lower(state, inputs)
    else:
        lowered = device.make_sort(trainer.bound, trainer.mesh).lower(inputs.routing.features)
        if what == "layout":
            over, (located, _) = sharded(trainer.mesh), lowered.out_info
            located = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over), located)
            make = device.make_layout(trainer.bound, trainer.mesh)
            lowered = make.lower(inputs.routing.features, located, device.sizes(trainer.bound, capacities))
    made = lowered.compile()
    return Compiled(made.as_text() or "", made.memory_analysis(), trainer, capacities)


def compiled_alone(function: Callable[..., Any], target: str, *shapes: jax.ShapeDtypeStruct) -> Program:
    """A function of arrays for one device of a target; the first array is donated."""
    one = SingleDeviceSharding(devices(target)[0])
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


_NO_KERNEL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "while", "conditional", "call", "opt-barrier",
}  # fmt: skip


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


def loops(program: Program) -> int:
    """Loops of the program."""
    return sum(instruction.opcode == "while" for instruction in instructions(program))


def copies(program: Program, size: int) -> list[str]:
    """Operations that make an array of `size` bytes or more, other than by scattering into one that is there."""
    fused = {i.called("calls") for i in instructions(program) if i.opcode == "fusion"}  # in which nothing is stored
    stored = [c for c in program.computations.values() if c.name not in fused]
    found = []
    for instruction in (i for computation in stored for i in computation.instructions.values()):
        largest = max((array.bytes for array in instruction.arrays), default=0)
        if largest < size or instruction.opcode in _NO_KERNEL or _scatters(program, instruction):
            continue
        if not re.fullmatch(r"(call|async)-(start|update|done)", instruction.opcode):  # which name what they are given
            found.append(f"{instruction.opcode} {instruction.name} of {instruction.scope}")
    return found


def _scatters(program: Program, instruction: Instruction) -> bool:
    """Returns True if its result is that of a scatter into its operand."""
    if instruction.opcode != "fusion":
        return instruction.opcode == "scatter"
    return _scatters(program, program.computations[instruction.called("calls")].root)
