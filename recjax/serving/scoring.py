"""Runs an exported model on several requests at once, in arrays of few sizes, as a program is compiled for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from recjax.serving.loader import Model, count_pairs
from recjax.serving.requests import Scorable

BATCHES = 2  # under way at most: one's rows are read while the model runs on the other
_GROWTH = 8  # from one size of arrays to the next, up to _FINE: what small ones cost does not depend on their size
_FINE = 64  # from which on sizes double
_RATIOS = (4, 16)  # ids of a bag of jagged features, on average and rounded up, that are compiled for at the start


class _Shape(NamedTuple):
    """Sizes that a program is compiled for.

    Attributes:
      size: candidates.
      users: those that they are of.
      ratio: by which arrays for the ids of jagged features are longer than for bags of one.
      pairs: of elements, for each candidate or, where elements are scored, row; 0 without.
    """

    size: int
    users: int
    ratio: int
    pairs: int = 0


class Scorer:
    """Scores requests with one model.

    Attributes:
      most: candidates that are scored at once.
      compiled: shapes that the model has run in, so many that programs were compiled; 0 where nothing is compiled.
    """

    def __init__(self, model: Model, most: int) -> None:
        """A scorer that takes up to `most` candidates at once."""
        self.most, self._model = most, model
        self._inputs = model.signature["inputs"]
        self._features = features = self._inputs["features"]
        self._shared = any(feature["side"] == "user" for feature in features)
        self._jagged = any(feature["bag"] == "jagged" for feature in features)
        self.sizes = [1]
        while self.sizes[-1] < most:
            self.sizes.append(min(most, self.sizes[-1] * (_GROWTH if self.sizes[-1] < _FINE else 2)))
        self._shapes: set[_Shape] = set()

    @property
    def compiled(self) -> int:
        """See the class."""
        return len(self._shapes) if self._model.padded else 0

    def warm_up(self) -> None:
        """Compiles what requests will ask for most: all sizes, of one user and of several."""
        if not self._model.padded:
            np.asarray(self._model.run(self._empty(_Shape(1, 1, 1))))
            return
        ratios = _RATIOS if self._jagged else (1,)
        pairs = {ratio: ratio**2 * ("pairs" in self._inputs) for ratio in ratios}
        shapes = {
            _Shape(n, users, ratio, pairs[ratio]) for n in self.sizes for users in self._users(n) for ratio in ratios
        }
        for shape in sorted(shapes):
            np.asarray(self._run(self._empty(shape), shape))

    def __call__(self, requests: Sequence[Scorable]) -> list[np.ndarray]:
        """The logits of each request, float64 [n] (of tasks [n, O]); together they may have `most` candidates."""
        return self.start(requests)()

    def start(self, requests: Sequence[Scorable]) -> Callable[[], list[np.ndarray]]:
        """Reads the rows that requests need, and starts the model on them; what this returns waits for their logits.

        Of one caller at a time. Another thread may wait, so that the next rows are read while the model runs.
        """
        sizes = [request.size for request in requests]
        total, users = sum(sizes), sum(request.users for request in requests)
        size = self._size(sum(len(request.dense) for request in requests))
        padded = next((some for some in self._users(size) if users <= some), size)
        inputs: dict[str, Any] = {"dense": np.concatenate([request.dense for request in requests])}
        for kind in ("ids", "lengths", "weights"):
            inputs[kind] = {
                feature["name"]: np.concatenate(
                    [getattr(r.bags[feature["name"]], kind) for r in requests], dtype=feature["arrays"][kind]["dtype"]
                )
                for feature in self._features
                if kind in feature["arrays"]
            }
        if self._shared:
            starts = itertools.accumulate((request.users for request in requests), initial=0)
            of = [np.arange(r.users) if r.users > 1 or r.size == 1 else np.zeros(r.size, np.int64) for r in requests]
            inputs["user"] = np.concatenate([each + start for each, start in zip(of, starts, strict=False)])
            inputs["user"] = inputs["user"].astype(np.int32)
        shape = _Shape(size, padded, self._ratio(inputs, size, padded))
        if "pairs" in self._inputs:
            pairs = count_pairs(self._inputs, inputs["lengths"])
            inputs["pairs"] = np.zeros(pairs, np.int32)
            while size * shape.pairs < pairs or not shape.pairs:
                shape = shape._replace(pairs=4 * shape.pairs or _RATIOS[1])
        under_way = self._run(self._padded(inputs, shape) if self._model.padded else inputs, shape)

        def finish() -> list[np.ndarray]:
            found = np.asarray(under_way)[:total]
            return [part.astype(np.float64) for part in np.split(found, np.cumsum(sizes)[:-1])]

        return finish

    def _run(self, inputs: dict[str, Any], shape: _Shape) -> Any:
        self._shapes.add(shape)
        return self._model.run(inputs)

    def _size(self, n: int) -> int:
        return next(size for size in self.sizes if n <= size)

    def _users(self, size: int) -> list[int]:
        """Users that programs have room for: of one request, of some, and of as many as are joined, mostly.

        There may be as many as candidates, where none is shared: a program for these is compiled when it is needed.
        """
        return sorted({min(size, some) for some in (1, 8, 64)}) if self._shared else [1]

    def _ratio(self, inputs: dict[str, Any], size: int, users: int) -> int:
        """The least power of 4, from 4 on, by which arrays for the ids of jagged features are as long as needed."""
        ratio = _RATIOS[0] if self._jagged else 1
        for feature in self._features:
            if feature["bag"] == "jagged":
                bags = users if feature["side"] == "user" else size
                while bags * ratio < len(inputs["ids"][feature["name"]]):
                    ratio *= 4
        return ratio

    def _padded(self, inputs: dict[str, Any], shape: _Shape) -> dict[str, Any]:
        size, users, ratio, pairs = shape
        made: dict[str, Any] = {"dense": _to(inputs["dense"], size), "ids": {}, "lengths": {}, "weights": {}}
        if self._shared:
            made["user"] = _to(inputs["user"], size)
        if pairs:
            made["pairs"] = np.zeros(size * pairs, np.int32)
        for feature in self._features:
            bags = users if feature["side"] == "user" else size
            for kind in feature["arrays"]:
                length = bags * (ratio if feature["bag"] == "jagged" and kind != "lengths" else 1)
                made[kind][feature["name"]] = _to(inputs[kind][feature["name"]], length)
        return made

    def _empty(self, shape: _Shape) -> dict[str, Any]:
        """Inputs of a shape that have no candidate: row 0 of every table."""
        none: dict[str, Any] = {
            kind: {
                f["name"]: np.zeros((0, *f["arrays"][kind]["shape"][1:]), f["arrays"][kind]["dtype"])
                for f in self._features
                if kind in f["arrays"]
            }
            for kind in ("ids", "lengths", "weights")
        }
        none["dense"] = np.zeros((0, len(self._inputs["dense"]["columns"])), np.float32)
        if self._shared:
            none["user"] = np.zeros(0, np.int32)
        return self._padded(none, shape)


def _to(array: np.ndarray, size: int) -> np.ndarray:
    """An array, filled up with zeros to `size` entries."""
    if len(array) == size:
        return array
    out = np.zeros((size, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out
