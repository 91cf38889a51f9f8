"""The dense oracle: what lookups and updates mean, in the plainest possible form.

Nothing here is sharded, sorted, deduplicated or routed. Tables are whole [V, D] arrays in row order
and gradients are dense, so the code can be checked by eye; every placement and optimizer is tested
against it. NumPy only, in the precision of its inputs.
"""

from __future__ import annotations

import numpy as np

from recjax.data.batch import Bags
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.spec import Pooling


def bag_matrix(bags: Bags, samples: int, rows: int, pooling: Pooling, dtype: type = np.float64) -> np.ndarray:
    """The matrix M [B, V] with pooled = M @ table: how much each row counts in each bag."""
    matrix: np.ndarray = np.zeros((samples, rows), dtype)
    start = 0
    for i in range(samples):
        if bags.lengths is None:
            ids, weights = bags.ids[i], None if bags.weights is None else bags.weights[i]
        else:
            stop = start + int(bags.lengths[i])
            ids, weights = bags.ids[start:stop], None if bags.weights is None else bags.weights[start:stop]
            start = stop
        for j, row in enumerate(ids):
            weight = 1.0 if weights is None else float(weights[j])
            matrix[i, int(row)] += weight / (len(ids) if pooling == "mean" else 1)
    return matrix


def touched_rows(bags: Bags, rows: int) -> np.ndarray:
    """Mask [V]: rows that occur in the batch at all, whatever their gradient."""
    mask = np.zeros(rows, bool)
    mask[bags.ids.ravel()] = True
    return mask


def update(
    optimizer: Sgd | RowWiseAdagrad,
    table: np.ndarray,
    slots: dict[str, np.ndarray],
    grad: np.ndarray,
    touched: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One optimizer step on a whole table, for touched rows only.

    Args:
      optimizer: which rule.
      table: [V, D].
      slots: slot name -> [V].
      grad: [V, D], the gradient of the global loss.
      touched: [V] bool.
    """
    table, slots = table.copy(), {k: v.copy() for k, v in slots.items()}
    for v in np.flatnonzero(touched):
        if isinstance(optimizer, Sgd):
            table[v] -= optimizer.learning_rate * grad[v]
        elif isinstance(optimizer, RowWiseAdagrad):
            slots["sum_of_squares"][v] += (grad[v] ** 2).sum() / grad.shape[1]
            root = np.sqrt(slots["sum_of_squares"][v])
            table[v] -= optimizer.learning_rate * grad[v] / (root + optimizer.eps)
        else:
            raise TypeError(f"the oracle does not know {type(optimizer).__name__}")
    return table, slots
