"""Trains deep learning recommendation models in JAX, with embedding tables spread over devices.

    config = recjax.load("movietweetings", {"train.steps": 1000, "mesh.devices": 4})
    summary = recjax.fit(config, out="runs/first")
    print(recjax.evaluate("runs/first")["auc"])

Settings are changed by *overrides*: texts "dotted.key=value" as on the command line, dicts {"dotted.key": value} (or
{"dotted": {"key": value}}), lists of these, and keywords (train={"epochs": 2}).

Importing this module imports nothing but its version: not even JAX, until something is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recjax.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from recjax.config.run import RunConfig
    from recjax.serving.opened_run import OpenedRun

Overrides = str | Mapping[str, Any] | Sequence[Any]  # in the forms described above


def load(preset: str | Path, *overrides: Overrides, **settings: Any) -> RunConfig:
    """The config of a preset, with values replaced.

    Args:
      preset: a name in configs/, or the path of a Python file that defines `config`.
      *overrides: see above.
      **settings: likewise.

    Raises:
      ConfigError: an unknown preset or key (with the nearest valid names), or a value that does not fit.
    """
    from recjax.config import presets
    from recjax.errors import ConfigError
    from recjax.settings import from_python as forms

    if not isinstance(preset, (str, Path)):
        raise ConfigError(f"load needs the name of a preset, not {forms.short(preset)}. {forms.PRESET_OR_DATA}")
    config = presets.load(str(preset), forms.texts(*overrides, **settings))
    forms.explain_frozen(config)
    return config


def override(config: RunConfig, *overrides: Overrides, **settings: Any) -> RunConfig:
    """A copy of a config with values replaced.

    Args:
      config: from `load`.
      *overrides: see above.
      **settings: likewise.

    Raises:
      ConfigError: an unknown key, or a value that does not fit.
    """
    from recjax.config import presets
    from recjax.config.run import RunConfig
    from recjax.settings import from_python as forms

    forms.require_config(config, RunConfig, "override")
    changed = presets.override(config, forms.texts(*overrides, **settings))
    forms.explain_frozen(changed)
    return changed


def prepare(
    data: Any,
    label: str | Sequence[str],
    out: Path | str,
    *overrides: Overrides,
    validation: Any = None,
    test: Any = None,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Prepares a table of one's own, and returns its folder, fingerprint and rows of each split.

        recjax.prepare(frame, label="clicked", out="prepared/", columns="user:id,tags:jagged,price:dense")
        recjax.fit(recjax.load("table", {"data.path": "prepared/"}), out="runs/first")

    Args:
      data: whatever has `__arrow_c_stream__` (pandas, polars, DuckDB, HF datasets, tables and readers of pyarrow); a
        dict from column names to NumPy arrays, [n], or [n, width] for a vector; or the path of Parquet, ORC, CSV or
        Arrow.
      label: column of the label, or several, each perhaps with a kind and a weight: ["clicked", "stars:class"].
      out: the folder to make.
      *overrides: changes to the settings of `recjax.data.datasets.own_table.Table`, see above.
      validation: another such table, whose rows validate; None takes rows of `data`.
      test: likewise the test.
      overwrite: replace prepared data of other content.
      **settings: settings as keywords: columns="auto", split="time:0.8,0.1,0.1", time="day".

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax.data import catalog
    from recjax.errors import ConfigError
    from recjax.settings.from_python import short, texts

    names = [label] if isinstance(label, str) else label
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"prepare needs the name of a column as label, or a list of names, not {short(label)}.")
    more = {"validation": validation, "test": test, "overwrite": overwrite}
    return catalog.prepare_object(data, ",".join(names), out, texts(*overrides, **settings), **more)


def fit(config: RunConfig, out: Path | str | None = None, *overrides: Overrides, **settings: Any) -> dict[str, Any]:
    """Trains, and returns what summary.json holds.

    Args:
      config: from `load`.
      out: the run folder; training resumes from what it holds. None takes the one in runs/ that the
        command line takes, named after the config.
      *overrides: changes to the config, see above.
      **settings: likewise.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
      KeyboardInterrupt: Ctrl-C, or the stop button of a notebook, stopped it, with a checkpoint; a second one ends it
        at once, without.
      SystemExit: SIGTERM stopped it, with a checkpoint: a `recjax.errors.StoppedError`, of exit status 143, that only
        whoever asks for it catches.
    """
    from recjax import main
    from recjax.errors import ConfigError, StoppedError
    from recjax.settings.from_python import short
    from recjax.utils import log

    if not isinstance(out, (str, Path, type(None))):
        raise ConfigError(f"fit needs the path of a run folder as out, not {short(out)}. Overrides stand after it.")
    try:
        return main.train(override(config, *overrides, **settings) if overrides or settings else config, out)
    except StoppedError as error:
        log.info(str(error))  # Python ends without a word
        raise


def go_on(
    run: Path | str, data: Path | str, *overrides: Overrides, trust_code: bool = False, **settings: Any
) -> dict[str, Any]:
    """Goes on with a run on further rows, such as those of a new day, and returns what summary.json then holds.

        recjax.go_on("runs/clicks", "day2.parquet")

    The rows are measured before they are trained on, once over (or train.epochs times). Values that are new get rows of
    their own. The same call goes on where an earlier one was stopped.

    Args:
      run: the run folder, of a run that has ended.
      data: a file of rows with the columns that it was trained on, a folder or a pattern of such files, or a folder of
        prepared data in which known values have the rows that they have in the run.
      *overrides: see above; those that may change when a run is resumed, for example another "mesh.devices".
      trust_code: as for `evaluate`.
      **settings: overrides as keywords.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax import main
    from recjax.errors import ConfigError
    from recjax.settings.from_python import short, texts

    for name, value in (("run", run), ("data", data)):
        if not isinstance(value, (str, Path)):
            raise ConfigError(f"go_on needs a path as {name}, not {short(value)}.")
    return main.train_further(run, str(data), texts(*overrides, **settings), trust_code=trust_code)


def evaluate(
    out: Path | str,
    *overrides: Overrides,
    input: Any = None,
    split: str | Sequence[str] = "test",
    step: int | Literal["newest"] | None = None,
    trust_code: bool = False,
    **details: Any,
) -> dict[str, Any]:
    """Evaluates the checkpoint of a run folder that validation chose, and returns the metrics and its step.

        recjax.evaluate("runs/first", group="user")
        recjax.evaluate("runs/first", input=frame)

    Args:
      out: the run folder; calibration.png is drawn there.
      *overrides: see above, for example another "mesh.devices".
      input: rows with labels to evaluate on in place of the test split, for runs on a table of one's own: a table in
        Python as `prepare` takes it, or the path of Parquet, ORC, CSV or Arrow. None: the run's own data.
      split: "train", "validation" or "test", or several of them; not with `input`.
      step: a step that has a checkpoint, or "newest"; None takes the one that validation chose, or else the newest.
      trust_code: where the file of a model of one's own is gone, has changed, or is not known as yours, run the copy
        in the run folder. Do so only for a folder whose maker you trust.
      **details: fields of `recjax.train.evaluation.Details`, for example by="genres" (or several), group="user",
        ablate=True; other keywords are overrides.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    import dataclasses

    from recjax import main
    from recjax.settings.from_python import texts
    from recjax.train.evaluation import Details

    names = {field.name for field in dataclasses.fields(Details)}
    settings = {name: details.pop(name) for name in list(details) if name not in names}
    if isinstance(details.get("by"), str):
        details["by"] = (details["by"],)
    changes, splits = texts(*overrides, **settings), (split,) if isinstance(split, str) else split
    return main.evaluate(out, changes, splits, step, Details(**details), rows=input, trust_code=trust_code)


def predict(
    out: Path | str,
    input: Any,
    scores: Path | str,
    *overrides: Overrides,
    split: str = "test",
    step: int | Literal["newest"] | None = None,
    columns: str | Sequence[str] = (),
    overwrite: bool = False,
    trust_code: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Writes the scores of a file of rows, in its order, and returns how many and their mean.

    Args:
      out: the run folder, which is all that is needed.
      input: the rows: .jsonl, the text of Criteo or Avazu, or a folder of prepared data; of a table of one's own also
        Parquet, ORC, CSV or Arrow, and a table in Python as `prepare` takes it.
      scores: the file to write, .csv or .jsonl, one line a row in the order of the input: the row's number from 1, the
        logit, the probability of label 1 (of several labels what `recjax.serving.outputs.names` says), and `columns`.
        It is replaced as a whole, at the end.
      *overrides: see above, for example another "mesh.devices"; on_error="skip" leaves malformed rows out.
      split: of a folder.
      step: a step that has a checkpoint, or "newest"; None takes the one that validation chose, or else the newest.
      columns: of the input that the scores carry as they are given there: names, in a sequence or with commas between
        them, or "all". Of a folder the features, by value where the data tell, and the dense columns.
      overwrite: replace `scores` even if it is no file of scores.
      trust_code: as for `evaluate`.
      **settings: overrides as keywords.

    Returns:
      {"step", "input", "out", "rows", "skipped", "mean_probability"}: "rows" that were scored, and "skipped" ones. Of
      several labels "mean_prediction", by label, takes the place of the last. Of data with conditions (`where`) also
      "left_out", the rows that do not keep to them.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax.data.arrow.spool import is_table
    from recjax.errors import ConfigError
    from recjax.serving import predict
    from recjax.settings.from_python import short, texts

    for name, value in (("out", out), ("input", input), ("scores", scores)):
        if not isinstance(value, (str, Path)) and not (name == "input" and is_table(value)):
            raise ConfigError(f"predict needs the path of a file or folder as {name}, not {short(value)}.")
    changes = texts(*overrides, **settings)
    run = predict.predict if isinstance(input, (str, Path)) else predict.predict_table
    return run(
        out,
        input,
        scores,
        overrides=changes,
        split=split,
        step=step,
        columns=columns,
        overwrite=overwrite,
        trust_code=trust_code,
    )


def export(
    run: Path | str,
    out: Path | str,
    *overrides: Overrides,
    step: int | Literal["newest"] | None = None,
    format: Literal["stablehlo", "onnx"] = "stablehlo",
    quantize: Literal["none", "bfloat16", "int8", "int4"] = "none",
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
    user: str | Sequence[str] = (),
    disk: str | Sequence[str] = (),
    trust_code: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Writes the model of a run as a folder that runs without recjax, and returns what is in it.

        recjax.export("runs/first", "exported", quantize="int8")

    Args:
      run: the run folder.
      out: the folder to write; must not exist, or be empty.
      *overrides: see above, for example another "mesh.devices".
      step: a step that has a checkpoint, or "newest"; None takes the one that validation chose, or else the newest.
      format: "stablehlo" for JAX (extra `export`), or "onnx" for onnxruntime (extra `onnx`).
      quantize: how rows of tables are written: "none" as they are held, "bfloat16", or "int8" or "int4" with a float32
        scale and bias each (see `recjax.embedding.quantize`).
      platforms: where StableHLO is to run: some of "cpu", "cuda" and "tpu".
      user: features that all candidates of a request have in common: they are looked up once for all of them.
      disk: tables that stay on disk, of which the loader keeps rows in a cache; or "all". So do those that share a
        feature with them.
      trust_code: as for `evaluate`.
      **settings: overrides as keywords.

    Returns:
      {"out", "step", "format", "quantize", "platforms", "user", "on_disk", "tables", "table_bytes", "bytes"}, of which
      "tables" is how many there are, and "on_disk" how many of them stay there.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax.errors import ConfigError
    from recjax.serving.export import export
    from recjax.settings.from_python import short, texts

    for name, value in (("run", run), ("out", out)):
        if not isinstance(value, (str, Path)):
            raise ConfigError(f"export needs the path of a folder as {name}, not {short(value)}.")
    users, where, on_disk = ([x] if isinstance(x, str) else list(x) for x in (user, platforms, disk))
    changes = texts(*overrides, **settings)
    return export(run, out, changes, step, quantize, where, format, users, on_disk, trust_code=trust_code)


def open_run(out: Path | str, step: int | Literal["newest"] | None = None, *, trust_code: bool = False) -> OpenedRun:
    """Opens a run folder: its config, metrics, tables by the data's own ids, curves, and scores of rows.

        run = recjax.open_run("runs/first")
        run.metrics.to_pandas()
        run.tables["movie"].rows([111161, 68646])
        run.tables["movie"].nearest(111161, k=5)
        run.predict("new.parquet")

    Args:
      out: the run folder.
      step: of the checkpoint: one that is there, or "newest"; None takes the one that validation chose, or else the
        newest.
      trust_code: as for `evaluate`.

    Raises:
      ConfigError: no run folder. The parts of the result raise errors of their own.
    """
    from recjax.serving.opened_run import OpenedRun

    return OpenedRun(out, step, trust_code)
