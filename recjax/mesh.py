"""The device mesh and the sharding rules.

Every mesh has three named axes, of size 1 where they are unused:

  replica  groups of devices that each hold all tables (2D parallelism)
  host     machines within a group
  device   accelerators within a machine

Tables are split over MODEL_AXES. The batch is split over BATCH_AXES. Dense parameters are replicated.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.errors import ConfigError, DeviceError

AXES = ("replica", "host", "device")
MODEL_AXES = ("host", "device")
BATCH_AXES = ("host", "device")  # there is one replica; its axis joins here when replica groups exist


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Which devices a run uses."""

    devices: int = 0  # total devices over all processes; 0 takes all there are
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # auto takes the best that JAX finds

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ConfigError(f"devices is {self.devices}; give a positive number, or 0 for all devices.")


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh, and on CPU first asks JAX for as many host devices as the config wants.

    Host devices can only be made before JAX's back end starts; later (in a notebook, say) the ones
    that exist are used, if they are enough.

    Raises:
      DeviceError: fewer devices than `config.devices`, or none of the platform.
    """
    if not _backend_started():
        _prepare_backend(config)
    try:
        devices = jax.devices() if config.platform == "auto" else jax.devices(config.platform)
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS names a platform without devices
        why = str(error) or f"the environment says JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
        raise DeviceError(
            f"mesh.platform={config.platform}: JAX finds no such device ({why}). Install recjax with the extra for "
            "your accelerator (cuda12, cuda13 or tpu), or set mesh.platform=cpu."
        ) from error
    wanted = config.devices or len(devices)
    if len(devices) < wanted:
        kind = devices[0].platform
        if kind == "cpu":
            how = (
                "JAX had started before recjax could make host devices: restart the process (or notebook kernel) and "
                f"build the mesh first, or call jax.config.update('jax_num_cpu_devices', {wanted}) at its very top"
            )
        else:
            how = f"set mesh.devices={len(devices)}, or mesh.platform=cpu for {wanted} host devices"
        raise DeviceError(f"mesh.devices={wanted}, but JAX sees {len(devices)} {kind} device(s). To mend it, {how}.")
    return jax.make_mesh((1, 1, wanted), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:wanted])


def _backend_started() -> bool:
    from jax._src import xla_bridge  # JAX has no public call that asks without starting one

    return xla_bridge.backends_are_initialized()


def _prepare_backend(config: MeshConfig) -> None:
    if config.platform in ("cpu", "auto") and config.devices > 1:
        jax.config.update("jax_num_cpu_devices", config.devices)
        # Each host device needs a thread that may block in a collective; with fewer threads than
        # devices JAX 0.10 deadlocks. The variable is read once, when the back end starts.
        os.environ.setdefault("NPROC", str(max(16, 2 * config.devices)))
    if config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, P())


def sharded(mesh: Mesh, axes: tuple[str, ...] = BATCH_AXES) -> NamedSharding:
    """The leading axis split evenly over `axes`, which must divide it."""
    return NamedSharding(mesh, P(axes))
