"""Candidates for users, the items that a model of two sides ranks highest, as a file with the values of the data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from recjax.data.arrow import convert, pieces, scan
from recjax.data.arrow.chunk_columns import shown
from recjax.data.original_ids import OriginalIds
from recjax.errors import ConfigError, DataError
from recjax.serving import scores
from recjax.train.ranked import BEFORE, best_items, index_items
from recjax.train.run.open_run import open_run
from recjax.utils import log
from recjax.utils.paths import expanded, located

_OWN = ("rank", "score")


def predict_top_k(
    run: Path | str,
    out: Path | str,
    k: int,
    overrides: Sequence[str] = (),
    *,
    input: Path | str | None = None,
    exclude: Sequence[str] | None = None,
    step: int | Literal["newest"] | None = None,
    overwrite: bool = False,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Writes the k best items of each user, best first: row (of the user, from 1), rank, score, user and item.

    Args:
      run: the run folder of a model of two sides, whose training data are read.
      out: the file to write, .csv, .jsonl or .parquet.
      k: items of a user; fewer where there are no more.
      overrides: changes to its config, such as "mesh.devices=1".
      input: a table with the column of the user, a user in each row; None: all users that training has seen.
      exclude: splits whose items a user's list leaves out; None: train and validation.
      step: as for `recjax.predict`.
      overwrite: likewise.
      trust_code: likewise.

    Returns:
      {"step", "out", "users", "items", "rows"}: users with a list, items that were ranked, and rows of the file.

    Raises:
      ConfigError: the model is not of two sides, no run or checkpoint, or a file that is not to be replaced.
      NoSuchName: a user of `input` that training has not seen.
      DataError: the data, or `input`, are at fault.
      TrainingError: `out` cannot be written, or no intact checkpoint.
    """
    run, out = located(run), expanded(out)
    if k < 1:
        raise ConfigError(f"--topk {k}: give how many items each user is to have, 1 or more.")
    scores.check(out, (), overwrite)
    trainer, state, at_step = open_run(run, overrides, ("train",), step, log.info, trust_code=trust_code)
    known = trainer.known
    scores.refuse_columns((known.user, known.item), _OWN)
    users, items = (known.original_ids(name) for name in (known.user, known.item))
    of_user, of_item = users.values(), items.values()
    there = known.ids(known.user, known.users)
    asked_for = there if input is None else _users_of(expanded(input), known.user, users)
    if (new := np.setdiff1d(asked_for, there)).size:
        raise DataError(
            f"{known.user} {of_user[new[0] - users.first]!r} has no row with label 1 in the training split, so there "
            "is no vector for it. Leave it out."
        )
    index = index_items(trainer, state, known)
    excluded = known.lists(BEFORE["test"] if exclude is None else exclude)
    digits = 17 if trainer.dtype == jnp.float64 else 9
    first, written = 1, 0
    with scores.open_scores(out, digits) as file:
        for group, items_UxK, scores_UxK in best_items(trainer, state, known, index, asked_for, excluded, k):
            user_n, rank_n = np.nonzero(items_UxK >= 0)
            scored = {"rank": (rank_n + 1).tolist(), "score": scores_UxK[user_n, rank_n].tolist()}
            named = {
                known.user: of_user[group - users.first][user_n].tolist(),
                known.item: of_item[items_UxK[user_n, rank_n] - items.first].tolist(),
            }
            file.write((user_n + first).tolist(), scored, named)
            first, written = first + len(group), written + len(user_n)
    return {"step": at_step, "out": str(out), "users": len(asked_for), "items": known.items.size, "rows": written}


def _users_of(file: Path, column: str, users: OriginalIds) -> np.ndarray:
    """The rows of the table of users that a file's users have: int64 [n].

    Raises:
      DataError: the file has no such column, or no row.
    """
    if not os.path.exists(file):
        raise DataError(f"{file} does not exist. Give a table with the column {column!r}, a user in each row.")
    files = scan.find(file)
    for each in files:
        if column not in (names := scan.schema(each).names):
            raise DataError(
                f"{each} has no column {column!r}, which tells users apart. It has {', '.join(names[:20])}."
            )
    kind: convert.Kind = "text" if users.values().dtype.kind == "U" else "integer"
    values: list[Any] = []
    for piece, _ in pieces.read(files, [column], ()):
        array = convert.plain(piece.batch[column])
        coded, _ = convert.code(array, kind)
        if (wrong := np.flatnonzero(coded.codes == len(coded.values))).size:
            at = int(wrong[0])
            raise DataError(f"{piece.where(at)}: column {column!r} is {shown(array[at])}, no user. Correct the row.")
        keys = coded.values if kind == "integer" else np.strings.decode(coded.values, "utf-8", "replace")
        values += keys[coded.codes].tolist()
    if not values:
        raise DataError(f"{file} has no row. Give a user in each row, in the column {column!r}.")
    return users.rows_of(values)
