"""Sizes and skew of a dataset, for `recjax data info`."""

from __future__ import annotations

from typing import Any

import numpy as np

from recjax.data.baselines import references
from recjax.data.source import SPLITS, BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.data.synthetic.clicks import SyntheticSource, best_auc
from recjax.utils.text import aligned


def describe(source: BlockSource) -> dict[str, Any]:
    """Reads every block once and counts.

    Returns:
      JSON values: `name`, `fingerprint`, `path` (None if not on disk), `dense` (names), `splits` (name -> rows,
      label_rate, best_auc for synthetic data; of several labels `labels`: name -> kind, rows that have any weight, and
      the mean in these), `features` (a list: name, rows, bag, weighted; then over all splits:
      ids, distinct_ids, mean_bag, top_id_share, ids_for_90_percent and its share of the distinct ids seen),
      `references` (name -> test AUC) and `about`, what the dataset tells of itself. A value that no row defines (the
      label rate of an empty split) is None.
    """
    counters = {feature.name: _Counter() for feature in source.schema.features}
    splits: dict[str, dict[str, Any]] = {}
    rows_total = 0
    for split in SPLITS:
        counts = source.row_counts(split)
        rows, positives = int(counts.sum()), np.zeros(max(1, len(source.schema.labels)))
        total = np.zeros_like(positives)
        for index in range(len(counts)):
            block = source.read(split, index)
            counted = block.weights > 0 if source.schema.labels else np.ones(len(block.labels), bool)
            positives += np.where(counted, block.labels, 0).sum(axis=0, dtype=np.float64)
            total += counted.sum(axis=0)
            for name, counter in counters.items():
                counter.add(block.bags[name].ids)
        splits[split] = {"rows": rows, "label_rate": float(positives[0] / total[0]) if total[0] else None}
        if source.schema.labels:
            splits[split]["label_rate"] = None
            splits[split]["labels"] = {
                label.name: {"kind": label.kind, "rows": int(n), "mean": float(sum / n) if n else None}
                for label, sum, n in zip(source.schema.labels, positives, total, strict=True)
            }
        elif isinstance(source, SyntheticSource) and rows > 1:
            splits[split]["best_auc"] = best_auc(source, split)
        rows_total += rows
    features = [
        {
            "name": feature.name,
            "rows": feature.rows,
            "bag": feature.bag,
            "weighted": feature.weighted,
            **counters[feature.name].summary(rows_total),
        }
        for feature in source.schema.features
    ]
    return {
        "name": source.name,
        "fingerprint": source.fingerprint,
        "path": str(source.path) if isinstance(source, PreparedSource) else None,
        "dense": list(source.schema.dense),
        "splits": splits,
        "features": features,
        "references": references(source),
        "about": source.about if isinstance(source, PreparedSource) else {},
    }


def to_text(described: dict[str, Any]) -> str:
    """Returns what `describe` found, as tables for a person."""
    lines = [
        f"dataset      {described['name']}",
        f"fingerprint  {described['fingerprint'][:16]}",
        f"path         {described['path'] or '(generated on the fly)'}",
    ]
    for key in ("label", "splits"):
        if key in described["about"]:
            lines.append(f"{key:12} {described['about'][key]}")
    lines += [f"dense        {len(described['dense'])}: {', '.join(described['dense']) or '(none)'}", ""]
    best = any("best_auc" in split for split in described["splits"].values())
    head = ["split", "rows", "label rate"] + ["best AUC"] * best
    table = [
        [name, f"{split['rows']:,}", _share(split["label_rate"])]
        + ([f"{split['best_auc']:.4f}" if "best_auc" in split else "-"] if best else [])
        for name, split in described["splits"].items()
    ]
    lines += [*aligned([head, *table]), ""]
    if labels := [
        (split, name, of)
        for split, found in described["splits"].items()
        for name, of in found.get("labels", {}).items()
    ]:
        head = ["split", "label", "kind", "rows", "mean"]
        table = [
            [split, name, of["kind"], f"{of['rows']:,}", "-" if of["mean"] is None else f"{of['mean']:.4g}"]
            for split, name, of in labels
        ]
        lines += [*aligned([head, *table]), ""]
    head = ["feature", "rows V", "ids per bag", "distinct ids", "top id", "ids for 90% of accesses"]
    table = [
        [
            feature["name"] + (" (weighted)" if feature["weighted"] else ""),
            f"{feature['rows']:,}",
            str(feature["bag"]) if feature["bag"] else f"jagged, mean {feature['mean_bag'] or 0:.2f}",
            f"{feature['distinct_ids']:,}",
            _share(feature["top_id_share"]),
            f"{feature['ids_for_90_percent']:,} ({_share(feature['ids_for_90_percent_share'])})",
        ]
        for feature in described["features"]
    ]
    lines += aligned([head, *table])
    if described["references"]:
        table = [[name, f"{auc:.4f}"] for name, auc in described["references"].items()]
        lines += ["", *aligned([["reference", "test AUC"], *table])]
    return "\n".join(lines)


class _Counter:
    """Occurrences of ids, kept as sorted distinct ids and their counts: no array of V entries."""

    def __init__(self) -> None:
        self._ids, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> None:
        self._pending.append(ids.ravel())
        if sum(map(len, self._pending)) > 2**20:
            self._merge()

    def _merge(self) -> None:
        ids, counts = np.unique(np.concatenate([self._ids[:0], *self._pending]), return_counts=True)
        self._ids, inverse = np.unique(np.concatenate([self._ids, ids]), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate([self._counts, counts]), minlength=len(self._ids))
        self._counts, self._pending = counts.astype(np.int64), []

    def summary(self, rows: int) -> dict[str, Any]:
        self._merge()
        total = int(self._counts.sum())
        falling = np.sort(self._counts)[::-1]
        enough = int(np.searchsorted(np.cumsum(falling), 0.9 * total)) + 1 if total else 0
        return {
            "ids": total,
            "distinct_ids": len(falling),
            "mean_bag": total / rows if rows else None,
            "top_id_share": int(falling[0]) / total if total else None,
            "ids_for_90_percent": enough,
            "ids_for_90_percent_share": enough / len(falling) if total else None,
        }


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"
