"""Replicated (data-parallel) tables: every device holds all rows, and nothing is fetched from another one.

The only collective of a group and step is one all-reduce of [R, D + 1] in grad_exchange: the summed gradient, and how
many devices touched each row. It is over all replica groups, or within each where these are independent.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from recjax.embedding.layout import Group
from recjax.embedding.residuals import FetchResiduals, SparseGradient
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.segment_sums import by_segments
from recjax.embedding.sharding.base import Sharding
from recjax.embedding.sharding.local import asked_rows, coalesce, gather_local
from recjax.parallel.mesh import ACROSS_GROUPS, BATCH_AXES, MODEL_AXES


@dataclasses.dataclass(frozen=True)
class ReplicatedSharding(Sharding):
    """Every device holds everything."""

    kind: ClassVar[str] = "replicated"
    spread: ClassVar[bool] = False
    updates_apart: ClassVar[bool] = False

    @property
    def parts(self) -> int:
        """One: all of the buffer."""
        return 1

    @property
    def owners(self) -> int:
        """O = 1."""
        return 1

    @property
    def two_step(self) -> bool:
        """Never: no row travels."""
        return False

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Split only where replica groups hold values of their own."""
        return ACROSS_GROUPS if independent else ()

    def this_part(self) -> jax.Array:
        """Part 0."""
        return jnp.int32(0)

    def fetch(
        self, group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `Sharding.fetch`, from this device's own copy."""
        asked_1xC, _ = asked_rows(routing, self.two_step)
        rows = gather_local(group, table_RxW, asked_1xC, mean)
        if group.dtype == "bfloat16":
            rows = rows.astype(jnp.float32)
        return rows.reshape(-1, group.dim), FetchResiduals(asked_1xC, None, routing.summed)

    def send_gradients(self, group: Group, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """A mask of touched rows [R] and dense sums [R, D]; their size is the table's, which the plan keeps small."""
        with jax.named_scope("grad_exchange"):
            marked_UxE = jnp.concatenate([grads_UxD, jnp.ones_like(grads_UxD[:, :1])], axis=1)
            local_RxE = jnp.zeros((group.rows, group.dim + 1), grads_UxD.dtype)
            slots_U = residuals.slots_NxC.reshape(-1)
            unique = by_segments(group.atomics)
            if unique:  # without dedup a row has several places
                lists = 1 if group.dedup else len(slots_U)
                slots_U, marked_UxE = coalesce(slots_U, marked_UxE, group.rows, lists)
            local_RxE = local_RxE.at[slots_U].add(marked_UxE, mode="drop", unique_indices=unique)
            sums_RxE = jax.lax.psum(local_RxE, MODEL_AXES if group.independent else BATCH_AXES)
            return SparseGradient(sums_RxE[:, -1] > 0, sums_RxE[:, :-1])

    def numbers_of_asked(
        self, group: Group, gradient: SparseGradient, residuals: FetchResiduals, numbers_U: jax.Array
    ) -> jax.Array:
        """Like `Sharding.numbers_of_asked`."""
        return numbers_U.at[residuals.slots_NxC].get(mode="fill", fill_value=0)

    def largest_of_asked(
        self, group: Group, gradient: SparseGradient, residuals: FetchResiduals, numbers_NxC: jax.Array
    ) -> jax.Array:
        """Like `Sharding.largest_of_asked`, over all devices."""
        largest_R = jnp.zeros(group.rows, numbers_NxC.dtype)
        largest_R = largest_R.at[residuals.slots_NxC].max(numbers_NxC, mode="drop")
        return jax.lax.pmax(largest_R, MODEL_AXES if group.independent else BATCH_AXES)

    def tell_requesters(self, group: Group, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Like `Sharding.tell_requesters`: nothing travels."""
        return numbers_NxC.reshape(-1)

    def tell_owners(self, group: Group, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Like `Sharding.tell_owners`: nothing travels."""
        return numbers_F.reshape(residuals.slots_NxC.shape)
