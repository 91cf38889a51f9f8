"""Exact search of the K items with the highest scores u . v for each user, with the items spread over the mesh.

Each device has a share of the items and finds its own K best; N * K of them are merged. Equal scores are ordered by
item, so that the lists are the same on any mesh. Products have the same shape whatever the share, and so the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.errors import TrainingError
from recjax.models.dense import Precision
from recjax.parallel.mesh import BATCH_AXES, Share, put_share

USERS = 256  # that are searched for at a time
_BLOCK = 2**14  # items of a product
_RUN = 32  # neighbours of which the best says whether any can be among the K


@dataclasses.dataclass(frozen=True)
class Index:
    """Item vectors on the mesh.

    Attributes:
      mesh: its devices.
      vectors: float [N * blocks * C, E], each device's items in ascending order, zeros after them.
      items: int32 [N * blocks * C], which they are; -1 where there is none.
      places_V: int64 [V], place of each item in these arrays; -1 of one that is not in them.
    """

    mesh: Mesh
    vectors: jax.Array
    items: jax.Array
    places_V: np.ndarray

    @property
    def block(self) -> int:
        """C, items of a block."""
        return min(_BLOCK, len(self.items) // self.mesh.devices.size)


def make_index(mesh: Mesh, parts: Iterable[jax.Array], items: np.ndarray, size: int, local: int, rows: int) -> Index:
    """Gathers item vectors, each on the device that it is on.

    Args:
      mesh: its devices.
      parts: vectors of `size` items after the other, [N * local, E] each, the first `size` of which count.
      items: which they are, ascending: integers [n].
      size: items of a part; the last may have fewer.
      local: rows of a part on a device.
      rows: V.
    """
    vectors = _joined(mesh, list(parts))
    N = mesh.devices.size
    length = len(vectors) // N
    items_NxL = np.full((N, length), -1, np.int32)
    for part, start in enumerate(range(0, len(items), size)):
        of_part = items[start : start + size]
        whole = np.full(N * local, -1, np.int32)
        whole[: len(of_part)] = of_part
        items_NxL[:, part * local : (part + 1) * local] = whole.reshape(N, local)
    places_V = np.full(rows, -1, np.int64)
    flat = items_NxL.ravel()
    there = np.flatnonzero(flat >= 0)
    places_V[flat[there]] = there
    share = Share.of(mesh)
    own = items_NxL[share.first : share.first + share.count].ravel()
    return Index(mesh, vectors, put_share(own, mesh), places_V)


def _joined(mesh: Mesh, parts: list[jax.Array]) -> jax.Array:
    """The parts of each device one after the other, filled up with zeros to whole blocks."""
    local = sum(len(part) for part in parts) // mesh.devices.size
    room = -local % _RUN if local <= _BLOCK else -local % _BLOCK

    def join(parts: Sequence[jax.Array]) -> jax.Array:
        return jnp.pad(jnp.concatenate(parts), ((0, room), (0, 0)))

    joined: jax.Array = jax.jit(jax.shard_map(join, mesh=mesh, in_specs=P(BATCH_AXES), out_specs=P(BATCH_AXES)))(parts)
    return joined


class ItemSearch:
    """Finds the best items of an index, a part of the users at a time."""

    def __init__(self, index: Index, k: int) -> None:
        """Finds `k` items for each user, fewer where there are no more."""
        self._index, self._k = index, k
        self._excluded = 8  # entries of a block, as many as any has needed so far
        self._program = _program(index.mesh, k, index.block)

    def best(
        self, parts: Iterable[tuple[jax.Array, np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Searches for each part of the users, the next one while the devices are at work.

        Args:
          parts: vectors of up to USERS users, [N * b, E], the first of which count; and pairs that are left out:
            the user's place in the part, and the item, integers [n] each.

        Yields:
          Items, int32 [USERS, k], best first and -1 where there are no more, and their scores.

        Raises:
          TrainingError: a score is not a number.
        """
        before: Any = None
        for vectors, users, items in parts:
            out_users, out_places = self._spread(users, items)
            now = self._program(self._index.vectors, self._index.items, vectors, out_users, out_places)
            if before is not None:
                yield self._on_host(before)
            before = now
        if before is not None:
            yield self._on_host(before)

    def _spread(self, users: np.ndarray, items: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """The pairs that are left out by the block that has the item: its users and its places there."""
        index, N = self._index, self._index.mesh.devices.size
        places = index.places_V[items]
        users, places = users[places >= 0], places[places >= 0]
        blocks = len(index.items) // N // index.block
        block, place = np.divmod(places, index.block)
        order = np.argsort(block, kind="stable")
        counts = np.bincount(block, minlength=N * blocks)
        while counts.max(initial=0) > self._excluded:
            self._excluded *= 2
        at = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = np.full((2, N * blocks, self._excluded), USERS, np.int32)  # a user that there is not
        entries[0, block[order], at], entries[1, block[order], at] = users[order], place[order]
        share = Share.of(index.mesh)
        own = entries.reshape(2, N, blocks, -1)[:, share.first : share.first + share.count]
        return put_share((own[0], own[1]), index.mesh)

    def _on_host(self, lists: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        items, scores = map(np.asarray, lists)
        if np.isnan(scores).any():
            raise TrainingError(
                "some scores are not numbers: vectors of this checkpoint overflow, or have values that are not finite. "
                "Evaluate an earlier one (--step), or train with a lower learning rate."
            )
        return items, scores


@functools.cache
def _program(mesh: Mesh, k: int, C: int) -> Any:
    """search(vectors, items, users, excluded users, their places) -> the items and scores, alike on all devices."""

    def search(vectors_LxE: Any, items_L: Any, user_bxE: Any, out_users_1xBxX: Any, out_places_1xBxX: Any) -> Any:
        users_UxE = jax.lax.all_gather(user_bxE, BATCH_AXES, axis=0, tiled=True)[:USERS]
        users_UxE = jnp.pad(users_UxE, ((0, USERS - len(users_UxE)), (0, 0)))
        blocks = len(items_L) // C
        parts = (
            vectors_LxE.reshape(blocks, C, -1),
            items_L.reshape(blocks, C),
            out_users_1xBxX.reshape(blocks, -1),
            out_places_1xBxX.reshape(blocks, -1),
        )

        def step(best: tuple[jax.Array, jax.Array], part: Any) -> tuple[Any, None]:
            vectors_CxE, items_C, out_users, out_places = part
            scores_UxC = jnp.matmul(users_UxE, vectors_CxE.T, precision=Precision.HIGHEST)
            scores_UxC = jnp.where(items_C[None] >= 0, scores_UxC, -jnp.inf)
            scores_UxC = scores_UxC.at[out_users, out_places].set(-jnp.inf, mode="drop")
            scores, items = _candidates(scores_UxC, items_C, k)
            scores, items = (jnp.concatenate(pair, axis=1) for pair in zip(best, (scores, items), strict=True))
            scores, at = jax.lax.top_k(scores, k)  # of equal ones the first, which has the lower item
            return (scores, jnp.take_along_axis(items, at, axis=1)), None

        none = (jnp.full((USERS, k), -jnp.inf, vectors_LxE.dtype), jnp.full((USERS, k), -1, jnp.int32))
        best, _ = jax.lax.scan(step, none, parts)
        scores, items = (jnp.moveaxis(jax.lax.all_gather(x, BATCH_AXES), 0, 1).reshape(USERS, -1) for x in best)
        items = jnp.where(jnp.isneginf(scores), jnp.iinfo(jnp.int32).max, items)
        scores, items = jax.lax.sort((-scores, items), dimension=1, num_keys=2)
        scores, items = -scores[:, :k], items[:, :k]
        return jnp.where(jnp.isneginf(scores), -1, items), scores

    spread = P(BATCH_AXES)
    mapped = jax.shard_map(
        search, mesh=mesh, in_specs=(spread, spread, spread, spread, spread), out_specs=(P(), P()), check_vma=False
    )
    return jax.jit(mapped)


def _candidates(scores_UxC: jax.Array, items_C: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Selects those of a block among which its k best are, in its order: scores and items, [U, c] each.

    They are in the k runs of neighbours with the highest maximum: in each of these is one as good as any in another
    run, and of equal ones these come first.
    """
    U, C = scores_UxC.shape
    runs = C // _RUN
    if runs <= 2 * k:
        return scores_UxC, jnp.broadcast_to(items_C[None], scores_UxC.shape)
    scores_UxRxr = scores_UxC.reshape(U, runs, _RUN)
    _, at = jax.lax.top_k(jnp.max(scores_UxRxr, axis=2), k)
    at = jnp.sort(at, axis=1)
    scores = jnp.take_along_axis(scores_UxRxr, at[:, :, None], axis=1).reshape(U, -1)
    return scores, items_C.reshape(runs, _RUN)[at].reshape(U, -1)
