"""Results of simple means on the test split: the bar that a model has to clear."""

from __future__ import annotations

import numpy as np

from recjax.data.batch import Bags, Batch
from recjax.data.source import BlockSource, one_label_a_row
from recjax.data.storage.blocks import PreparedSource
from recjax.data.synthetic.clicks import SyntheticSource, best_auc

_SHRINKAGE = 5.0  # rows of the global mean that every value is given in advance
_BUCKETS = 20  # that a dense column is cut into
_MOST_ROWS = 2**27  # of a feature whose values are counted; more have those whose rows are hashes


def references(source: BlockSource) -> dict[str, float]:
    """Test AUCs to compare a model with, by name; empty if there are none.

    For synthetic data it is the best possible one. For prepared data they are the dataset's baselines, which are
    computed when the data are prepared: they use raw ids, while the prepared ones have rare values merged. Tables of
    one's own have `naive_bayes`, which reads the training and test splits once; of several labels each binary one has.
    """
    if source.schema.labels:
        if not isinstance(source, PreparedSource) or "table" not in source.about:
            return {}
        binary = [(at, label.name) for at, label in enumerate(source.schema.labels) if label.kind == "binary"]
        found = {name: naive_bayes(source, at) for at, name in binary}
        return {f"{name}: {what}": auc for name, of in found.items() for what, auc in of.items()}
    if isinstance(source, PreparedSource) and "table" in source.about:
        return naive_bayes(source)
    if isinstance(source, PreparedSource):
        return dict(source.about.get("baselines", {}))
    if isinstance(source, SyntheticSource) and source.row_counts("test").sum() > 1:
        return {"best possible": best_auc(source, "test")}
    return {}


def mean_baselines(users: np.ndarray, movies: np.ndarray, labels: np.ndarray, known: int) -> dict[str, float]:
    """AUC of per-movie means, per-user means and their sum on the rows after the first `known`.

    A mean is over the first `known` labels (training and validation), shrunk to the global mean as if 5 more labels
    of that value had been seen; an unseen id gets the global mean.

    Args:
      users: raw user ids, integers [n], in the order of time.
      movies: raw movie ids, integers [n].
      labels: 0 or 1, [n].
      known: rows whose labels may be used.

    Returns:
      name -> AUC; empty if the rest has no row or only one class.
    """
    rest = labels[known:]
    if known == 0 or len(rest) == 0 or rest.min() == rest.max():
        return {}
    movie = _shrunk_means(movies, labels, known)
    user = _shrunk_means(users, labels, known)
    return {
        "per-movie mean": auc(rest, movie),
        "per-user mean": auc(rest, user),
        "per-movie + per-user mean": auc(rest, movie + user),
    }


def auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Share of (positive, negative) pairs that the scores put in the right order; a tie counts half, nan without pairs.

    Args:
      labels: 0 or 1, [n].
      scores: [n].
      weights: of the rows, [n]; a pair has the product of its rows'. None for ones.
    """
    weights = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    _, at = np.unique(scores, return_inverse=True)
    positives, negatives = (to_unit_scale(np.bincount(at, weights * (labels == label))) for label in (1, 0))
    below = np.cumsum(negatives) - negatives / 2
    pairs = positives.sum() * negatives.sum()
    return float(positives @ below / pairs) if pairs else float("nan")


def to_unit_scale(weights: np.ndarray) -> np.ndarray:
    """Weights, float64, times the power of two that brings the largest to between 1/2 and 1.

    Shares of their sum stay the same to the bit, and products of such weights leave the range of floats no more.
    """
    return np.ldexp(weights, -int(np.frexp(np.max(weights, initial=0.0))[1]))


class _Rates:
    """Rates of label 1 in training for each value of one column, as log odds that are added up over columns.

    The rate is shrunk to that of all rows, as if 5 more rows of that rate had been seen: so an unknown value adds 0.
    """

    def __init__(self, rows: int) -> None:
        self._rows = np.zeros(rows)
        self._ones = np.zeros(rows)

    def add(self, ids: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
        """Takes in training rows: an id, label and weight for each entry."""
        self._rows += np.bincount(ids, weights, len(self._rows))
        self._ones += np.bincount(ids, weights * labels, len(self._rows))

    def log_odds(self, base: float) -> np.ndarray:
        """Returns the addend of each value to the log odds of `base`, the share of label 1 in all training rows."""
        rate = (self._ones + _SHRINKAGE * base) / (self._rows + _SHRINKAGE)
        return np.log(rate / (1 - rate)) - np.log(base / (1 - base))


def constants(source: BlockSource) -> dict[str, dict[str, float]]:
    """Test errors of the best constant by the training split, for labels that are numbers or classes of a table.

    Returns:
      label -> `mse` of the training mean and `mae` of it, or `accuracy` of the most frequent class; weights count.
    """
    if not isinstance(source, PreparedSource) or "table" not in source.about:
        return {}
    found: dict[str, dict[str, float]] = {}
    for at, label in enumerate(source.schema.labels):
        if label.kind == "binary":
            continue
        (known, weights), (labels, of_test) = (_labels(source, split, at) for split in ("train", "test"))
        if not weights.sum() or not of_test.sum():
            continue
        if label.kind == "class":
            likeliest = np.argmax(np.bincount(known.astype(np.int64), weights, label.classes))
            found[label.name] = {"accuracy": float((labels == likeliest) @ of_test / of_test.sum())}
        else:
            apart = labels - known @ weights / weights.sum()
            found[label.name] = {
                "mse": float(np.square(apart) @ of_test / of_test.sum()),
                "mae": float(np.abs(apart) @ of_test / of_test.sum()),
            }
    return found


def _labels(source: BlockSource, split: str, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and weights of a split, float64 [n] each; of several labels those of one."""
    blocks = [source.read(split, index) for index in range(len(source.row_counts(split)))]
    each = [_column(block, column) for block in blocks] or [(np.zeros(0), np.zeros(0))]
    labels, weights = zip(*each, strict=True)
    return np.concatenate(labels), np.concatenate(weights)


def _column(block: Batch, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and weights of a block, float64 [n] each; of several labels those of one."""
    labels, weights = block.labels.astype(np.float64), block.weights.astype(np.float64)
    return (labels, weights) if labels.ndim == 1 else (labels[:, column], weights[:, column])


def naive_bayes(source: BlockSource, column: int = 0) -> dict[str, float]:
    """Test AUC of adding up, over all columns, by how much a row's value raises the log odds of label 1 in training.

    Dense columns are cut at quantiles first; a bag adds the mean of its ids. Features of very many rows are left out,
    as those of any 64-bit ids are. Nothing is tuned: it is what one gets from counting alone.

    Args:
      source: the data.
      column: of several labels, which one; it is binary.

    Returns:
      name -> AUC; empty if a split has no rows or only one class.
    """
    counts = source.row_counts("train"), source.row_counts("test")
    if not all(count.sum() for count in counts):
        return {}
    edges = np.quantile(source.read("train", 0).dense, np.linspace(0, 1, _BUCKETS + 1)[1:-1], axis=0).T  # [K, buckets]
    schema = source.schema
    named = {f.name: f for f in schema.features if f.rows <= _MOST_ROWS}
    if schema.label_group:  # a history would be counted once for each element that has a label
        named = {name: f for name, f in named.items() if f.bag == 1 or name in schema.labelled_features}
    rates = {name: _Rates(f.rows) for name, f in named.items()}
    buckets = [_Rates(_BUCKETS) for _ in source.schema.dense]
    ones = rows = 0.0
    for index in range(len(counts[0])):
        block = one_label_a_row(source.read("train", index), schema, named)
        labels, weights = _column(block, column)
        ones, rows = ones + float(labels @ weights), rows + float(weights.sum())
        for column, rate in enumerate(buckets):
            rate.add(np.searchsorted(edges[column], block.dense[:, column], "right"), labels, weights)
        for name, each in rates.items():
            lengths = _lengths(block.bags[name])
            each.add(block.bags[name].ids.ravel(), np.repeat(labels, lengths), np.repeat(weights, lengths))
    if not 0 < ones < rows:
        return {}
    added = {name: rate.log_odds(ones / rows) for name, rate in rates.items()}
    added_dense = [rate.log_odds(ones / rows) for rate in buckets]
    scores, tests = [], [source.read("test", index) for index in range(len(counts[1]))]
    for block in (one_label_a_row(block, schema, named) for block in tests):
        score = np.zeros(block.size)
        for column, values in enumerate(added_dense):
            score += values[np.searchsorted(edges[column], block.dense[:, column], "right")]
        for name, values in added.items():
            lengths = _lengths(block.bags[name])
            row = np.repeat(np.arange(block.size), lengths)
            total = np.bincount(row, values[block.bags[name].ids.ravel()], block.size)
            score += total / np.maximum(lengths, 1)
        scores.append(score)
    labels, weights = _labels(source, "test", column)
    if any(not weights[labels == label].sum() for label in (0, 1)):
        return {}
    return {"naive Bayes": auc(labels, np.round(np.concatenate(scores), 9), weights)}


def _lengths(bags: Bags) -> np.ndarray:
    """Ids of each row: integers [n]."""
    return np.full(len(bags.ids), bags.ids.shape[1]) if bags.lengths is None else bags.lengths


def _shrunk_means(ids: np.ndarray, labels: np.ndarray, known: int) -> np.ndarray:
    """The mean of each later row's id: float64 [n - known]."""
    _, dense_ids = np.unique(ids, return_inverse=True)
    seen = dense_ids[:known]
    sums = np.bincount(seen, labels[:known], minlength=dense_ids.max() + 1)
    counts = np.bincount(seen, minlength=dense_ids.max() + 1)
    means = (sums + _SHRINKAGE * labels[:known].mean(dtype=np.float64)) / (counts + _SHRINKAGE)
    return means[dense_ids[known:]]
