"""The folder of a run: whose it is, that nobody else writes to it, and all that a run remembers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Literal

from recjax import settings
from recjax.config import trusted_code
from recjax.config.own_code import placed_source_of, source_of
from recjax.config.run import FREE_ON_RESUME, RunConfig
from recjax.data.datasets.own_table import Table
from recjax.data.storage import run_snapshot
from recjax.embedding.plan import is_file, self_contained
from recjax.errors import ConfigError, RecjaxError, TrainingError
from recjax.settings.values import written
from recjax.train import planned, products
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.progress import source_number
from recjax.train.run import code_of_run, sources
from recjax.train.run.code_of_run import CodeCopy
from recjax.train.trainer import Trainer
from recjax.utils import strict_json
from recjax.utils.files import write_json, write_whole
from recjax.utils.locks import open_lock, try_lock
from recjax.utils.text import nearest

_OF_EVERY_RUN = {"data", "model", "embedding", "train"}  # keys of a config.json
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
DATA_SNAPSHOT = run_snapshot.DATA  # in a run folder
ORIGINS = "origins.json"
_UNFINISHED = ".*.unfinished-*"  # see `files.write_whole`


class ReadOnlyRunFolder(contextlib.AbstractContextManager["ReadOnlyRunFolder"]):
    """A run folder as the processes beside process 0 have it: they write nothing to it but parts of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resolve(self, config: RunConfig, report: Callable[[str], None]) -> RunConfig:
        """See `resolve_recorded`."""
        return resolve_recorded(config, self.path, report)

    def record(self, trainer: Trainer, report: Callable[[str], None], *, trains: bool = True) -> None:
        """Process 0 does that."""

    def record_origins(self, origins: Mapping[str, Any]) -> None:
        """Likewise."""

    def __exit__(self, *_: object) -> None:
        pass


class RunFolder(ReadOnlyRunFolder):
    """A run folder opened for writing. A context manager: leaving it releases the lock.

    Opening it checks and locks; `record` then makes it the folder of this run, with all that another process, on
    another day, needs to go on with the run or to use it.

    config.json    the config, lossless; "class" says where its class is defined, if that is not RunConfig itself,
                   and "source" the hash and the names of the files of its code
    source/        a copy of these files
    paths.json     where the relative paths of the config led; see sources.py
    plan.json      a copy of the plan file, if the config names one, with the ids of the files that it names; or the
                   plan that a planner chose, with choice.json and machine.json; see planned.py
    products.json  who computes the products of dense layers, if a table chose; see products.py
    origins.json   of a run that started from another one, what came from where; see recjax/train/start.py
    base/          what describes the data that these go on from; see recjax/data/prepare/earlier.py
    data/          what describes prepared data; see run_snapshot.py
    metrics.jsonl  one JSON object a line
    checkpoints/   see checkpoints.py
    summary.json, curves.png   at the end
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        """Creates the folder, or opens the one of an earlier run of the same config. Writes nothing but the lock.

        Raises:
          ConfigError: the folder belongs to a run of another config (every differing key is named) or of other code
            (the difference is shown), or is something else altogether.
          TrainingError: no permission, no space, or another process is training there.
        """
        super().__init__(path)
        self._config = config
        self._unknown_code = False  # whether it holds weights that were trained with nobody knows which code
        if os.path.exists(path) and not path.is_dir():  # Path.exists raises where a name is too long
            raise ConfigError(f"--out {path} is a file. Name a folder, existing or new.")
        self._refuse_foreign()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open_lock(path / ".lock")  # held until __exit__
        except OSError as error:
            raise TrainingError(
                f"the run folder {path} cannot be written: {error.strerror}. Choose an --out where you may write, or "
                "change its permissions."
            ) from error
        try:
            try:
                mine = try_lock(self._lock)
            except OSError as error:
                raise TrainingError(
                    f"the run folder {path} cannot be locked against other processes: {error.strerror}. Choose an "
                    "--out on another file system."
                ) from error
            if not mine:
                raise TrainingError(
                    f"another process is training in {path}. Wait for it, stop it, or choose another --out."
                )
            self._check()
        except BaseException:
            self._lock.close()
            raise

    def _refuse_foreign(self) -> None:
        """Before the lock, which has no business in such a folder: a run writes config.json before all else."""
        try:
            names = [path.name for path in self.path.iterdir()] if self.path.exists() else []
        except OSError:
            return  # which making the lock explains
        if "config.json" not in names and any(n != ".lock" and not fnmatch(n, _UNFINISHED) for n in names):
            raise ConfigError(
                f"{self.path} is not empty and holds no config.json, so it is not a run folder. Choose another --out."
            )
        if "config.json" in names and not self._has_checkpoints():
            try:
                kept, text = _read(self.path)
                if kept.where is None:
                    read_config(self.path)
                elif not _OF_EVERY_RUN <= strict_json.parse(text).keys():  # without running the code of its class
                    raise ConfigError("It lacks the settings of a run.")
            except ConfigError as error:
                raise ConfigError(
                    f"{self.path} holds a config.json that no run of recjax wrote, so it is not a run folder. Choose "
                    f"another --out. ({error})"
                ) from error

    def _check(self) -> None:
        if not self._has_checkpoints():
            return  # new, or it died before its first checkpoint: there is nothing to protect or to resume
        kept, _ = _read(self.path)
        if kept.name == type(self._config).__qualname__:
            code_of_run.refuse_other(self.path, kept, self._config)  # first: other code may have other settings
            then = read_config(self.path, type(self._config))
        else:
            try:
                then = read_config(self.path)
            except ConfigError:
                code_of_run.refuse_other(self.path, kept, self._config)
                raise
        differing = changes(then, self._config)
        if differing:
            used = changes(*(config.for_rows(self._trained_rows()) for config in (then, self._config)))
            differing = [text for text in used if not text.startswith("small.")] or differing
            raise ConfigError(
                f"{self.path} holds a run of another config ({'; '.join(differing)}). Give the same settings to "
                "resume it, or another --out to start again."
            )
        code_of_run.refuse_other(self.path, kept, self._config)
        self._unknown_code = kept.hash is None and source_of(type(self._config)) is not None

    def _trained_rows(self) -> int:
        """Rows of the training split, by what the folder says of its data; very many where it does not tell."""
        with contextlib.suppress(RecjaxError):
            if (source := run_snapshot.open_snapshot(self.path / DATA_SNAPSHOT)) is not None:
                return int(source.row_counts("train").sum())
        return sys.maxsize

    def _has_checkpoints(self) -> bool:
        return any((self.path / "checkpoints").glob("[0-9]*"))

    def claim(self, report: Callable[[str], None] = print, *, trains: bool = True) -> None:
        """Writes config.json and a copy of the code, and removes what a killed run left unfinished.

        The code then counts as the user's own for whatever names it: see `recjax/config/trusted_code.py`.

        Called once the config has passed every check, so that one with a mistake does not keep the folder from the
        corrected one.

        Args:
          report: called with what the user should know.
          trains: whether steps are left to train. Else weights of unknown code do not become those of this code.

        Raises:
          TrainingError: no permission, no space.
        """
        for unfinished in self.path.glob(_UNFINISHED):
            unfinished.unlink(missing_ok=True)
        plain, source = json.loads(settings.to_json(self._config)), source_of(type(self._config))
        if self._unknown_code:
            report(
                f"{self.path / 'config.json'} gives no hash of the code of its model: whether that has changed since "
                "cannot be said" + ("; from now on the folder holds it" if trains else "")
            )
        holds = trains or not self._unknown_code
        if source is not None and holds:
            code_of_run.write_copy(self.path, source)
        write_json(self.path / "config.json", code_of_run.describe(self._config, with_code=holds) | plain)
        placed = placed_source_of(type(self._config))
        if placed is not None and (why := trusted_code.trust_source(*placed)) is not None:
            report(
                f"that you have run {placed[0] / placed[1].root} yourself cannot be noted ({why}): for other processes "
                f"to use this run, set {trusted_code.VARIABLE}={placed[0]}, or give them --trust-code"
            )

    def record(self, trainer: Trainer, report: Callable[[str], None], *, trains: bool = True) -> None:
        """Claims the folder for the run of a trainer, and writes all that `resolve` finds there later.

        Args:
          trainer: built from what `resolve` made of the config.
          report: as for `claim`.
          trains: likewise.

        Raises:
          DataError: the data are damaged.
          TrainingError: no permission, no space.
        """
        self.claim(report, trains=trains)
        sources.record_sources(self._config, trainer.config, self.path)
        if is_file(trainer.config.plan):
            write_whole(self.path / sources.PLAN, self_contained(Path(trainer.config.plan)))
        run_snapshot.snapshot_data(trainer.source, self.path / DATA_SNAPSHOT)
        data = trainer.config.data
        if isinstance(data, Table) and (earlier := data.earlier()) is not None:
            run_snapshot.snapshot_data(earlier.source, self.path / sources.BASE)
        if trainer.chosen is not None:
            planned.record_plan(self.path, trainer.config, trainer.chosen, trainer.bound, trainer.mesh)
        if trainer.config.train.products == self._config.train.products:  # else the folder has it
            products.record_products(self.path, self._config.train.products, trainer.products)

    def record_origins(self, origins: Mapping[str, Any]) -> None:
        """Writes what of the state before the first step came from where, see `recjax.train.start.carry`.

        Raises:
          TrainingError: no permission, no space.
        """
        write_json(self.path / ORIGINS, origins)

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def resolve_recorded(config: RunConfig, run: Path, report: Callable[[str], None], needs_data: bool = True) -> RunConfig:
    """The config with what a run folder records of it: paths of data and plan, the plan and products that were chosen.

    Args:
      config: of the run.
      run: its folder, which need not exist.
      report: called with what the user should know.
      needs_data: whether the data are.

    Raises:
      ConfigError: what the run folder says is damaged.
      DataError: the data of a run that has trained are not there any more.
    """
    resolved = sources.resolve_data_sources(config, run, report, needs_data)
    return products.with_recorded_products(planned.with_recorded_plan(resolved, run), run)


def changes(then: RunConfig, now: RunConfig) -> list[str]:
    """The settings by which `now` is another run than `then`, each as "key: value there, value here".

    Where a part is of another kind, the settings that only one of the two kinds has are left out.
    """
    differing = [d for d in settings.diff(then, now) if not settings.matches(d[0], FREE_ON_RESUME)]
    keys = {key for key, _, _ in differing}
    return [
        f"{key}: {written(old)} there, {written(new)} here"
        for key, old, new in differing
        if None not in (old, new) or not any(key.startswith(part + ".") for part in keys)
    ]


def read_config(
    path: Path,
    cls: type[RunConfig] | None = None,
    *,
    trust_code: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> RunConfig:
    """The config of an existing run folder.

    Args:
      path: the folder.
      cls: the class that it has if its name is that which config.json gives. Else the code that defines the class is
        run, unless it is RunConfig itself: from where it was, if it is still the same and trusted (see
        `code_of_run.find`).
      trust_code: if it is gone, another or not trusted, run the copy in the folder.
      report: called with what the user should know.

    Raises:
      ConfigError: no such folder, its config.json is missing or damaged, or the code of its class is gone or another.
    """
    kept, text = _read(path)
    file = path / "config.json"
    if kept.where is None:
        cls = RunConfig
    elif cls is None or cls.__qualname__ != kept.name:
        try:
            cls = code_of_run.find(path, kept, trust=trust_code, report=report)
        except ConfigError as error:
            raise ConfigError(f"{file}: the class of this config is {kept.where}: {error}") from error
    return settings.from_json(cls, text, source=str(file))


def require_run(path: Path) -> None:
    """Refuses a path that is no run folder; runs none of its code (ConfigError)."""
    _read(path)


def data_snapshot(run: Path, step: int | Literal["newest"] | None = None) -> Path:
    """The folder of what a run kept of its data, see `recjax.data.storage.run_snapshot`; it need not be there.

    Of a run that has gone on with further data it is that of those which the checkpoint of `step` was trained on last;
    None takes the one that validation chose, or else the newest.
    """
    if not os.path.isdir(run / "checkpoints"):  # also where it is no run at all, which the caller says in full
        return run_snapshot.snapshot_of(run, 0)
    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        metas = checkpoints.metas()
    newest = max(metas, default=0)
    chosen = step if isinstance(step, int) else None
    if step is None and isinstance(cursor := metas.get(newest, {}).get("cursor"), Mapping):
        chosen = best if isinstance(best := cursor.get("best_step"), int) else None
    return run_snapshot.snapshot_of(run, source_number(metas.get(chosen if chosen in metas else newest, {})))


def holds_code_of(path: Path, config: RunConfig) -> bool:
    """Returns whether a run folder is known to have been made with the code that a config has."""
    return code_of_run.same(_read(path)[0], config)


def _no_run(path: Path) -> ConfigError:
    """The error for a path that is no run folder; the remedy names the runs that it holds."""
    remedy = "Name the --out folder of `recjax train`."
    if os.path.isfile(path):
        return ConfigError(f"{path} is a file, not a run folder. {remedy}")
    if not os.path.lexists(path):
        meant = ""
        for folder in (path.parent, Path("runs")):
            with contextlib.suppress(OSError):
                names = [config.parent.name for config in folder.glob("*/config.json")]
                if not meant and (near := nearest(path.name, names)) is not None:
                    meant = f" Did you mean {folder / near}?"
        return ConfigError(f"{path} is not a run folder: it does not exist.{meant} {remedy}")
    runs = sorted(str(config.parent) for config in path.glob("*/config.json")) if os.path.isdir(path) else []
    if runs:
        more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
        remedy = f"It holds {', '.join(runs[:3])}{more}: name one of these."
    return ConfigError(f"{path} is not a run folder: it has no config.json. {remedy}")


def _read(path: Path) -> tuple[CodeCopy, str]:
    """Reads what the config.json of a run folder says of code, and its text without that."""
    file = path / "config.json"
    if os.path.exists(file) and not file.is_file():  # a pipe, say, over which it would wait forever
        raise RecjaxError(f"{file} cannot be read: it is no regular file. Restore it from a copy.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in _NO_FILE:
            raise _no_run(path) from error
        raise RecjaxError(
            f"{file} cannot be read: {error}. Check its permissions, or restore it from a copy."
        ) from error
    try:
        plain = strict_json.parse(text)
    except strict_json.JsonError:  # which `from_json` explains
        return CodeCopy(), text
    if not isinstance(plain, dict) or "class" not in plain:
        return CodeCopy(), text
    kept = code_of_run.take(plain, file)
    return kept, json.dumps(plain)
