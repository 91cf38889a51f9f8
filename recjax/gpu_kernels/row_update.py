"""Adagrad, row-wise Adagrad and SGD on the touched rows of a table on a GPU, in place and in one pass.

The form of plain XLA is `Rule.apply` of `recjax/embedding/optim.py` between a gather and a scatter of rows and slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from recjax import gpu_kernels


@dataclasses.dataclass(frozen=True)
class RowRule:
    """A rule and its constants, named as in `recjax/embedding/optim.py`.

    Attributes:
      kind: "rowwise_adagrad" has a slot [R], "adagrad" one [R, D], "sgd" none.
      eps: term added to the root.
      l2: factor of the row that is added to the gradient.
      weight_decay: decoupled decay.
    """

    kind: Literal["rowwise_adagrad", "adagrad", "sgd"]
    eps: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0


def update_in_place(
    table_RxD: jax.Array,
    slot: jax.Array | None,
    touched_M: jax.Array,
    grads_MxD: jax.Array,
    scalars: tuple[jax.Array, jax.Array, jax.Array],
    rule: RowRule,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the table and its slot after a step, in the memory of those before it.

    Args:
      table_RxD: float32; donated.
      slot: sums of squares, [R] or [R, D]; donated. None for SGD.
      touched_M: int32, rows, none twice; beyond R where there is none.
      grads_MxD: their gradients, summed over the batch.
      scalars: what the gradients are multiplied with, the learning rate, and whether to change anything, [] each.
      rule: the rule.
      interpret: as for `gpu_kernels.run_kernel`.
    """
    R, D = table_RxD.shape
    numbers = jnp.stack([x.astype(jnp.float32) for x in scalars])
    operands = [table_RxD, *([] if slot is None else [slot])]
    shapes, count = [(x.size,) for x in operands], len(operands)
    results = gpu_kernels.run_kernel(
        "update_rows",
        functools.partial(_update_row, R=R, D=D, rule=rule, count=count),
        len(touched_M),
        shapes,
        [*operands, touched_M, grads_MxD, numbers],
        warps=1,
        aliases={number: number for number in range(count)},
        interpret=interpret,
    )
    table = results[0].reshape(R, D)
    return table, None if slot is None else results[1].reshape(slot.shape)


def _update_row(*references: Any, R: int, D: int, rule: RowRule, count: int) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    before, (touched, grads, numbers), after = (
        references[:count],
        references[count : count + 3],
        references[count + 3 :],
    )
    place, d = pl.program_id(0), jnp.arange(D, dtype=jnp.int32)
    row = triton.load(touched.at[place])
    scale, rate, ok = (triton.load(numbers.at[jnp.int32(number)]) for number in range(3))

    @pl.when((row >= 0) & (row < R) & (ok > 0))
    def _() -> None:
        at = row * D + d
        values_D = triton.load(before[0].at[at])
        grads_D = triton.load(grads.at[place * D + d]) * scale
        if rule.l2:
            grads_D += rule.l2 * values_D
        if rule.weight_decay:
            values_D *= 1 - rate * rule.weight_decay
        if rule.kind == "rowwise_adagrad":
            squares = triton.load(before[1].at[row]) + jnp.sum(grads_D * grads_D) / D
            triton.store(after[1].at[row], squares)
            grads_D /= jnp.sqrt(squares) + rule.eps
        elif rule.kind == "adagrad":
            squares_D = triton.load(before[1].at[at]) + grads_D * grads_D
            triton.store(after[1].at[at], squares_D)
            grads_D /= jnp.sqrt(squares_D) + rule.eps
        triton.store(after[0].at[at], values_D - rate * grads_D)
