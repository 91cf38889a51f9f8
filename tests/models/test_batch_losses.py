"""Losses over the batch against NumPy in float64, and gradients against differences; on any number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import equations, mesh_of

import recjax
from recjax.models.batch_losses import (
    AllItems,
    BatchSoftmax,
    Bpr,
    CalibratedBce,
    CosineContrastive,
    Drawn,
    FullSoftmax,
    Pairs,
    takes_all_items,
)
from recjax.parallel.mesh import BATCH_AXES

B, E = 24, 5
OWN = recjax.load(str(Path(__file__).with_name("hinge_preset.py"))).model.loss  # of a preset
LOSSES = [
    BatchSoftmax(temperature=0.3),
    BatchSoftmax(temperature=2.0, log_q=False),
    BatchSoftmax(temperature=0.5, weight=1.3, negatives=2),
    BatchSoftmax(temperature=0.5, negatives=3, in_batch=False),
    BatchSoftmax(temperature=0.4, weight=1.22, decoupled=True),
    BatchSoftmax(temperature=0.4, decoupled=True, log_q=False, negatives=2, in_batch=False),
    FullSoftmax(temperature=0.4),
    FullSoftmax(temperature=0.4, weight=1.3, decoupled=True),
    Bpr(0),
    Bpr(2),
    CosineContrastive(0, margin=0.1, weight=7.0),
    CosineContrastive(1, margin=-0.2, weight=3.0),
    CalibratedBce(0),
    CalibratedBce(2, t=0.6),
    OWN,
]
M = 3  # most that are drawn
ITEMS = 9
UNKNOWN = 4  # an item that no training pair has
PLACES = 24  # of all items and of none, over the devices


def make_pairs(seed: int = 0) -> dict[str, np.ndarray]:
    """Users, items, weights of which some are 0, ids of which some are equal, and logarithms of shares; drawn items."""
    rng = np.random.default_rng(seed)
    ids, drawn = rng.integers(0, ITEMS, B).astype(np.int32), rng.integers(0, ITEMS, (B, M)).astype(np.int32)
    ids[ids == UNKNOWN] = UNKNOWN + 1
    every = np.where(rng.permutation(PLACES) < ITEMS - 1, 0, -1).astype(np.int32)
    every[every == 0] = np.delete(rng.permutation(ITEMS), UNKNOWN)
    vectors, log_q = rng.normal(size=(ITEMS, E)), np.log(rng.dirichlet(np.ones(ITEMS)))
    weights = rng.uniform(0.5, 2, B) * (rng.uniform(size=B) > 0.2)
    return {
        "user": rng.normal(size=(B, E)),
        "item": vectors[ids],
        "weights": weights,
        "ids": ids,
        "log_q": log_q[ids],
        "drawn": vectors[drawn],
        "drawn_ids": drawn,
        "drawn_log_q": log_q[drawn],
        "every": vectors[every] / 2,  # rows; of the last item where there is none
        "every_ids": every,
    }


def for_loss(loss: Any, pairs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As many drawn items as the loss asks for; for the calibrated one each with the share that all have."""
    m = loss.negatives
    pairs = pairs | {name: pairs[name][:, :m] for name in ("drawn", "drawn_ids", "drawn_log_q")}
    if isinstance(loss, CalibratedBce) and m:
        pairs["drawn_log_q"] = np.full((B, m), np.log(m / 40))
    if takes_all_items(loss):
        pairs["log_q"] = np.zeros(B)
    if loss is OWN:  # the highest of equal scores has no gradient
        pairs["item"] = pairs["item"] + np.linspace(0, 0.1, B)[:, None]
    return pairs


def by_hand(loss: Any, pairs: dict[str, np.ndarray]) -> float:
    """The sum of weight * loss, a pair at a time, as the formulas have it."""
    user, item, weights, ids, log_q = (pairs[name] for name in ("user", "item", "weights", "ids", "log_q"))
    total = 0.0
    for i in range(B):
        if weights[i] == 0:
            continue
        others = []
        for j in range(B):
            if weights[j] == 0:
                continue
            if loss.in_batch:
                others.append((ids[j], item[j], log_q[j]))
            others += [
                (pairs["drawn_ids"][j, n], pairs["drawn"][j, n], pairs["drawn_log_q"][j, n])
                for n in range(loss.negatives)
            ]
        if takes_all_items(loss):
            others = [(j, 2 * row, 0) for j, row in zip(pairs["every_ids"], pairs["every"], strict=True) if j >= 0]
        others = [other for other in others if other[0] != ids[i]]
        own, against = user[i] @ item[i], np.array([user[i] @ vector for _, vector, _ in others])
        if isinstance(loss, BatchSoftmax | FullSoftmax):
            shift = np.array([log_q[i], *(q for *_, q in others)]) * getattr(loss, "log_q", True)
            logits = np.array([own, *against]) / loss.temperature - shift
            value = loss.weight * np.log(np.exp(logits[loss.decoupled :]).sum()) - logits[0]
        elif isinstance(loss, Bpr):
            value = np.mean(-np.log(1 / (1 + np.exp(-(own - against)))))
        elif isinstance(loss, CalibratedBce):
            share = min(len(others) / (40 - 1), 1) if loss.negatives else 1
            factor = share * (loss.t * (1 - 1 / share) + 1 / share)
            value = -factor * np.log(1 / (1 + np.exp(-own))) - np.log(1 - 1 / (1 + np.exp(-against))).sum()
            value /= len(others) + 1
        elif loss is OWN:
            value = max(0, loss.margin + against.max() - own)
        else:
            value = 1 - own + loss.weight * np.mean(np.maximum(0, against - loss.margin))
        total += weights[i] * value
    return float(total)


def make_device_pairs(loss: Any, arrays: Sequence[Any], **options: Any) -> Pairs:
    """The pairs of one device, of the arrays of `make_pairs` in their order."""
    drawn = Drawn(*arrays[5:8]) if loss.negatives else None
    all_items = AllItems(arrays[8], arrays[9], lambda rows: 2 * rows) if takes_all_items(loss) else None
    user, item, weights, ids, log_q = arrays[:5]
    return Pairs(user, item, weights, ids, log_q, drawn, all_items, **options)


def on_mesh(loss: Any, pairs: dict[str, np.ndarray], devices: int, **options: Any) -> tuple[Any, ...]:
    """The sum over all devices, and its gradients by users, items, drawn items and the rows of all."""

    def local(*arrays: Any) -> Any:
        def value_of(user: Any, item: Any, drawn: Any, every: Any) -> Any:
            moved = [user, item, *arrays[2:5], drawn, *arrays[6:8], every, arrays[9]]
            return loss.sum_losses(make_device_pairs(loss, moved, **options))

        value, gradients = jax.value_and_grad(value_of, argnums=(0, 1, 2, 3))(*(arrays[n] for n in (0, 1, 5, 8)))
        return jax.lax.psum(value, BATCH_AXES), *gradients

    spread = P(BATCH_AXES)
    step = jax.shard_map(local, mesh=mesh_of(devices), in_specs=(spread,) * 10, out_specs=(P(), *(spread,) * 4))
    value, *gradients = jax.jit(step)(*for_loss(loss, pairs).values())
    return float(value), *map(np.asarray, gradients)


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_the_loss_and_its_gradients_are_those_of_the_formula(loss: Any, devices: int) -> None:
    with jax.enable_x64(True):
        pairs = make_pairs()
        value, *gradients = on_mesh(loss, pairs, devices)
    pairs = for_loss(loss, pairs)
    assert value == pytest.approx(by_hand(loss, pairs), rel=1e-12)
    rng = np.random.default_rng(1)
    for name, gradient in zip(("user", "item", "drawn", "every"), gradients, strict=True):
        for place in {tuple(rng.integers(0, n) for n in gradient.shape) for _ in range(8) if gradient.size}:
            ends = []
            for change in (1e-6, -1e-6):
                moved = pairs[name].copy()
                moved[place] += change
                ends.append(by_hand(loss, pairs | {name: moved}))
            assert gradient[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_blocks_of_users_or_items_change_nothing_and_bound_the_scores(loss: Any) -> None:
    with jax.enable_x64(True):
        pairs = make_pairs(3)
        whole = on_mesh(loss, pairs, 2)
        candidates = PLACES // 2 if takes_all_items(loss) else B // 2 * (loss.in_batch + loss.negatives)
        few = {"scores_at_once": 5 * (B if takes_all_items(loss) else candidates)}
        blocks = on_mesh(loss, pairs, 2, **few)
        spread = P(BATCH_AXES)
        local = jax.grad(lambda *arrays: loss.sum_losses(make_device_pairs(loss, arrays, **few)))
        mapped = jax.shard_map(local, mesh=mesh_of(2), in_specs=(spread,) * 10, out_specs=spread)
        traced = jax.make_jaxpr(mapped)(*for_loss(loss, pairs).values())
        sizes = [v.aval.size for e in equations(traced.jaxpr) for v in e.outvars if v.aval.ndim == 2]
    for one, other in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert max(sizes) < B * candidates


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_softmax_over_all_items_is_one_whose_draws_are_each_item_once(decoupled: bool) -> None:
    """Pairs without weight draw nothing that counts: as many have one as there are items."""
    with jax.enable_x64(True):
        pairs = make_pairs(5)
        known = [place for place in range(PLACES) if pairs["every_ids"][place] >= 0]
        pairs["weights"] = (np.arange(B) < len(known)).astype(float)
        for drawn, every in (("drawn", "every"), ("drawn_ids", "every_ids")):
            pairs[drawn][: len(known), 0] = pairs[every][known]
        pairs["drawn"] = 2 * pairs["drawn"]
        full = on_mesh(FullSoftmax(0.3, 1.1, decoupled), pairs, 2)
        sampled = on_mesh(BatchSoftmax(0.3, 1.1, decoupled, log_q=False, in_batch=False, negatives=1), pairs, 3)
    for one, other in zip(full[:3], sampled[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(full[4][known], 2 * sampled[3][: len(known), 0], rtol=1e-12, atol=1e-12)


def test_a_pair_without_weight_counts_neither_as_pair_nor_as_candidate() -> None:
    """Of two pairs one weighs 0: nothing is left to tell the other from."""
    pairs = {name: x[:2].astype(np.float32) for name, x in make_pairs().items()}
    pairs |= {"weights": np.array([1.0, 0.0]), "ids": np.array([0, 1], np.int32)}
    pairs |= {"weights": pairs["weights"].astype(np.float32), "drawn_ids": pairs["drawn_ids"].astype(np.int32)}
    for loss in (BatchSoftmax(), BatchSoftmax(decoupled=True, weight=9.0), Bpr(0), CosineContrastive(0)):
        value, user, item, *_ = on_mesh(loss, pairs, 1)
        nothing = 0 if isinstance(loss, BatchSoftmax | Bpr) else 1 - pairs["user"][0] @ pairs["item"][0]
        assert value == pytest.approx(nothing, abs=1e-6)
        assert not user[1].any() and not item[1].any()
        assert np.isfinite(user).all() and (nothing or not user.any())
