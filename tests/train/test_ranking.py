"""Measures of ranked items against their definitions, a user at a time, and against values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recjax.train.metrics.ranking import Ranking

NAMES = ("recall", "ndcg", "hit", "mrr", "map")


def by_definition(ranked: list[int], right: set[int], k: int) -> dict[str, float]:
    """As ranx 0.3.21 has them, from lists and sets."""
    hits = [item in right for item in ranked[:k]]
    gains = [1 / math.log2(rank + 1) for rank in range(1, k + 1)]
    precisions = [sum(hits[: rank + 1]) / (rank + 1) for rank, hit in enumerate(hits) if hit]
    return {
        "recall": sum(hits) / len(right),
        "ndcg": sum(gain for gain, hit in zip(gains, hits, strict=False) if hit) / sum(gains[: min(k, len(right))]),
        "hit": float(any(hits)),
        "mrr": 1 / (hits.index(True) + 1) if any(hits) else 0.0,
        "map": sum(precisions) / len(right),
    }


def measured(lists: list[list[int]], rights: list[set[int]], cutoffs: tuple[int, ...], items: int) -> dict[str, float]:
    """By the product, with the users in two parts."""
    ranking = Ranking(cutoffs, items)
    K = max(cutoffs)
    for part in (slice(0, 3), slice(3, None)):
        if not lists[part]:
            continue
        table = np.array([(ranked + [-1] * K)[:K] for ranked in lists[part]])
        hits = np.array([[item in right for item in row] for row, right in zip(table, rights[part], strict=True)])
        ranking.add(table, hits, np.array([len(right) for right in rights[part]]))
    return ranking.result(items)


def test_measures_of_one_list_by_hand() -> None:
    """Hits on ranks 2 and 3 of a list of four; three items are right."""
    found = measured([[9, 1, 2, 8]], [{1, 2, 5}], (2, 4), 10)
    ideal = 1 + 1 / math.log2(3) + 0.5
    assert found["recall@2"] == pytest.approx(1 / 3) and found["recall@4"] == pytest.approx(2 / 3)
    assert found["mrr@4"] == found["mrr@2"] == 0.5 and found["hit@2"] == 1
    assert found["map@4"] == pytest.approx((1 / 2 + 2 / 3) / 3)
    assert found["ndcg@4"] == pytest.approx((1 / math.log2(3) + 0.5) / ideal)
    assert found["ndcg@2"] == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)))
    assert found["coverage@2"] == 0.2 and found["coverage@4"] == 0.4


@pytest.mark.parametrize("seed", range(5))
def test_measures_are_those_of_the_definitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.permutation(40)[: rng.integers(0, 41)].tolist() for _ in range(20)]
    rights = [set(rng.permutation(40)[: rng.integers(1, 30)].tolist()) for _ in lists]
    cutoffs = (1, 5, 20, 50)
    found = measured(lists, rights, cutoffs, 40)
    for k in cutoffs:
        each = [by_definition(ranked, right, k) for ranked, right in zip(lists, rights, strict=True)]
        for name in NAMES:
            assert found[f"{name}@{k}"] == pytest.approx(np.mean([one[name] for one in each]), abs=1e-12)
        assert found[f"coverage@{k}"] == len({item for ranked in lists for item in ranked[:k]}) / 40


@pytest.mark.parametrize("seed", range(3))
def test_measures_are_those_of_ranx(seed: int) -> None:
    """Where it is installed; rankings of scores with ties, which are ordered by item before."""
    ranx = pytest.importorskip("ranx")
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, (30, 60))
    order = np.argsort(-scores, axis=1, kind="stable")
    rights = [set(rng.permutation(60)[: rng.integers(1, 40)].tolist()) for _ in order]
    run = {f"u{u}": {f"i{item}": float(60 - rank) for rank, item in enumerate(row)} for u, row in enumerate(order)}
    qrels = {f"u{u}": {f"i{item}": 1 for item in right} for u, right in enumerate(rights)}
    found = measured(order.tolist(), rights, (5, 20), 60)
    theirs = {"recall": "recall", "ndcg": "ndcg", "hit": "hit_rate", "mrr": "mrr", "map": "map"}
    for k in (5, 20):
        for ours, name in theirs.items():
            value = ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), f"{name}@{k}")
            assert found[f"{ours}@{k}"] == pytest.approx(float(value), abs=1e-12), (ours, k)
