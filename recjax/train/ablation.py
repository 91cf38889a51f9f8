"""What each column is worth to a trained model: a measure of a split with the column's values mixed among the rows.

A column that the model makes no use of changes nothing; one that it needs costs much. Breiman, "Random forests",
Machine Learning 45 (2001), section 10. Columns that say the same stand in for each other, so that each may seem worth
little.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recjax.data import counter_rng
from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource, between, concatenate, take
from recjax.errors import ConfigError
from recjax.train.metrics.slices import Measures
from recjax.train.state import TrainState
from recjax.train.tasks import choice_of
from recjax.train.trainer import Trainer
from recjax.utils import log, plots
from recjax.utils.files import write_whole
from recjax.utils.text import aligned

_PURPOSE = 41  # of random numbers
_ROWS_TOGETHER = 2**20  # among so many rows, whole blocks, values are mixed: they are in memory together
_MOST_DRAWN = 40  # bars of a picture


class MixedColumn:
    """A `BlockSource` in which the values of one column are dealt to the rows of a split anew."""

    def __init__(self, source: BlockSource, column: str, seed: int) -> None:
        """Takes the values from the rows of `source`, by a permutation that (seed, column, place) decide."""
        self.name, self.schema, self.fingerprint = source.name, source.schema, source.fingerprint
        self._source, self._column, self._seed = source, column, seed
        self._number = [*source.schema.dense, *(feature.name for feature in source.schema.features)].index(column)
        self._together: tuple[tuple[str, int], Batch] | None = None

    def row_counts(self, split: str) -> np.ndarray:
        """See `BlockSource`."""
        return self._source.row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `BlockSource`."""
        counts = self._source.row_counts(split)
        part = (np.cumsum(counts) - counts) // _ROWS_TOGETHER  # of each block
        mixed = self._read_together(split, int(part[index]), np.flatnonzero(part == part[index]))
        block = self._source.read(split, index)
        start = int(counts[:index][part[:index] == part[index]].sum())
        other = between(mixed, start, start + block.size)
        if self._column in block.bags:
            return dataclasses.replace(block, bags={**block.bags, self._column: other.bags[self._column]})
        dense = block.dense.copy()
        dense[:, self._number] = other.dense[:, self._number]
        return dataclasses.replace(block, dense=dense)

    def _read_together(self, split: str, part: int, blocks: np.ndarray) -> Batch:
        together = self._together
        if together is None or together[0] != (split, part):
            whole = concatenate([self._source.read(split, int(index)) for index in blocks])
            order = counter_rng.permutation(whole.size, self._seed, _PURPOSE, self._number, part)
            self._together = together = (split, part), take(whole, order)
        return together[1]


def ablate(
    trainer: Trainer, state: TrainState, split: str, make_measures: Callable[[], Measures], permutations: int
) -> dict[str, Any]:
    """Measures a split with each column mixed, in turn.

    Args:
      trainer: of the run; in one process.
      state: to measure.
      split: its rows.
      make_measures: makes an accumulator without samples.
      permutations: seeds of each column: 0, 1, ...

    Returns:
      "measure", which is that of `train.choose_by`; "value", with no column mixed; and "columns", those that matter
      most first: each one's "column", "values" (by seed), their "mean" and "std" (None of a single one), and "losses",
      by how much each is worse than "value", and their mean, "loss".

    Raises:
      ConfigError: there are several processes.
    """
    if jax.process_count() > 1:
        raise ConfigError("--ablate (in Python ablate=True) is for one process, and there are several. Start one.")
    choice, source = choice_of(trainer.config.train.choose_by, trainer.tasks), trainer.source
    names = [*source.schema.dense, *(feature.name for feature in source.schema.features)]

    def value_of(rows: BlockSource) -> float:
        size = min(trainer.config.train.eval_batch_size, int(rows.row_counts(split).sum()))
        found = make_measures()
        stream = batches(rows, split, size, epochs=1, workers=trainer.config.train.workers)
        for batch, logits in trainer.predict(state, trainer.inputs_of(stream, size, state.host)):
            found.add(batch.labels, logits, batch.weights, batch.position)
        return choice.value(found.result())

    plain, columns = value_of(source), []
    for number, column in enumerate(names, 1):
        log.info(f"[{number} of {len(names)}] {split} with {column} mixed")
        values = [value_of(MixedColumn(source, column, seed)) for seed in range(permutations)]
        mean = statistics.fmean(values)
        std = statistics.stdev(values) if len(values) > 1 else None
        losses = [plain - value if choice.higher else value - plain for value in values]
        figures = {"mean": mean, "std": std, "losses": losses, "loss": statistics.fmean(losses)}
        columns.append({"column": column, "values": values, **figures})
    columns.sort(key=lambda one: -one["loss"])
    return {"measure": trainer.config.train.choose_by, "value": plain, "columns": columns}


def to_text(split: str, result: Mapping[str, Any]) -> str:
    """Formats what `ablate` gives, a line a column."""
    n, measure = len(result["columns"][0]["values"]) if result["columns"] else 0, result["measure"]
    cells = [["column", measure, "std", "n", "loss"]]
    for one in result["columns"]:
        std = "-" if one["std"] is None else f"{one['std']:.4f}"
        cells.append([one["column"], f"{one['mean']:.4f}", std, str(n), f"{one['loss']:+.4f}"])
    head = f"{split}, each column mixed among the rows; {measure} is {result['value']:.4f} without:"
    return "\n".join([head, *aligned(cells)])


@plots.literal()
def draw(results: Mapping[str, Mapping[str, Any]], out_png: Path, title: str) -> None:
    """Draws by how much each column, mixed, makes the measure worse: a bar a column, a dot a seed.

    Args:
      results: split -> what `ablate` gives.
      out_png: the picture to write.
      title: over the picture.

    Raises:
      TrainingError: the picture cannot be written.
    """
    most = max(min(len(result["columns"]), _MOST_DRAWN) for result in results.values())
    figure = plots.figure(6.4 * len(results), 1.4 + 0.28 * most)
    figure.suptitle(title)
    for panel, (split, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        plots.plain(panel, "x")
        shown: Sequence[Mapping[str, Any]] = result["columns"][:_MOST_DRAWN]
        places = range(len(shown))
        panel.barh(places, [one["loss"] for one in shown], color=plots.BLUE)
        for place, one in zip(places, shown, strict=True):
            panel.plot(one["losses"], [place] * len(one["losses"]), "o", color=plots.ORANGE, markersize=3)
        panel.set_yticks(places, [one["column"][:40] for one in shown], fontsize=8)
        panel.invert_yaxis()
        left_out = len(result["columns"]) - len(shown)
        more = f"; {left_out} columns that matter less left out" if left_out else ""
        panel.set_xlabel(f"loss of {result['measure']}, {split} ({result['value']:.4f} without{more})")
    write_whole(out_png, plots.png(figure))
