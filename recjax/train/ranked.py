"""The best items for users, by a model of two sides; and how well it ranks all items for the users of a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from recjax.data.batch import Batch
from recjax.data.source import between, require_rows, take
from recjax.embedding.routing.host import local_samples
from recjax.parallel import watchdog
from recjax.train.agreement import StopRequested
from recjax.train.inputs import never
from recjax.train.known_pairs import Known, Lists
from recjax.train.metrics.ranking import Ranking
from recjax.train.state import TrainState
from recjax.train.top_k import USERS, Index, ItemSearch, make_index
from recjax.train.trainer import Trainer

CUTOFFS = (20,)  # that a training measures
BEFORE = {"train": (), "validation": ("train",), "test": ("train", "validation")}  # splits that are history


def index_items(trainer: Trainer, state: TrainState, known: Known) -> Index:
    """The vectors of all known items, on the devices that computed them."""
    rows = known.items
    size = min(trainer.config.train.eval_batch_size, rows.size)
    parts = (vectors[1] for vectors in _vectors(trainer, state, rows, size))
    local = local_samples(size, trainer.mesh.devices.size, 1)
    return make_index(trainer.mesh, parts, known.ids(known.item, rows), size, local, known.rows(known.item))


def _vectors(
    trainer: Trainer, state: TrainState, rows: Batch, size: int, stop: Callable[[], int] = never
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Vectors of users and items of rows, `size` at a time, as `Trainer.vectors_program` gives them."""
    tier = trainer.require_host(state.host).tier
    if tier is not None:
        tier.flush(state)
    starts = range(0, rows.size, size)
    stream = trainer.inputs_of((between(rows, at, min(at + size, rows.size)) for at in starts), size, state.host)
    for inputs in stream:
        if signal := stop():
            raise StopRequested(signal)
        now = state if tier is None else tier.view(state, stream.latest.routed.admission)
        vectors, _ = trainer.vectors_program(now, inputs)
        watchdog.phase("wait")
        yield vectors


def best_items(
    trainer: Trainer,
    state: TrainState,
    known: Known,
    index: Index,
    users: np.ndarray,
    excluded: Lists,
    k: int,
    stop: Callable[[], int] = never,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Finds the k best items of users.

    Args:
      trainer: of the run.
      state: its weights.
      known: its users and items.
      index: the items' vectors.
      users: known ones.
      excluded: pairs that are left out.
      k: items of a user.
      stop: as for `Trainer.train_inputs`.

    Yields:
      For up to USERS users: them, [n]; their items, int64 [n, k], -1 where there are no more; and the scores.
    """
    rows = take(known.users, np.searchsorted(known.ids(known.user, known.users), users))
    groups = [users[start : start + USERS] for start in range(0, len(users), USERS)]
    vectors = (both[0] for both in _vectors(trainer, state, rows, USERS, stop))
    parts = ((of_group, *excluded.of_users(group)) for group, of_group in zip(groups, vectors, strict=True))
    for group, (items, scores) in zip(groups, ItemSearch(index, k).best(parts), strict=True):
        yield group, items[: len(group)].astype(np.int64), scores[: len(group)]


def measure_ranking(
    trainer: Trainer,
    state: TrainState,
    split: str,
    cutoffs: Sequence[int] = CUTOFFS,
    exclude: Sequence[str] | None = None,
    stop: Callable[[], int] = never,
) -> dict[str, float]:
    """Ranks all known items for each user of a split, and measures where the items of the split come.

    Args:
      trainer: of a run of a model of two sides.
      state: its weights.
      split: whose pairs are right. Those that are left out are neither ranked nor right.
      cutoffs: values of K.
      exclude: splits whose pairs are left out; None: those before it, as `BEFORE` has them.
      stop: as for `Trainer.train_inputs`.

    Returns:
      The measures of `Ranking.result`; "users" that were measured, "items" that were ranked; "unknown_users", rows of
      users that training has not seen, which are not measured; "unknown_items", rows of known users with items that it
      has not seen, each of which counts as right and cannot be found.

    Raises:
      ConfigError: the model is not of two sides.
      StopRequested: `stop` has said so.
    """
    known = trainer.known
    require_rows(trainer.source, split)
    right = _Right(known, split, BEFORE[split] if exclude is None else exclude)
    index = index_items(trainer, state, known)
    ranking = Ranking(cutoffs, known.rows(known.item))
    for users, items, _ in best_items(trainer, state, known, index, right.users, right.excluded, max(cutoffs), stop):
        ranking.add(items, right.hits(users, items), right.numbers(users))
    watchdog.phase("report")
    return ranking.result(known.items.size) | right.counts()


def popularity(trainer: Trainer, split: str, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """The same measures of one list for all users: items by their number of training pairs."""
    known = trainer.known
    right = _Right(known, split, BEFORE[split])
    items = known.ids(known.item, known.items)
    counts_V = np.bincount(known.pairs("train")[1], minlength=known.rows(known.item))
    ordered = items[np.argsort(-counts_V[items], kind="stable")]
    k, ranking = max(cutoffs), Ranking(cutoffs, known.rows(known.item))
    for user in right.users:
        _, seen = right.excluded.of_users(np.array([user]))
        head = ordered[: k + len(seen)]
        listed = np.full((1, k), -1, np.int64)
        rest = head[~np.isin(head, seen)][:k]
        listed[0, : len(rest)] = rest
        ranking.add(listed, right.hits(np.array([user]), listed), right.numbers(np.array([user])))
    return ranking.result(len(items)) | right.counts()


class _Right:
    """The items that are right for each user of a split."""

    def __init__(self, known: Known, split: str, exclude: Sequence[str]) -> None:
        rows = known.rows(known.item)
        self.excluded = known.lists(exclude)
        users, items = known.pairs(split)
        there = np.isin(users, known.ids(known.user, known.users))
        self._unknown_users = int((~there).sum())
        users, items = users[there], items[there]
        named = np.isin(items, known.ids(known.item, known.items))
        self._unknown_items = int((~named).sum())
        left = named & ~self.excluded.holds(users, items)
        self._lists = Lists(users[left], items[left], rows)
        numbers_U = np.bincount(self._lists.keys // rows, minlength=known.rows(known.user))
        self._numbers_U = numbers_U + np.bincount(users[~named], minlength=known.rows(known.user))
        self.users = np.flatnonzero(self._numbers_U)
        self._items = known.items.size

    def hits(self, users: np.ndarray, items_UxK: np.ndarray) -> np.ndarray:
        """Returns which items of these users' lists are right: bool [n, K]."""
        return self._lists.holds(users[:, None], items_UxK) & (items_UxK >= 0)

    def numbers(self, users: np.ndarray) -> np.ndarray:
        """The number of items that are right for these users: int64 [n]."""
        return self._numbers_U[users]

    def counts(self) -> dict[str, int]:
        """Users and items, and rows that are not known."""
        return {
            "users": len(self.users),
            "items": self._items,
            "unknown_users": self._unknown_users,
            "unknown_items": self._unknown_items,
        }
