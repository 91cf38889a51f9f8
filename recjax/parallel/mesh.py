"""The device mesh and the sharding rules.

Every mesh has three named axes, of size 1 where they are unused:

  replica  groups of devices that each hold all tables (2D parallelism)
  host     machines within a group
  device   accelerators within a machine

Tables are split over MODEL_AXES, in each replica group again. The batch is split over BATCH_AXES, and so are dense
parameters if they are not replicated (`recjax/train/dense.py`). Devices are numbered group by group and host by host:
device d of host h of group r is number r * (devices / replicas) + h * (devices of a host) + d. So a group's machines
stand side by side, and a machine's devices too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax import kernels
from recjax.errors import ConfigError, DeviceError
from recjax.parallel import distributed, waiting
from recjax.settings.values import check_ranges, either

AXES = ("replica", "host", "device")
BATCH_AXES = AXES
MODEL_AXES = ("host", "device")
ACROSS_GROUPS = ("replica",)
ACROSS_HOSTS, INSIDE_HOST = ("host",), ("device",)  # the two steps of an exchange
_DEVICE_FILES = Path("/dev")


def largest_anywhere(numbers: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the largest of each of some integers, [] each, over all devices; inside `jax.shard_map` over BATCH_AXES.

    One all-reduce, along the axes along which they may differ at all.
    """
    if not numbers:
        return {}
    together = jnp.stack(kernels.vary_alike(*numbers.values()))
    axes = tuple(axis for axis in BATCH_AXES if axis in jax.typeof(together).manual_axis_type.varying)
    return dict(zip(numbers, jax.lax.pmax(together, axes) if axes else together, strict=True))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices that a run uses."""

    devices: int = 0  # number of devices over all processes; 0 takes all there are
    # Platform of the devices; auto takes the best that JAX finds
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    hosts: int = 1  # number of machines, with equally many devices in each; host devices of one process may play them
    # Number of groups of equally many devices, each of which holds all tables: see train.replica_sync
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ConfigError(f"devices is {self.devices}; give a positive number, or 0 for all devices.")
        check_ranges(self, hosts=(1, None), replicas=(1, None))
        _ = self.shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of AXES. Where all devices are to be taken, those of as few as there can be."""
        return shape(self.devices or max(self.hosts, self.replicas), self.hosts, self.replicas)


def per_host(devices: int, hosts: int) -> int:
    """Devices of each host.

    Raises:
      ConfigError: they are not equally many.
    """
    return _shared(devices, hosts, "hosts", "mesh.hosts")


def _shared(devices: int, among: int, what: str, key: str) -> int:
    """Devices of each of so many hosts or groups, whose number is the setting `key` (ConfigError)."""
    if devices % among:
        fitting = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        raise ConfigError(
            f"{devices} devices cannot be shared evenly among {among} {what}. Set {key} to {either(fitting)}, or "
            "mesh.devices to a multiple of it."
        )
    return devices // among


def shape(devices: int, hosts: int, replicas: int) -> tuple[int, int, int]:
    """Sizes of AXES: replica groups, hosts within each, devices of each within a group.

    A group has several whole hosts, or one host, or a part of one.

    Args:
      devices: how many in all.
      hosts: machines that they stand in.
      replicas: groups.

    Raises:
      ConfigError: one of them cannot be shared evenly.
    """
    if hosts % replicas and replicas % hosts:
        raise ConfigError(
            f"{replicas} replica groups on {hosts} hosts: a group must have whole hosts, or lie within one. Set "
            "mesh.replicas to a divisor or a multiple of mesh.hosts."
        )
    per_host(devices, hosts)
    of_group, group_hosts = _shared(devices, replicas, "replica groups", "mesh.replicas"), max(1, hosts // replicas)
    return replicas, group_hosts, per_host(of_group, group_hosts)


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh, and on CPU first asks JAX for as many host devices as the config wants.

    Host devices can only be made before JAX's back end starts; later (in a notebook, say) the ones
    that exist are used, if they are enough.

    Raises:
      ConfigError: `config.hosts` does not divide the number of devices.
      DeviceError: fewer devices than `config.devices`, or none of the platform.
    """
    if not _backend_started():
        _prepare_backend(config)
    try:
        with waiting.saying(f"starting {f'{config.devices:,}' if config.devices else 'the'} devices"):
            devices = jax.devices() if config.platform == "auto" else jax.devices(config.platform)
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS names a plugin that is missing
        asked = f"mesh.platform={config.platform}"
        if config.platform == "auto" and "JAX_PLATFORMS" in os.environ:
            asked += f" with JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}"
        raise DeviceError(
            f"{asked}: JAX finds no such device ({str(error) or 'not installed'}). Install recjax with the extra for "
            "your accelerator (cuda12, cuda13 or tpu), or set mesh.platform=cpu."
        ) from error
    wanted = config.devices or len(devices)
    if len(devices) < wanted:
        kind = devices[0].platform
        fewer = f"mesh.devices={len(devices)}" + (" mesh.hosts=1" if config.hosts > 1 else "")
        fewer += ", on which no number depends" if config.replicas == 1 else " mesh.replicas=1"
        if kind == "cpu":
            how = (
                f"Pass {fewer}: to the command, recjax.load or recjax.evaluate. Or, since host devices can only be "
                "made before JAX starts, and it has started in this process: restart it (or the notebook's kernel) and "
                f"run the largest mesh first, or call jax.config.update('jax_num_cpu_devices', {wanted}) at its very "
                "top."
            )
        else:
            how = f"Pass {fewer}, or mesh.platform=cpu for {wanted} host devices."
        raise DeviceError(f"mesh.devices={wanted}, but JAX sees {len(devices)} {kind} device(s). {how}")
    if jax.process_count() > 1 and len(devices) != wanted:
        raise ConfigError(
            f"mesh.devices={wanted}, but the {jax.process_count()} processes have {len(devices)} devices together, and "
            f"each of them must take part with all of its own. Set mesh.devices={len(devices)}, or 0."
        )
    sizes = shape(wanted, config.hosts, config.replicas)
    # In JAX's order, that is process by process, so that a process holds neighbours: see `Share`.
    return Mesh(np.asarray(devices[:wanted]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def left_aside(config: MeshConfig) -> str | None:
    """The note that a run on the CPU leaves a GPU of this machine aside; None where it does not.

    The GPU is found by its device file, which neither starts a back end nor needs JAX's plugin for it.
    """
    if config.platform != "cpu" or not any(_DEVICE_FILES.glob("nvidia[0-9]*")):
        return None
    return (
        "note: mesh.platform=cpu, so this runs on the CPU, though this machine has a GPU. With recjax's extra cuda12 "
        "or cuda13, mesh.platform=gpu mesh.devices=0 takes all GPUs."
    )


def _backend_started() -> bool:
    from jax._src import xla_bridge  # JAX has no public call that asks without starting one

    return xla_bridge.backends_are_initialized()


def _prepare_backend(config: MeshConfig) -> None:
    # The setting may also come from the environment (JAX_NUM_CPU_DEVICES).
    processes = distributed.processes()
    if config.devices % processes:
        raise ConfigError(
            f"mesh.devices={config.devices} cannot be shared evenly among {processes} processes. Set it to a multiple "
            "of that, or to 0 for all devices that there are."
        )
    host_devices = config.devices // processes or jax.config.values["jax_num_cpu_devices"]
    if config.platform in ("cpu", "auto") and host_devices > 1:
        jax.config.update("jax_num_cpu_devices", host_devices)
        # Before 0.12 each host device needs a thread of XLA's pool that may block in a collective; with fewer threads
        # than devices JAX 0.10 deadlocks. Later a pool larger than the machine would only make threads wait for cores.
        # The variable is read once, when the back end starts.
        if jax.__version_info__ < (0, 12):
            os.environ.setdefault("NPROC", str(max(16, 2 * host_devices)))
    if config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")


@dataclasses.dataclass(frozen=True)
class Share:
    """The devices of a mesh that one process feeds: `count` of them from number `first` on, of `total`."""

    total: int
    first: int
    count: int

    @classmethod
    def of(cls, mesh: Mesh) -> Share:
        """Part of this process."""
        return cls.of_all(mesh)[jax.process_index()]

    @classmethod
    def of_all(cls, mesh: Mesh) -> list[Share]:
        """Shares of all processes, each of which has devices that stand side by side."""
        processes = [device.process_index for device in mesh.devices.flat]
        return [
            cls(len(processes), processes.index(process), processes.count(process))
            for process in range(max(processes) + 1)
        ]


def put(tree: Any, shardings: Any) -> Any:
    """Puts host values, which all processes have alike, on the devices.

    Args:
      tree: arrays or NumPy's.
      shardings: one for all, or a tree of them like the top of `tree`.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree, jax.tree.broadcast(shardings, tree))


def put_share(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays on the mesh, of which each process has its own devices' parts, one after the other."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharded(mesh))
    share, sharding = Share.of(mesh), sharded(mesh)

    def one(x: Any) -> jax.Array:
        x = np.asarray(x)
        rows = len(x) // share.count
        size, first = rows * share.total, rows * share.first

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            start, stop, _ = (index or (slice(None),))[0].indices(size)
            return x[start - first : stop - first]

        return jax.make_array_from_callback((size, *x.shape[1:]), sharding, of_device)

    return jax.tree.map(one, tree)


def whole(x: jax.Array) -> np.ndarray:
    """An array of the mesh in the memory of every process, which all must ask for together."""
    return np.asarray(everywhere(x))


def everywhere(x: jax.Array) -> jax.Array:
    """An array of the mesh that every process can read, which all must ask for together; nothing is awaited."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    sharding: Any = x.sharding
    copied: jax.Array = _replicate(sharding.mesh)(x)
    return copied


def parts_here(mesh: Mesh, axes: tuple[str, ...], parts: int) -> tuple[int, ...]:
    """The parts, of an array whose leading axis is split over `axes` into so many, that this process's devices hold."""
    held = sharded(mesh, axes).addressable_devices_indices_map((parts,)).values()
    return tuple(sorted({index[0].start or 0 for index in held if index}))


def first_holders(mesh: Mesh, axes: tuple[str, ...], parts: int) -> list[int]:
    """The process of the first device that holds each of these parts."""
    found: dict[int, int] = {}
    where: Any = sharded(mesh, axes).devices_indices_map((parts,))
    for device, index in where.items():
        found.setdefault((index or (slice(None),))[0].start or 0, device.process_index)
    return [found[part] for part in range(parts)]


def own(x: jax.Array) -> np.ndarray:
    """The parts of this process's devices of an array whose leading axis is split over the mesh, in their order."""
    if x.is_fully_addressable:
        return np.asarray(x)
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=replicated(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, P())


def sharded(mesh: Mesh, axes: tuple[str, ...] = BATCH_AXES) -> NamedSharding:
    """The leading axis split evenly over `axes`, which must divide it."""
    return NamedSharding(mesh, P(axes))
