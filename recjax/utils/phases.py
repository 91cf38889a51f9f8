"""Phases of a training step: the names of the scopes that its operations stand in."""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Part of a step that an operation belongs to; programs hold the value as a `jax.named_scope`."""

    ROUTE = "route"
    ID_EXCHANGE = "id_exchange"
    GATHER = "gather"
    ROW_EXCHANGE = "row_exchange"
    POOLED_EXCHANGE = "pooled_exchange"
    POOL = "pool"
    DENSE_GATHER = "dense_gather"
    DENSE_FORWARD = "dense_forward"
    LOSS = "loss"
    DENSE_BACKWARD = "dense_backward"
    DENSE_GRADS = "dense_grads"
    GRAD_EXCHANGE = "grad_exchange"
    POOLED_GRAD_EXCHANGE = "pooled_grad_exchange"
    REPLICA_EXCHANGE = "replica_exchange"
    FINITE_CHECK = "finite_check"
    CLIP = "clip"
    ROW_STATISTIC = "row_statistic"
    SPARSE_UPDATE = "sparse_update"
    DENSE_UPDATE = "dense_update"
    TIER_SWAP = "tier_swap"


PHASES = tuple(Phase)
