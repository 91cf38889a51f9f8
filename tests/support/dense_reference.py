"""The dense oracle: what lookups and updates mean, in the plainest possible form.

Nothing here is sharded, sorted, deduplicated or routed. Tables are whole [V, D] arrays in row order
and gradients are dense, so the code can be checked by eye; every placement and optimizer is tested
against it. NumPy only, in the precision of its inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recjax.data.batch import Bags
from recjax.embedding.optim import Adagrad, Adam, Ftrl, PartialRowWiseAdam, RowWiseAdagrad, Sgd, SparseOptimizer
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


def sequence_matrices(bags: Bags, samples: int, rows: int, dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """The un-pooled form: matrices M [B, H, V], one for each place in a bag, and a mask [B, H] of places with an id.

    Place h of each bag, times its weight, is M[:, h] @ table. H is the longest bag's.
    """
    lengths = np.full(samples, bags.ids.shape[1]) if bags.lengths is None else bags.lengths
    ids, weights = bags.ids.ravel(), None if bags.weights is None else bags.weights.ravel()
    matrices: np.ndarray = np.zeros((samples, int(lengths.max(initial=0)), rows), dtype)
    mask = np.zeros(matrices.shape[:2], bool)
    place = 0
    for i in range(samples):
        for h in range(int(lengths[i])):
            matrices[i, h, int(ids[place])] = 1.0 if weights is None else float(weights[place])
            mask[i, h] = True
            place += 1
    return matrices, mask


def touched_rows(bags: Bags, rows: int) -> np.ndarray:
    """Mask [V]: rows that occur in the batch at all, whatever their gradient."""
    mask = np.zeros(rows, bool)
    mask[bags.ids.ravel()] = True
    return mask


def clip(gradients: list[np.ndarray], clip_norm: float) -> list[np.ndarray]:
    """The gradients, scaled so that the root of the sum of all squares is at most `clip_norm` (0: as they are)."""
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    return [g * (clip_norm / norm) if 0 < clip_norm < norm else g.copy() for g in gradients]


def update(
    optimizer: SparseOptimizer,
    table: np.ndarray,
    slots: dict[str, np.ndarray],
    grad: np.ndarray,
    touched: np.ndarray,
    step: int = 0,
    rate: float = 1.0,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One optimizer step on a whole table, row by row: for touched rows only, or for all if the optimizer says so.

    Args:
      optimizer: which rule.
      table: [V, D].
      slots: slot name -> [V] or [V, D].
      grad: [V, D], the gradient of the global loss.
      touched: [V] bool.
      step: steps done before this one.
      rate: the schedule's factor.
    """
    table, slots = table.copy(), {k: v.copy() for k, v in slots.items()}
    for v in range(len(table)) if optimizer.every_row else np.flatnonzero(touched):
        row = {name: slot[v] for name, slot in slots.items()}
        if isinstance(optimizer, Ftrl):
            table[v], row = _ftrl(optimizer, table[v], row, grad[v], rate)
        else:
            move, row = _move(optimizer, row, grad[v] + optimizer.l2 * table[v], step + 1)
            lr = optimizer.learning_rate * rate
            table[v] = table[v] - lr * optimizer.weight_decay * table[v] - lr * move
        for name, value in row.items():
            slots[name][v] = value
    return table, slots


def _move(optimizer: SparseOptimizer, row: dict[str, Any], g: np.ndarray, t: int) -> tuple[np.ndarray, dict[str, Any]]:
    """The move of one row [D] per unit of learning rate, and its new slots; t counts steps from 1."""
    match optimizer:
        case Sgd(momentum=0):
            return g, {}
        case Sgd():
            momentum = optimizer.momentum * row["momentum"] + g
            ahead = optimizer.momentum * momentum + g
            return (ahead if optimizer.nesterov else momentum), {"momentum": momentum}
        case Adagrad():
            squares = (g**2).sum() / len(g) if isinstance(optimizer, RowWiseAdagrad) else g**2
            total = row["sum_of_squares"] + squares
            return g / (total**0.5 + optimizer.eps), {"sum_of_squares": total}
        case Adam():
            squares = (g**2).sum() / len(g) if isinstance(optimizer, PartialRowWiseAdam) else g**2
            m = optimizer.b1 * row["m"] + (1 - optimizer.b1) * g
            v = optimizer.b2 * row["v"] + (1 - optimizer.b2) * squares
            mean, mean_square = m / (1 - optimizer.b1**t), v / (1 - optimizer.b2**t)
            return mean / (mean_square**0.5 + optimizer.eps), {"m": m, "v": v}
        case _:
            raise TypeError(f"the oracle does not know {type(optimizer).__name__}")


def _ftrl(
    optimizer: Ftrl, w: np.ndarray, row: dict[str, Any], g: np.ndarray, rate: float
) -> tuple[np.ndarray, dict[str, Any]]:
    """One row's new weights and slots, element by element."""
    w, z, n = w.copy(), row["z"].copy(), row["n"].copy()
    alpha = optimizer.learning_rate
    for d in range(len(w)):
        before = 1 / alpha * n[d] ** 0.5
        n[d] += g[d] ** 2
        z[d] += rate * g[d] - (1 / alpha * n[d] ** 0.5 - before) * w[d]
        if abs(z[d]) <= optimizer.l1:
            w[d] = 0
        else:
            towards = z[d] - optimizer.l1 if z[d] > 0 else z[d] + optimizer.l1
            w[d] = -towards / ((optimizer.beta + n[d] ** 0.5) / alpha + optimizer.l2)
    return w, {"z": z, "n": n}
