"""A run folder in Python: what it was asked, what it measured, what it learnt."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recjax.config.run import RunConfig
from recjax.data.original_ids import OriginalIds, original_ids
from recjax.data.storage import run_snapshot
from recjax.errors import ConfigError, TrainingError
from recjax.models.layers import LINEAR
from recjax.serving.opened_tables import Tables
from recjax.serving.predict import open_to_predict, predict, predict_table
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.run import curves
from recjax.train.run.curves import figure_of
from recjax.train.run.folder import data_snapshot, read_config
from recjax.train.run.open_run import use_checkpoint
from recjax.train.state import TrainState, one_version
from recjax.train.trainer import Trainer
from recjax.utils import html, log, plots, strict_json
from recjax.utils.paths import located

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure


class OpenedRun:
    """A run folder, of which each part is read when it is asked for. Nothing is written to it; it may still train.

    Config, tables and the model that predicts are those of the moment when they were first asked for, the rest is read
    again each time. The model stays in the devices' memory as long as this object lives.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: Path | str, step: int | Literal["newest"] | None = None, trust_code: bool = False) -> None:
        """Opens a run; ConfigError if it is none. The arguments are those of `recjax.open_run`."""
        if not (step in (None, "newest") or isinstance(step, int) and not isinstance(step, bool)):
            raise ConfigError(f'step={step!r}: expected a step that has a checkpoint, "newest", or None.')
        self.path, self._asked, self._trust = located(path), step, trust_code
        self._kept: tuple[tuple[str, ...], tuple[Trainer, TrainState, int]] | None = None
        self.config  # noqa: B018  reads it, so that a wrong path is refused here

    @functools.cached_property
    def config(self) -> RunConfig:
        """The config that the run was started with."""
        return read_config(self.path, trust_code=self._trust, report=log.info)

    @property
    def summary(self) -> html.Shown:
        """Content of summary.json; ConfigError if the run has not ended yet."""
        file = self.path / "summary.json"
        try:
            return html.Shown(strict_json.parse(file.read_bytes()))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{file} does not exist: the run has not ended. Its metrics are there, though."
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise TrainingError(f"{file} cannot be read: {error}. The command that trained makes it again.") from error

    @property
    def metrics(self) -> pa.Table:
        """The lines of metrics.jsonl, one a row: step, split, loss and whatever else was measured."""
        return curves.table_of(curves.read_lines(self.path / "metrics.jsonl"))

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        with Checkpoints(self.path / "checkpoints", keep=2) as checkpoints:
            return checkpoints.steps()

    @property
    def step(self) -> int:
        """The step of the checkpoint that `tables` and `predict` use."""
        return self._restored.step

    @functools.cached_property
    def tables(self) -> Tables:
        """The embedding tables by name. Of independent replica groups the means.

        The first use checks every file of the checkpoint against its checksum.

        Raises:
          ConfigError: there is no checkpoint yet.
          TrainingError: none is intact, or there is none of that step.
        """
        if dynamic := [name for name, table in self.config.embedding.tables.items() if table.ids]:
            raise ConfigError(
                f"embedding.tables.{dynamic[0]}.ids=dynamic: which row a key has changes as it trains, "
                "and the tables of an opened run know rows by their numbers. Its `predict` works."
            )
        stored = one_version(self._restored.arrays)["tables"]
        arrays = {name: held["rows"] for name, held in stored.items()}
        return Tables(arrays, self._ids, f"checkpoint {self.step} of {self.path}")

    def predict(
        self,
        rows: Any,
        *overrides: str,
        split: str = "test",
        columns: str | Sequence[str] = (),
    ) -> pa.Table:
        """The scores of rows, in their order: an Arrow table with what `recjax.predict` writes to a file.

        The first call makes and compiles the model, and one with other overrides does so again. Overrides are texts,
        such as "mesh.devices=1"; `rows` is the `input` of `recjax.predict`, and `split` and `columns` are as there.

        Returns:
          row (int64, from 1), logit and probability (float64, of nine digits), or what several labels have, and
          `columns`. A column of values of several types has their JSON texts.

        Raises:
          RecjaxError: as for `recjax.predict`.
        """
        import pyarrow as pa

        run = predict if isinstance(rows, (str, Path)) else predict_table
        with tempfile.TemporaryDirectory(prefix="recjax-") as folder:
            file = Path(folder) / "scores.jsonl"
            run(
                self.path,
                rows,
                file,
                overrides=overrides,
                split=split,
                step=self.step,
                columns=columns,
                opened=self._model,
            )
            with file.open(encoding="utf-8") as lines:
                parsed = [json.loads(line) for line in lines]
        named = {name: [line[name] for line in parsed] for name in parsed[0]}
        return pa.table({name: _column(values) for name, values in named.items()})

    def curves(self) -> Figure:
        """The picture of curves.png, as a matplotlib figure, which notebooks show; also of a run that still trains."""
        try:
            summary: Mapping[str, Any] = self.summary
        except ConfigError:
            summary = {}
        lines = curves.read_lines(self.path / "metrics.jsonl")
        title = f"{self.config.model.kind} on {self.config.data.kind}"
        figure = figure_of(lines, title, summary.get("references"), summary.get("eval_step"))
        # A figure of no window has none of its own.
        setattr(figure, "_repr_png_", functools.partial(plots.png, figure))  # noqa: B010
        return figure

    def __repr__(self) -> str:
        """The folder and what was trained."""
        return f"OpenedRun({str(self.path)!r}: {self.config.model.kind} on {self.config.data.kind})"

    def _repr_html_(self) -> str:
        """The summary; the config where the run has not ended."""
        try:
            found = self.summary
        except ConfigError:
            return self.config._repr_html_()
        return html.table(repr(self), ("", "value"), html.flat(found))

    @functools.cached_property
    def _restored(self) -> Restored:
        with Checkpoints(self.path / "checkpoints", keep=2) as checkpoints:
            found = use_checkpoint(checkpoints, self._asked, log.info, lambda restored: restored)
        if found is None:
            raise ConfigError(
                f"{self.path} has no checkpoint yet. Train it first: recjax train PRESET --out {self.path}"
            )
        return found

    def _model(self, overrides: Sequence[str]) -> tuple[Trainer, TrainState, int]:
        """The trainer, state and step for these overrides; those of the last ones are kept."""
        key = tuple(overrides)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # there may not be memory for two
            self._kept = key, open_to_predict(self.path, self.step, self._trust, overrides)
        return self._kept[1]

    @functools.cached_property
    def _data(self) -> Any:
        return run_snapshot.open_snapshot(data_snapshot(self.path, self._asked))

    def _ids(self, table: str, rows: int) -> OriginalIds:
        """The ids of a table: those of the feature whose name it has, with or without "linear"."""
        names = [feature.name for feature in self._data.schema.features] if self._data is not None else []
        return original_ids(self._data, table if table in names else table.removesuffix(LINEAR), rows)


def _column(values: list[Any]) -> pa.Array:
    """Values as JSON has them; texts where Arrow has no type for all of them."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([json.dumps(value) for value in values])
