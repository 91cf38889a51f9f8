"""Gradients over the whole batch: their means, the one factor that clips them all, and whether all are finite.

All but `slotted` and `explain`, which are the host's: inside `jax.shard_map` over BATCH_AXES, on one device's block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.config.train import TrainConfig
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.residuals import Gradients, Proposed
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.embedding.sharding import Homes
from recjax.kernels import target_platform
from recjax.parallel.mesh import BATCH_AXES, largest_anywhere
from recjax.train.dense import Dense
from recjax.utils.phases import Phase


def mean_over_batch(
    dense: Dense, grads: Any, loss: jax.Array, weights_b: jax.Array, order: list[int]
) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the dense gradients and the loss as weighted means over the global batch, and the sum of its weights.

    Args:
      dense: how dense parameters are held; its `reduce` sums over the devices.
      grads: gradients of this device's samples.
      loss: sum of w * log loss of these.
      weights_b: their weights.
      order: of the leaves, as `gradient_order` gives it.
    """
    with jax.named_scope(Phase.DENSE_GRADS):
        grads, loss, weight = dense.reduce(grads, loss, jnp.sum(weights_b), order)
        return jax.tree.map(lambda g: g / weight, grads), loss / weight, weight


def sum_over_batch(
    dense: Dense, grads: Any, loss: jax.Array, sums_T: jax.Array, totals_T: jax.Array, order: list[int]
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """The same for tasks, whose weights are divided already: gradients, loss, mean loss of each task and total weight.

    Args:
      dense: as for `mean_over_batch`.
      grads: likewise.
      loss: of this device's samples.
      sums_T: that of each task.
      totals_T: sums of the weights over the global batch. A batch without any weight has no loss: NaN.
      order: as for `mean_over_batch`.
    """
    with jax.named_scope(Phase.DENSE_GRADS):
        grads, loss, _ = dense.reduce(grads, loss, loss * 0, order)
        losses_T = jax.lax.psum(sums_T, BATCH_AXES)
        nan = jnp.full((), jnp.nan, loss.dtype)
        weight = jnp.sum(totals_T)
        return grads, jnp.where(weight > 0, loss, nan), jnp.where(totals_T > 0, losses_T, nan), weight


def clip_by_global_norm(
    norm: float,
    dense: Dense,
    dense_grads: Any,
    embeddings: ShardedEmbeddings,
    sparse_grads: Gradients,
    scale: jax.Array,
    loss: jax.Array,
    homes: Homes,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """Scales all gradients down to a largest norm of them together, each distinct row counted once.

    Args:
      norm: the largest; 0 leaves all as they are.
      dense: how dense parameters are held.
      dense_grads: means over the batch.
      embeddings: the tables.
      sparse_grads: their gradients, summed over the batch; independent replica groups have rows of their own.
      scale: [], what turns those into means.
      loss: [], the mean over the batch. The sum of squares starts from 0 times it, which ties the norm to the
        all-reduce that the loss came with.
      homes: of the slots of caches.

    Returns:
      dense gradients, clipped; `scale` times the factor of clipping; and {"bad_norm": int32 [], whether the norm is
      not finite: squares of finite gradients may overflow}, {} if nothing is clipped.
    """
    if not norm:
        return dense_grads, scale, {}
    with jax.named_scope(Phase.CLIP):
        of_dense = dense.total(sum((_squares(g) for g in jax.tree.leaves(dense_grads)), loss * 0))
        of_tables = embeddings.squares(sparse_grads, scale, homes)
        squares = embeddings.total(of_tables, of_dense)
        factor = jnp.minimum(1, norm / jnp.sqrt(squares))
        factor = jnp.where(squares > 0, factor, 1)
        dense_grads = jax.tree.map(lambda g: g * factor, dense_grads)
    return dense_grads, scale * factor, {"bad_norm": (~jnp.isfinite(squares)).astype(jnp.int32)}


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x))


Pairs = Sequence[tuple[jax.Array, jax.Array]]


def slotted(bound: BoundPlan) -> list[Group]:
    """The table groups whose optimizer keeps slots, in the order of the step's "bad_slots"."""
    return [group for group in bound.groups if group.slots()]


def count_in_dense(grads: Any, before: Any, after: Any) -> jax.Array:
    """Counts what makes an update of the dense part not finite, of what this device holds of it: int32 [2].

    Args:
      grads: its gradients, as they go to the optimizer.
      before: the optimizer's state.
      after: the same as the update would leave it.
    """
    leaves = jax.tree.leaves(grads)
    one = jnp.ones((), leaves[0].dtype if leaves else jnp.float32)
    with jax.named_scope(Phase.FINITE_CHECK):
        return spoilt(leaves, one, before, after)


def count_in_tables(gradients: Gradients, scale: jax.Array, proposed: Mapping[str, Proposed]) -> dict[str, jax.Array]:
    """Counts what makes an update of this device's rows not finite: group name -> int32 [2].

    Args:
      gradients: of the rows.
      scale: [], what these are multiplied with.
      proposed: the update, as `ShardedEmbeddings.propose` gave it.
    """
    with jax.named_scope(Phase.FINITE_CHECK):
        return {
            name: spoilt([grads.sums], scale, new.before, new.slots)
            for (name, grads), new in zip(gradients.items(), proposed.values(), strict=True)
        }


def agree_on_step(bad: Sequence[jax.Array], needs: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns whether no device has counted anything bad, bool [], and the largest of each size that some need.

    One all-reduce of a few integers. It waits for what is counted, so that XLA combines it with none before.

    Args:
      bad: counts, int32 of any shape, none negative.
      needs: sizes, int32 [] each.
    """
    with jax.named_scope(Phase.FINITE_CHECK):
        count = sum((jnp.sum(x, dtype=jnp.int32) for x in bad), jnp.int32(0))
        largest = largest_anywhere({**needs, "bad": count})
        return largest.pop("bad") == 0, largest


def count_by_name(
    embeddings: ShardedEmbeddings, dense: Dense, in_dense: jax.Array, in_tables: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Sums counts of values that are not finite over all devices, each value once: one all-reduce, or two.

    Args:
      embeddings: the tables.
      dense: how the dense part is held.
      in_dense: as `count_in_dense` gave it.
      in_tables: as `count_in_tables` did.

    Returns:
      "bad_dense", "bad_tables" int32 [], gradients; "bad_opt" int32 [], state of the dense optimizer; "bad_slots" int32
      [groups that have slots], in the order of `slotted`.
    """
    names = [group.name for group in slotted(embeddings.bound)]
    with jax.named_scope(Phase.FINITE_CHECK):
        counts = {name: _in_place_among(names, name, of_group) for name, of_group in in_tables.items()}
        total, of_dense = embeddings.total(counts, jnp.zeros(1 + len(names), jnp.int32)), dense.total(in_dense)
    return {"bad_dense": of_dense[0], "bad_opt": of_dense[1], "bad_tables": total[0], "bad_slots": total[1:]}


def _in_place_among(names: Sequence[str], name: str, counts: jax.Array) -> jax.Array:
    """Counts of one group's gradients and slots, the latter in their place among those of `names`: int32 [1 + n]."""
    gradients, slots = counts
    return jnp.stack([gradients, *(slots if other == name else slots * 0 for other in names)])


def after(count: jax.Array, scale: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns `scale`, but made after all dense gradients and the loss are summed.

    XLA would combine a later all-reduce with those of the dense part, and let them wait, if it did not depend on them.
    So it shall: no count is negative, which XLA does not know.

    Args:
      count: int32 [], of non-finite dense gradients.
      scale: [], what row gradients are multiplied with.
      loss: [], the mean over the batch.
    """
    return jnp.where(count < 0, loss, scale)


def spoilt(grads: Sequence[jax.Array], scale: jax.Array, before: Any, after: Any) -> jax.Array:
    """Counts of non-finite values in an update: int32 [2].

    Finite gradients may have squares that are not, and sums of squares overflow later still: a slot that is infinite
    once would keep its weights where they are forever.

    Args:
      grads: gradients.
      scale: what they are multiplied with.
      before: slots, or the state of an optax optimizer; leaves that are no floats do not count.
      after: the same as the update would leave it.

    Returns:
      The number of scaled gradients that are not finite, and that of values in `after` that are not and were before.
      (So a run in whose checkpoint some are already goes on.)

    XLA's code for CPUs writes an integer for each element to memory before it adds them up. A sum of floats it makes in
    one pass instead, and no sum with a term that is not finite is finite itself. So there elements are counted only if
    that fails (as it also may where all are finite, if the sum overflows). A gradient that is not finite makes the
    slots that it enters so too: where there are slots, their sum will do.
    """
    pairs = [
        pair
        for pair in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if jnp.issubdtype(pair[0].dtype, jnp.floating)
    ]

    def counted(scale: jax.Array, grads: Sequence[jax.Array], pairs: Pairs) -> jax.Array:
        bad = (jnp.sum(~jnp.isfinite(g * scale), dtype=jnp.int32) for g in grads)
        gone = (jnp.sum(jnp.isfinite(old) & ~jnp.isfinite(new), dtype=jnp.int32) for old, new in pairs)
        return jnp.stack([sum(bad, jnp.int32(0)), sum(gone, jnp.int32(0))])

    def none(scale: jax.Array, *arrays: Any) -> jax.Array:  # 0, but differing between devices like the count
        return counted(scale, *jax.tree.map(lambda x: jnp.atleast_1d(x)[:0], arrays))

    if target_platform() != "cpu":  # there counting is one pass anyway, and a device must not wait for a choice
        return counted(scale, grads, pairs)
    sums = [jnp.sum(new) for _, new in pairs] or [jnp.sum(g * scale) for g in grads]
    return jax.lax.cond(jnp.isfinite(sum(sums, scale * 0)), none, counted, scale, grads, pairs)


def explain(config: TrainConfig, bound: BoundPlan, step: int, place: str, result: Mapping[str, Any]) -> str:
    """Message about a step that was not applied.

    Args:
      config: of the training.
      bound: of its tables.
      step: which, from 1.
      place: the samples that it covers.
      result: its metrics, as `make_train_step` gives them with `StepOptions.counts`.
    """
    found = [
        f"{int(result[key])} of its {what}"
        for key, what in (("bad_dense", "dense gradients"), ("bad_tables", "table gradients"))
        if int(result[key])
    ]
    if not found and int(result.get("bad_norm", 0)):
        found.append("the norm of its gradients, whose squares overflow")
    if not found:  # finite gradients, of which the optimizers make what is not
        kept = [(int(result["bad_opt"]), config.optimizer.kind, "the dense part")]
        for group, count in zip(slotted(bound), np.asarray(result["bad_slots"]).tolist(), strict=True):
            names = group.table_names
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            kept.append((count, group.optimizer.kind, f"the rows of {', '.join(names[:5])}{more}"))
        found += [f"{count} slots of {kind} for {where}, which would overflow" for count, kind, where in kept if count]
    if int(result["bad_loss"]):
        found.insert(0, f"its loss ({float(result['loss'])})")
    return (
        f"step {step} is not finite: {' and '.join(found)}. It covers {place}. The step was not applied and no "
        "checkpoint was written after it, so the run can be resumed. A learning rate that is too high is the usual "
        "cause: lower train.optimizer.learning_rate or embedding.optimizer.learning_rate and start again in another "
        "--out."
    )
