"""Devices that nobody here has, for which programs are compiled and nothing else: H200, TPU v5e and v6e.

Compiling for a GPU takes JAX's CUDA plugin and NVIDIA's compilers, for a TPU libtpu: the extra `aot`. Neither needs a
device, a driver or a machine that has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import textwrap
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from recjax.embedding.bind import in_lines
from recjax.errors import ConfigError
from recjax.parallel.mesh import AXES
from recjax.train.dense import flattened
from recjax.train.module import parameters
from recjax.train.trainer import Trainer

PLATFORM = {"h200": "gpu", "v5e": "tpu", "v6e": "tpu"}  # of each target
_TPUS = {"v5e": ("v5e:4x4", 16), "v6e": ("v6e:2x4", 8)}  # the mesh that is described, and how many it has
_WHEELS = {
    "h200": ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc", "nvidia.nvjitlink"),
    "v5e": ("libtpu",),
    "v6e": ("libtpu",),
}


def missing(target: str) -> str:
    """Returns why nothing can be compiled for a target, "" if it can."""
    lacking = [name for name in _WHEELS[target] if not _found(name)]
    return f"{', '.join(lacking)} not installed: pip install -c constraints.txt -e '.[aot]'" if lacking else ""


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
def devices(target: str, count: int) -> tuple[Any, ...]:
    """Returns so many devices of a target, for which programs can be compiled and nothing else.

    Raises:
      ConfigError: what compiles for it is not installed, or there are more than it is described for.
    """
    if lacking := missing(target):
        raise ConfigError(f"--target {target}: {lacking}.")
    if target == "h200":
        try:
            topology = topologies.get_topology_desc("gpu", "cuda", topology=f"1x1x{count}", target_config=h200())
        except NotImplementedError as error:
            raise ConfigError(
                f"--target {target}: JAX did not load its CUDA plugin ({error}), which asks for libraries of a GPU "
                "unless JAX_PLATFORMS=cpu is set. Set it, before anything has started JAX."
            ) from None
        return tuple(topology.devices)
    name, most = _TPUS[target]
    if count > most:
        raise ConfigError(f"--target {target}: programs for up to {most} devices are compiled; set mesh.devices.")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no machine to ask what it is
    return tuple(topologies.get_topology_desc(name, "tpu").devices[:count])


def moved(trainer: Trainer, target: str) -> Trainer:
    """The trainer on as many devices of the target as its mesh has; nothing of it can run."""
    there = np.array(devices(target, trainer.mesh.devices.size)).reshape(trainer.mesh.devices.shape)
    mesh = Mesh(there, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, trainer.dtype), parameters(trainer.model))
    bound = trainer.bind(trainer.plan, mesh)
    if trainer.bound.cached:
        bound = in_lines(trainer.bound) if PLATFORM[target] == "tpu" else trainer.bound
    dense = flattened(trainer.dense, params, trainer.tx, PLATFORM[target])
    return dataclasses.replace(trainer, bound=bound, mesh=mesh, dense=dense)
