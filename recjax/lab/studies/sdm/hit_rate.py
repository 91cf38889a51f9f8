"""Hits of a cache with a clock, by how often rows are asked for: the curve that a cache is sized by."""

from __future__ import annotations

import numpy as np

from recjax.planning.tier_model import solve


def clock_hit_rate(presence: np.ndarray, slots: int) -> float:
    """Share of the rows that requests ask for which a cache of whole rows holds already, once it has run for long.

    A request asks for row r with probability q_r, whatever others did (independent references). The hand comes by a
    slot every tau requests. A row that was asked for since stays, which happens with 1 - exp(-q tau); so it stays
    tau exp(q tau) requests on average, and is away for 1 / q until it is asked for: it is there for x / (1 + x) of all
    requests, x = q tau exp(q tau). tau is such that these shares sum to the slots. (The argument of Che et al. 2002 for
    LRU, applied to `row_cache.CachedRows`, where a row enters without its mark.)

    Args:
      presence: q_r of each row, at least 0.
      slots: rows that the cache has room for.
    """
    q = presence[presence > 0].astype(np.float64)
    if slots >= len(q):
        return 1.0
    if not slots:
        return 0.0

    def there(tau: float) -> np.ndarray:
        log_x = np.log(q * tau) + q * tau
        return 1 / (1 + np.exp(-log_x))

    tau = solve(lambda tau: float(there(tau).sum()), slots, 1e-9)
    return float((q * there(tau)).sum() / q.sum())
