"""Measures of parts of a split: of every value of a feature, and within the groups that a feature forms."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from recjax.data.batch import ANY_ID, Batch, Feature, Schema
from recjax.errors import ConfigError
from recjax.train.metrics import auc
from recjax.train.metrics.binned import Binned, Exact
from recjax.train.metrics.by_task import ByTask
from recjax.train.metrics.samples import Gather, alone
from recjax.train.tasks import Task
from recjax.utils.text import did_you_mean

Measures = Exact | Binned | ByTask


def find_feature(schema: Schema, name: str) -> Feature:
    """The categorical feature called `name`; ConfigError with the nearest names if there is none."""
    names = [feature.name for feature in schema.features]
    if name in names:
        return schema.feature(name)
    hint = did_you_mean(name, names)
    raise ConfigError(f"the data have no categorical feature {name!r}.{hint} They have {', '.join(names)}.")


class Slices:
    """The measures of the samples that hold a value of a feature, value by value.

    A sample counts in every value of its bag, once in each: over the slices of a feature with several values the
    samples sum to more than there are. The least frequent values share the slice "rest", and samples whose bag is
    empty form the slice "no value".
    """

    def __init__(
        self,
        feature: Feature,
        batches: Iterable[Batch],
        top: int,
        measures: Callable[[], Measures],
        name: Callable[[int], str] = str,
        gather: Gather = alone,
    ) -> None:
        """Reads the split once to find its most frequent values.

        Args:
          feature: whose values make the slices.
          batches: this process's of the split, checked.
          top: so many values get a slice of their own; the others share one.
          measures: makes what takes the samples of a slice.
          name: id -> the value as text.
          gather: from all processes.
        """
        self._feature, self._measures, self._name = feature, measures, name
        if feature.rows == ANY_ID:
            raise ConfigError(
                f"the values of feature {feature.name!r} are any 64-bit integers, which slices do not count yet. "
                "Choose a feature with a vocabulary."
            )
        counts = np.zeros(feature.rows, np.int64)
        for batch in batches:
            _, values = _members(batch, feature, np.arange(feature.rows))
            counts += np.bincount(values, minlength=feature.rows)
        counts = np.sum(gather(counts), axis=0)
        seen = np.flatnonzero(counts)
        self._values = seen[np.argsort(-counts[seen], kind="stable")][:top]
        self._rest, self._none = len(self._values), len(self._values) + 1
        self._slice_of = np.full(feature.rows, self._rest, np.int64)
        self._slice_of[self._values] = np.arange(len(self._values))
        self._parts: dict[int, Measures] = {}

    def add(self, batch: Batch, logits_B: np.ndarray) -> None:
        """Takes the samples of a batch in."""
        rows, slices = _members(batch, self._feature, self._slice_of)
        empty = np.setdiff1d(np.flatnonzero(_counted(batch)), rows)
        rows, slices = np.append(rows, empty), np.append(slices, np.full(len(empty), self._none))
        order = np.argsort(slices, kind="stable")
        rows, slices = rows[order], slices[order]
        cuts = np.flatnonzero(np.diff(slices, prepend=-1))  # where each slice begins
        for number, members in zip(slices[cuts].tolist(), np.split(rows, cuts)[1:], strict=True):
            self._part(number).add(batch.labels[members], logits_B[members], batch.weights[members], batch.position)

    def _part(self, number: int) -> Measures:
        if number not in self._parts:
            self._parts[number] = self._measures()
        return self._parts[number]

    def join(self, gather: Gather) -> None:
        """Takes the samples of all processes; each calls it."""
        for number in np.unique(np.concatenate(gather(np.array(list(self._parts), np.int64)))).tolist():
            self._part(number).join(gather)

    def result(self) -> list[dict[str, Any]]:
        """A row for every slice, the most frequent value first, "rest" and "no value" last.

        Returns:
          `value` (as text), `id` (the table row; None for "rest" and "no value"), `positive_share`, and the measures.
        """
        others = {self._rest: "rest", self._none: "no value"}
        rows = []
        for number, part in sorted(self._parts.items()):
            id = None if number in others else int(self._values[number])
            value = others[number] if id is None else self._name(id)
            share = {} if isinstance(part, ByTask) else {"positive_share": part.positives()}
            rows.append({"value": value, "id": id, **share, **part.result()})
        return [row for row in rows if row["samples"]]


def _members(batch: Batch, feature: Feature, label_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sample, label of one of its ids) pairs, each once, of samples that have weight; both int64 [M]."""
    bags = batch.bags[feature.name]
    if bags.lengths is None:
        rows = np.repeat(np.arange(batch.size), bags.ids.shape[1])
    else:
        rows = np.repeat(np.arange(batch.size), bags.lengths)
    counted = _counted(batch)[rows]
    rows, labels = rows[counted], label_of[bags.ids.ravel()[counted]]
    if feature.bag == 1:
        return rows, labels
    kinds = len(label_of) + 1  # labels are below it
    return np.divmod(np.unique(rows * kinds + labels), kinds)


def _counted(batch: Batch) -> np.ndarray:
    """Returns which samples have weight, of several labels in any of them: bool [n]."""
    return np.asarray(batch.weights.reshape(batch.size, -1).any(axis=1))


class Groups:
    """AUC within the groups of samples that share a value of a feature, averaged by impressions.

    sum_g w_g * AUC_g / sum_g w_g over the groups with samples of both classes; w_g is the weight of the group's
    samples, without weights their number. Source: Zhu et al., "Optimized Cost per Click in Taobao Display
    Advertising", KDD 2017, section 4 (as GAUC); Zhou et al., "Deep Interest Network", KDD 2018, equation 8; FuxiCTR
    reports it as gAUC.
    """

    def __init__(
        self, feature: Feature, partitions: int, shared: Collection[int] = (), task: Task | None = None
    ) -> None:
        """Without samples.

        Args:
          feature: whose values are the groups; one a sample.
          shared: ids that stand for no single value, such as that of all unknown users: no groups, so they do not
            count.
          partitions: in how many parts the groups are worked on, one after the other. More than one are kept in
            temporary files, 20 bytes a sample.
          task: of several, the one whose labels, outputs and weights count; it is binary.

        Raises:
          ConfigError: the feature has more than one value a sample.
        """
        if feature.bag != 1:
            raise ConfigError(
                f"samples cannot be grouped by {feature.name!r}: it may have several values a sample. Name a feature "
                "with exactly one, such as the user."
            )
        self._feature, self._shared, self._task = feature, np.array(sorted(shared), np.int64), task
        self._parts: list[Any] = [io.BytesIO() if partitions == 1 else _file() for _ in range(partitions)]

    def add(self, batch: Batch, logits_B: np.ndarray) -> None:
        """Takes the samples of a batch in; of one task those that count for it."""
        labels, weights, groups = batch.labels, batch.weights, batch.bags[self._feature.name].ids[:, 0]
        if self._task is not None:
            at = np.flatnonzero(weights.reshape(batch.size, -1)[:, self._task.column])
            labels, weights = (x.reshape(batch.size, -1)[at, self._task.column] for x in (labels, weights))
            groups, logits_B = groups[at], self._task.of(logits_B)[at]
        records = np.empty(len(groups), _RECORD)
        records["group"] = groups
        records["label"], records["logit"], records["weight"] = labels, logits_B, weights
        part_B = records["group"] % len(self._parts)
        for number, part in enumerate(self._parts):
            part.write(records[part_B == number].tobytes())

    def join(self, gather: Gather) -> None:
        """Takes the samples of all processes, one process after the other; each calls it."""
        for part in self._parts:
            part.seek(0)
            of_all = gather(np.frombuffer(part.read(), np.uint8))
            part.seek(0)
            part.writelines(of_all)

    def result(self) -> dict[str, Any]:
        """The grouped AUC, and how much of the split it speaks of; may be called once.

        Returns:
          `feature`; `gauc`, nan when no group has both classes; `groups`, those with both classes; `one_class_groups`,
          the others, which do not count; `share`, the share of the weight that does; `shared_share`, that of samples
          whose id stands for no single value, which do not count either.
        """
        won, counted, shared, total, both, single = 0.0, 0.0, 0.0, 0.0, 0, 0
        for part in self._parts:
            part.seek(0)
            records = np.frombuffer(part.read(), _RECORD)
            part.close()
            groups, aucs, weights = auc.group_aucs(
                records["label"], records["logit"], records["group"], records["weight"]
            )
            total += float(np.sum(weights))
            known = ~np.isin(groups, self._shared)
            shared += float(np.sum(weights[~known]))
            counts = known & ~np.isnan(aucs)
            won += float(np.sum(aucs[counts] * weights[counts]))
            counted += float(np.sum(weights[counts]))
            both, single = both + int(counts.sum()), single + int((known & ~counts).sum())
        return {
            "feature": self._feature.name,
            "gauc": won / counted if counted else float("nan"),
            "groups": both,
            "one_class_groups": single,
            "share": counted / total if total else float("nan"),
            "shared_share": shared / total if total else float("nan"),
        }


_RECORD = np.dtype([("group", np.int32), ("label", np.float32), ("logit", np.float64), ("weight", np.float32)])


def _file() -> Any:
    return tempfile.TemporaryFile(prefix="recjax-groups-")
