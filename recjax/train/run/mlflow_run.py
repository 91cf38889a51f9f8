"""MLflow: a run in the run folder's `mlruns`, or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.train.run.trackers import failed, measures, require

_AT_ONCE = 500  # values in one request; MLflow takes 1,000, and 100 params
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 500  # characters
_FOLDER = "recjax.run_folder"  # tag by which a resumed run finds itself


class MlflowRun:
    """One run of MLflow, of the experiment `recjax`.

    A line of metrics.jsonl {"step": 7, "split": "train", "loss": 0.5} becomes the metric train/loss at step 7. The run
    is made again whenever training resumes, from the lines that were kept, and the older one is deleted: MLflow cannot
    take a value back. Settings that differ from the defaults are params.
    """

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        """Makes the run and deletes the one that an earlier process made for this folder.

        Args:
          run: the run folder.
          settings: the params.

        Raises:
          ConfigError: the package is missing.
          TrainingError: MLflow cannot be reached, or cannot write.
        """
        if not os.environ.get("MLFLOW_TRACKING_URI"):  # plain files, for which MLflow wants to be asked twice
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        require("mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        own = run.absolute()
        self._place = os.environ.get("MLFLOW_TRACKING_URI") or (own / "mlruns").as_uri()
        try:
            self._client: Any = MlflowClient(self._place)
            known = self._client.get_experiment_by_name("recjax")
            experiment = known.experiment_id if known else self._client.create_experiment("recjax")
            for old in self._client.search_runs([experiment], f"tags.`{_FOLDER}` = '{str(own).replace(chr(39), '_')}'"):
                self._client.delete_run(old.info.run_id)
            tags = {_FOLDER: str(own).replace("'", "_")}
            self._id: str = self._client.create_run(experiment, run_name=own.name, tags=tags).info.run_id
            params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in settings.items()]
            for start in range(0, len(params), _PARAMS_AT_ONCE):
                self._client.log_batch(self._id, params=params[start : start + _PARAMS_AT_ONCE])
        except Exception as error:  # MLflow's, SQLAlchemy's, the network's
            raise failed("MLflow", self._place, error) from error

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker.write`."""
        now = int(time.time() * 1000)
        values = [self._metric(key, value, now, line["step"]) for line in lines for key, value in measures(line)]
        try:
            for start in range(0, len(values), _AT_ONCE):
                self._client.log_batch(self._id, metrics=values[start : start + _AT_ONCE])
        except Exception as error:
            raise failed("MLflow", self._place, error) from error

    def close(self) -> None:
        """Ends the run."""
        with contextlib.suppress(Exception):  # every write is kept, or has failed by itself
            self._client.set_terminated(self._id)
