"""The platform that a program is traced for, which need not be that of JAX's default back end."""

from __future__ import annotations

import jax


def target_platform() -> str:
    """Returns "cpu", "gpu" or "tpu": inside `jax.shard_map` the mesh's, elsewhere the default back end's.

    A mesh of CPU devices may stand in a process that also has GPUs, and one of described devices, for which programs
    are compiled and not run, in a process that has none.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform
