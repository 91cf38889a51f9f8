"""Kernels for GPUs, in Pallas for Triton: each beside a form of plain XLA, which is its reference and its fall-back.

`recjax.kernels.available_on_gpu` says whether they are to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from recjax import kernels


def run_kernel(
    name: str,
    kernel: Callable[..., None],
    programs: int,
    shapes: Sequence[tuple[int, ...]],
    operands: Sequence[jax.Array],
    *,
    warps: int,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs a kernel, which sees all arrays whole and flat, and which asks `pl.program_id(0)` for its part.

    Args:
      name: what compiled programs and profiles call it, after "recjax_".
      kernel: (references of the operands and of the results) -> None.
      programs: how many run, in any order.
      shapes: of the results, float32.
      operands: the arrays. Inside `jax.shard_map` all are made to vary over the same axes, and so do the results.
      warps: groups of 32 threads for each program.
      aliases: number of the operand -> number of the result that takes its memory.
      interpret: whether to run it by XLA operations, on any platform.
    """
    from jax.experimental import pallas as pl  # some hundred milliseconds, which only GPUs are worth
    from jax.experimental.pallas import triton

    alike = kernels.vary_alike(*operands)
    like = jax.typeof(alike[0])
    where = NamedSharding(like.sharding.mesh, PartitionSpec()) if like.manual_axis_type.varying else None
    results = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where, manual_axis_type=like.manual_axis_type)
        for shape in shapes
    ]

    def whole(shape: tuple[int, ...]) -> Any:
        return pl.BlockSpec(shape, lambda program: (0,) * len(shape))

    launch = pl.pallas_call(
        kernel,
        name=f"recjax_{name}",
        grid=(programs,),
        in_specs=[whole((x.size,)) for x in alike],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=results,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
    )
    return list(launch(*[x.reshape(-1) for x in alike]))
