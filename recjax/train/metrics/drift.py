"""Drift: how far new rows are from those that a run was trained on, feature by feature.

The population stability index compares the shares p of training and q of the new rows in some bins: the sum of
(q - p) * ln(q / p), a symmetric divergence. As a rule of thumb below 0.1 nothing has moved, and above 0.25 much has
(Siddiqi, "Credit Risk Scorecards", 2006). Half a row is added to each bin, so that an empty one is no infinite share.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.batch import ANY_ID, Bags, Batch
from recjax.data.prepare.encoder import Encoder, open_encoder
from recjax.data.prepare.ids import VocabularyMap
from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import TrainingError
from recjax.utils import strict_json
from recjax.utils.files import write_json
from recjax.utils.text import aligned

FILE = "profile.json"  # in a run folder
_BINS = 10  # of a feature beside those of unknown and missing values
_BLOCKS = 64  # that are looked at, evenly spread over the split


def profile_values(source: BlockSource, split: str = "train") -> dict[str, Any]:
    """The values of a split: bins of about as many values each, and how many are in each of them.

    Returns:
      JSON values: "rows" that were looked at; "ids" and "dense": feature -> "edges", of rows of its table or values as
      the model sees them, a bin begins at each; and "counts", one more than edges. Of ids also "special", how many of
      the first bins are a row each, that of unknown and that of missing values.
    """
    blocks = list(_blocks(source, split))
    ids, rows = {}, sum(block.size for block in blocks)
    special = _special_rows(source)
    for feature in source.schema.features:
        if feature.rows == ANY_ID or not blocks:
            continue
        values = np.concatenate([block.bags[feature.name].ids.ravel() for block in blocks])
        first = special.get(feature.name, 0)
        edges = [*range(1, first + 1), *_quantiles(values[values >= first], first)]
        ids[feature.name] = {"edges": edges, "counts": _counts(values, edges), "special": first}
    dense = {}
    for number, name in enumerate(source.schema.dense if blocks else ()):
        values = np.concatenate([block.dense[:, number] for block in blocks])
        edges = _quantiles(values, -math.inf)
        dense[name] = {"edges": edges, "counts": _counts(values, edges)}
    return {"rows": rows, "ids": ids, "dense": dense}


def _blocks(source: BlockSource, split: str) -> Iterator[Batch]:
    count = len(source.row_counts(split))
    for number in np.unique(np.linspace(0, count - 1, min(count, _BLOCKS)).astype(int)) if count else ():
        yield source.read(split, int(number))


def _special_rows(source: BlockSource) -> dict[str, int]:
    """Feature -> how many of its first rows stand for unknown and missing values, where a vocabulary says so."""
    encoder = _encoder(source)
    if encoder is None:
        return {}
    named = zip(encoder.features, encoder.maps, strict=True)
    return {of.name: map_.vocabulary.first_row if isinstance(map_, VocabularyMap) else 0 for of, map_ in named}


def _encoder(source: BlockSource) -> Encoder | None:
    has = isinstance(source, PreparedSource) and "encoder" in source.about
    return open_encoder(source.path) if has and isinstance(source, PreparedSource) else None


def _quantiles(values: np.ndarray, least: float) -> list[float]:
    """Edges above `least` that cut values into `_BINS` bins of about as many."""
    if not len(values):
        return []
    at = np.quantile(values, np.arange(1, _BINS) / _BINS, method="higher")
    return [edge for edge in np.unique(at).tolist() if edge > least]


def _counts(values: np.ndarray, edges: Sequence[float]) -> list[int]:
    counted: list[int] = np.bincount(np.searchsorted(edges, values, "right"), minlength=len(edges) + 1).tolist()
    return counted


def stability(then: Sequence[int], now: Sequence[int]) -> float:
    """The population stability index of counts in the same bins."""
    p, q = ((np.asarray(counts) + 0.5) / (sum(counts) + 0.5 * len(counts)) for counts in (then, now))
    return float(np.sum((q - p) * np.log(q / p)))


def record_profile(run: Path, source: BlockSource) -> None:
    """Writes the profile of the training split into a run folder.

    Raises:
      TrainingError: no permission, no space.
    """
    write_json(run / FILE, profile_values(source))


def read_profile(run: Path) -> dict[str, Any] | None:
    """Reads what `profile_values` gave when a run trained, from its folder; None of a run that wrote none.

    Raises:
      TrainingError: it is damaged.
    """
    file = run / FILE
    try:
        if not file.exists():
            return None
        if not file.is_file():  # a pipe, say, over which it would wait forever
            raise ValueError("it is no regular file")
        stored = strict_json.parse(file.read_bytes())
        for entry in (entry for part in ("ids", "dense") for entry in stored[part].values()):
            edges, counts = np.array(entry["edges"], np.float64), np.array(entry["counts"], np.int64)
            sensible = edges.ndim == counts.ndim == 1 and len(counts) == len(edges) + 1 and counts.min() >= 0
            if not sensible or not (np.diff(edges) > 0).all() or entry.get("special", 0) not in (0, 1, 2):
                raise ValueError("its bins make no sense")
        return dict(stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise TrainingError(
            f"{file} is damaged ({error}). Remove it: new rows are then not compared with those that trained."
        ) from None


def measure_drift(
    then: Mapping[str, Any] | None, rows: BlockSource, split: str, missing: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Measures how far rows are from those that trained, feature by feature; those that have moved most come first.

    Args:
      then: profile of these; None: it is not known.
      rows: new rows, encoded as those were.
      split: of them.
      missing: column -> share of the new rows that lack its value.

    Returns:
      For each feature "name", "unknown" and "missing", the shares of its values; "unknown_then" and "missing_then" of
      those that trained; and "psi". None: not known, or not of such a column.
    """
    schema, special = rows.schema, _special_rows(rows)
    blocks = [rows.read(split, number) for number in range(len(rows.row_counts(split)))]
    described = []
    for feature in schema.features:
        values = np.concatenate([block.bags[feature.name].ids.ravel() for block in blocks])
        before = (then or {}).get("ids", {}).get(feature.name)
        first = special.get(feature.name, 0)
        lacking = missing.get(feature.name)
        unknown = float((values == 0).mean()) if first and len(values) else None
        if unknown is not None and first == 1 and lacking:  # they share the row of unknown values
            unknown = max(0.0, unknown - lacking)
        entry = {"name": feature.name, "unknown": unknown, "missing": lacking}
        shares = None if before is None else np.array(before["counts"]) / max(1, sum(before["counts"]))
        entry["unknown_then"] = None if shares is None or not first else float(shares[0])
        entry["missing_then"] = None if shares is None else float(shares[1]) if first > 1 else 0.0
        entry["psi"] = None if before is None else stability(before["counts"], _counts(values, before["edges"]))
        described.append(entry)
    of_then = _dense_missing(rows)
    for number, name in enumerate(schema.dense):
        values = np.concatenate([block.dense[:, number] for block in blocks])
        before = (then or {}).get("dense", {}).get(name)
        psi = None if before is None else stability(before["counts"], _counts(values, before["edges"]))
        shares_of = {"missing": missing.get(name), "missing_then": of_then.get(name)}
        described.append({"name": name, "unknown": None, "unknown_then": None, **shares_of, "psi": psi})
    return sorted(described, key=lambda entry: -(entry["psi"] or 0.0))


def _dense_missing(source: BlockSource) -> dict[str, float]:
    """Dense column -> share of the training rows that lacked its value."""
    encoder, rows = _encoder(source), int(source.row_counts("train").sum())
    if encoder is None or not rows:
        return {}
    shares = 1 - encoder.dense_stats.count / rows
    return {name: float(max(0.0, share)) for name, share in zip(encoder.dense, shares, strict=True)}


class SeenValues:
    """Counts values that are scored, in the bins of those that trained. Several threads may add."""

    def __init__(self, then: Mapping[str, Any], dense: Sequence[str]) -> None:
        """Nothing yet.

        Args:
          then: profile of the rows that trained.
          dense: names of the dense columns, in their order.
        """
        self._then, self._lock = then, threading.Lock()
        self._dense = [(number, name) for number, name in enumerate(dense) if name in then["dense"]]
        self._counts = {
            (part, name): np.zeros(len(entry["counts"]), np.int64)
            for part in ("ids", "dense")
            for name, entry in then[part].items()
        }

    def add(self, dense: np.ndarray, bags: Mapping[str, Bags]) -> None:
        """Takes in rows as the model takes them: dense columns [n, K], and ids by feature."""
        values = {("ids", name): bag.ids.ravel() for name, bag in bags.items() if name in self._then["ids"]}
        values |= {("dense", name): dense[:, number] for number, name in self._dense}
        counted = {key: _counts(of, self._then[key[0]][key[1]]["edges"]) for key, of in values.items()}
        with self._lock:
            for key, counts in counted.items():
                self._counts[key] += counts

    def shares(self) -> dict[str, dict[str, float]]:
        """Returns for each feature that was seen its "psi" and, where the data tell, shares "unknown" and "missing"."""
        shares: dict[str, dict[str, float]] = {}
        with self._lock:
            counted = {key: counts.copy() for key, counts in self._counts.items()}
        for (part, name), counts in counted.items():
            if total := int(counts.sum()):
                entry = self._then[part][name]
                shares[name] = {"psi": stability(entry["counts"], counts.tolist())}
                special = zip(("unknown", "missing"), counts[: entry.get("special", 0)].tolist(), strict=False)
                shares[name] |= {what: count / total for what, count in special}
        return shares


def calibration_of(summary: Path) -> float | None:
    """The calibration that a run had when it was measured, from its summary.json; None if that does not say."""
    if not summary.is_file():
        return None
    try:
        measured = strict_json.parse(summary.read_bytes())["eval"]["calibration"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(measured) if isinstance(measured, (int, float)) else None


def to_text(described: Mapping[str, Any]) -> str:
    """The comparison as a table for a person."""
    lines = [["feature", "PSI", "unknown", "(training)", "missing", "(training)"]]
    for entry in described["features"]:
        shares = [entry[key] for key in ("unknown", "unknown_then", "missing", "missing_then")]
        psi = "-" if entry["psi"] is None else f"{entry['psi']:.4f}"
        lines.append([entry["name"], psi, *("-" if share is None else f"{share:.2%}" for share in shares)])
    now, then = described["calibration"], described["calibration_then"]
    beside = "" if then is None else f", {then:.4f} on the rows that measured the training"
    numbers = f"calibration: {now:.4f}{beside}" if isinstance(now, float) else ""
    return "\n".join(["drift from the rows that trained:", *aligned(lines), *([numbers] if numbers else [])])
