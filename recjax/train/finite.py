"""Steps that are not finite, and so change nothing: found out on the devices, explained on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.config.train import TrainConfig
from recjax.embedding.layout import BoundPlan, Group

Pairs = Sequence[tuple[jax.Array, jax.Array]]


def slotted(bound: BoundPlan) -> list[Group]:
    """The table groups whose optimizer keeps slots, in the order of the step's "bad_slots"."""
    return [group for group in bound.groups if group.slots()]


def spoilt(grads: Sequence[jax.Array], scale: jax.Array, before: Any, after: Any) -> jax.Array:
    """What of an update is not finite: int32 [2].

    Finite gradients may have squares that are not, and sums of squares overflow later still: a slot that is infinite
    once would keep its weights where they are for ever.

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

    def none(scale: jax.Array, *arrays: Any) -> jax.Array:
        return counted(scale, *jax.tree.map(lambda x: x[:0], arrays))  # 0, but differing between devices like the count

    def probed(scale: jax.Array, grads: Sequence[jax.Array], pairs: Pairs) -> jax.Array:
        sums = [jnp.sum(new) for _, new in pairs] or [jnp.sum(g * scale) for g in grads]
        return jax.lax.cond(jnp.isfinite(sum(sums, scale * 0)), none, counted, scale, grads, pairs)

    # Elsewhere counting is one pass anyway, and a device must not wait for a choice.
    return jax.lax.platform_dependent(scale, grads, pairs, cpu=probed, default=counted)


def explain(config: TrainConfig, bound: BoundPlan, step: int, place: str, result: Mapping[str, Any]) -> str:
    """What to say of a step that was not applied.

    Args:
      config: of the training.
      bound: of its tables.
      step: which, from 1.
      place: the samples that it covers.
      result: its metrics, as `make_train_step` gives them.
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
            names = [table.spec.name for table in group.tables]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            kept.append((count, group.optimizer.kind, f"the rows of {', '.join(names[:5])}{more}"))
        found += [f"{count} slots of {kind} for {where}, which would overflow" for count, kind, where in kept if count]
    if int(result["bad_loss"]):
        found.insert(0, f"its loss ({float(result['loss'])})")
    return (
        f"step {step} is not finite: {' and '.join(found)}. It covers {place}. The step was not applied and no "
        "checkpoint was written after it, so the run can be resumed. A learning rate that is too high is the usual "
        "cause: lower train.optimizer.learning_rate or embedding.optimizer.learning_rate and start anew in another "
        "--out."
    )
