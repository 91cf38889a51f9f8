"""Distances of tables, of which a rotation is no part.

Two tables that differ by an orthogonal matrix say the same to whatever looks at products of their rows alone: the norm
of their plain difference then is one of coordinates, not of what was learned. The orthogonal Procrustes problem
(Schönemann 1966) has the least norm over all such matrices in closed form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.utils.lazy_arrays import as_lazy


def procrustes(a_VxD: np.ndarray, b_VxD: np.ndarray) -> float:
    """The least Frobenius norm of A - B Q over all orthogonal matrices Q.

    It is the root of |A|^2 + |B|^2 - 2 (sum of the singular values of A^T B).

    Args:
      a_VxD: one table, of any float dtype; calculated in float64.
      b_VxD: the other.
    """
    a, b = np.asarray(a_VxD, np.float64), np.asarray(b_VxD, np.float64)
    nuclear = np.linalg.svd(a.T @ b, compute_uv=False).sum()
    return math.sqrt(max(0.0, float(np.square(a).sum() + np.square(b).sum() - 2 * nuclear)))


def distances(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns how far the tables of replica groups are apart, all tables together.

    Args:
      groups: for each group its tables, as `Trainer.export` has them under "replicas".

    Returns:
      "distance", the root of the mean, over all pairs of groups, of the squared Frobenius norm of their difference;
      "aligned", the same with each table of the second group rotated so as to come nearest to that of the first.
    """
    loaded = [{name: np.asarray(as_lazy(t["rows"]).load(), np.float64) for name, t in g.items()} for g in groups]
    pairs = list(itertools.combinations(loaded, 2))
    plain = sum(float(np.square(a[name] - b[name]).sum()) for a, b in pairs for name in a)
    aligned = sum(procrustes(a[name], b[name]) ** 2 for a, b in pairs for name in a)
    return {"distance": math.sqrt(plain / len(pairs)), "aligned": math.sqrt(aligned / len(pairs))}
