"""A search for good settings: trials that Optuna chooses, kept in a journal that several processes may share.

The folder of a study:

    journal.log      what Optuna knows: the values of every trial, its evaluations, how it ended
    trial-0007/      the run folder of a trial
    results.jsonl    a line a trial, as of a sweep
    .trial-0007.lock held by the process that trains it, and by its child

Evaluations are reported by the samples trained on until then, step times batch size: trials of several batch sizes are
compared where they have seen equally many.

A trial is under way for Optuna until somebody says how it ended. If nobody holds its lock, its process died: whoever
looks for work next goes on with it, from its run's last checkpoint. So a study that was killed anywhere resumes, and
processes on several machines that see the folder work on one study without knowing of each other.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, RecjaxError
from recjax.parallel.stopping import handling
from recjax.settings.values import written
from recjax.sweep.file import Run, direction
from recjax.sweep.report import measure
from recjax.sweep.run import Signals, result, train_apart
from recjax.sweep.search_file import Search
from recjax.utils import log, strict_json
from recjax.utils.files import disk_error
from recjax.utils.locks import locked, open_lock, try_lock

_POLL_S = 0.2  # between looks at the metrics of a run
_HOPELESS = 3  # first trials that fail before the search ends


def require() -> Any:
    """Returns Optuna; ConfigError, which names the extra, where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"`recjax tune` needs a package that is not installed ({error}). Install the extra: "
            'pip install -c constraints.txt -e ".[tune]"'
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Study:
    """A study in its folder, as one of the processes that work on it."""

    def __init__(self, search: Search) -> None:
        """Opens the study, or begins it.

        Raises:
          ConfigError: Optuna is missing, or the folder holds a study of another search.
          TrainingError: no permission, no space.
        """
        self._optuna, self._search = require(), search
        try:
            search.out.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._study = self._open()
        except OSError as error:
            raise disk_error(search.out, error, 0) from error

    def _open(self) -> Any:
        optuna, search = self._optuna, self._search
        from optuna.storages.journal import JournalFileBackend

        pruners = {
            # They know trials that were completed alone, which are the better ones: half of those as good as these
            # are below their median, at every evaluation.
            "quartile": lambda: optuna.pruners.PercentilePruner(75.0, 5, search.warmup, n_min_trials=4),
            "median": lambda: optuna.pruners.MedianPruner(5, search.warmup, n_min_trials=3),
            "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(),
            "none": lambda: optuna.pruners.NopPruner(),
        }
        journal = search.out / "journal.log"
        if not journal.exists() and any(path.name != ".study.lock" for path in search.out.iterdir()):
            raise ConfigError(f"{search.out} is not empty and holds no journal.log of a search. Choose another --out.")
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
            study_name="recjax",
            load_if_exists=True,
            direction="maximize" if direction(search.sort) else "minimize",
            pruner=pruners[search.pruner](),
        )
        then, now = study.user_attrs.get("search"), json.loads(json.dumps(search.identity))
        if then is None:
            study.set_user_attr("search", now)
        elif differing := [key for key in now if then.get(key) != now[key]]:
            raise ConfigError(
                f"{search.out} holds a study with another {', '.join(differing)}. Restore the file to go on with it, "
                "or choose another --out. (trials, sampler, pruner and seed may change.)"
            )
        return study

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """While one process of all looks for work."""
        return locked(self._search.out / ".study.lock")

    def work(self) -> None:
        """Does trials until there are as many as asked for, or those that are left are done by other processes.

        Raises:
          Interrupted, StoppedError: SIGINT or SIGTERM came. The trial under way was stopped too, and has saved.
          RecjaxError: the first trials all failed.
        """
        signals = Signals("the search", "it goes on with the trial that was under way")
        with handling((signal.SIGINT, signal.SIGTERM), signals.take):
            while not signals.taken:
                with contextlib.ExitStack() as held:
                    claimed = self._claim(held)
                    if claimed is None:
                        break
                    self._do(*claimed, signals)
                self._give_up_if_hopeless()
        if signals.taken:
            raise signals.error()

    def _claim(self, held: contextlib.ExitStack) -> tuple[Any, int] | None:
        """A trial to train and the descriptor of its lock: one whose process died, or else a new one."""
        optuna, search = self._optuna, self._search
        running = optuna.trial.TrialState.RUNNING
        with self._locked():
            trials = self._study.get_trials(deepcopy=False)
            for known in trials:
                if known.state == running and (lock := self._lock(held, known.number)) is not None:
                    return optuna.trial.Trial(self._study, known._trial_id), lock
            if len(trials) >= search.trials:
                return None
            # A function of seed and number, so that neither a resume nor a further process repeats values.
            seed = search.seed * 1_000_003 + len(trials)
            samplers = optuna.samplers
            kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}
            self._study.sampler = kinds[search.sampler](seed=seed % 2**32)
            trial = self._study.ask()
            lock = self._lock(held, trial.number)
            assert lock is not None
            for dimension in search.dimensions:  # here already: the values do not depend on what ends meanwhile
                dimension.suggest(trial)
            return trial, lock

    def _lock(self, held: contextlib.ExitStack, number: int) -> int | None:
        """The descriptor of a trial's lock, or None where another process holds it."""
        file = open_lock(self._search.out / f".trial-{number:04}.lock")
        if not try_lock(file):
            file.close()
            return None
        held.callback(file.close)
        return file.fileno()

    def _do(self, trial: Any, lock: int, signals: Signals) -> None:
        optuna, search = self._optuna, self._search
        state = optuna.trial.TrialState
        swept = {dimension.key: dimension.suggest(trial) for dimension in search.dimensions}
        label = f"[trial {trial.number} of {search.trials}]"
        try:
            run = search.run(trial.number, swept)
        except ConfigError as error:
            self._fail(trial, label, str(error))
            return
        if result(run)["status"] != "done":
            log.info(f"{label} {run.command}")
        reported = set(self._study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        follower = _Follower(trial, search.sort, run.config.train.batch_size, reported)
        # The child holds the lock too: if this process is killed, nobody else trains in that folder meanwhile.
        why = train_apart(run, label, signals, follower, keep=(lock,))
        done = result(run)
        value = measure(done, search.sort)
        if done["status"] == "done" and math.isfinite(value):
            self._study.tell(trial, value)
            log.info(f"{label} done: {search.sort} {value:.4f}")
        elif follower.pruned and not signals.taken:
            self._study.tell(trial, state=state.PRUNED)
            log.info(f"{label} given up after step {follower.step}: {search.sort} {follower.value:.4f}")
        elif not signals.taken:  # else it stays under way, for the next call
            missing = f"it has no {search.sort}: the data have no validation split, or no such label"
            self._fail(trial, label, missing if done["status"] == "done" else why or "it ended without a result")

    def _fail(self, trial: Any, label: str, why: str) -> None:
        trial.set_user_attr("error", why)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        log.info(f"{label} failed: {why}")

    def _give_up_if_hopeless(self) -> None:
        failed = self._optuna.trial.TrialState.FAIL
        trials = self._study.get_trials(deepcopy=False)
        if len(trials) >= _HOPELESS and all(trial.state == failed for trial in trials):
            raise RecjaxError(
                f"the first {len(trials)} trials all failed, the last one with: "
                f"{trials[-1].user_attrs.get('error', 'no reason')} Mend the search file, and choose another --out."
            )

    def results(self) -> list[dict[str, Any]]:
        """A line of results.jsonl for every trial: `run.result`, with the `steps` that were trained.

        `status` is "done", "pruned", "failed" (then there is an `error`) or "open".
        """
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            keys = [dimension.key for dimension in self._search.dimensions]
            if set(trial.params) != set(keys):
                continue  # its process died before it had values
            swept = {key: written(trial.params[key]) for key in keys}  # as `Dimension.suggest` gave them
            error = trial.user_attrs.get("error")
            try:
                run = self._search.run(trial.number, swept)
            except ConfigError:
                found.append({"index": trial.number, "status": "failed", "swept": swept, "error": error})
                continue
            row = result(run)
            status = {"PRUNED": "pruned", "FAIL": "failed"}.get(trial.state.name, row["status"])
            if row["status"] != "done" and trial.intermediate_values:
                seen = max(trial.intermediate_values)
                split, _, name = self._search.sort.partition(".")
                row |= {split: {name: trial.intermediate_values[seen]}, "steps": seen // run.config.train.batch_size}
            found.append(row | {"status": status} | ({} if error is None else {"error": error}))
        return found


class _Follower:
    """Reports a trial's evaluations to Optuna while it trains, and ends it where that finds it hopeless.

    Attributes:
      pruned: whether it was ended.
      step: the last evaluation.
      value: its measure.
    """

    def __init__(self, trial: Any, sort: str, batch_size: int, reported: set[int]) -> None:
        self._trial, self._batch_size, self._reported = trial, batch_size, reported
        self._split, _, self._name = sort.partition(".")
        self.pruned, self.step, self.value = False, 0, math.nan

    def __call__(self, run: Run, child: subprocess.Popen[str], ended: threading.Event) -> None:
        """Follows metrics.jsonl until the run has ended."""
        metrics, size = run.out / "metrics.jsonl", -1
        while not ended.wait(_POLL_S) and not self.pruned:
            with contextlib.suppress(OSError):
                now = metrics.stat().st_size
                if now == size:
                    continue
                size = now
                self._read(metrics)
                # Optuna judges the last of all that were reported.
                if self.step and child.poll() is None and self._trial.should_prune():
                    self.pruned = True
                    child.send_signal(signal.SIGTERM)

    def _read(self, metrics: Path) -> None:
        for text in metrics.read_bytes().splitlines(keepends=True):
            try:
                line = strict_json.parse(text) if text.endswith(b"\n") else {}
            except ValueError:
                continue  # which the run itself complains of
            value = line.get(self._name) if line.get("split") == self._split else None
            if isinstance(value, float) and line["step"] > self.step:
                self.step, self.value = line["step"], value
                if (seen := self.step * self._batch_size) not in self._reported:
                    self._trial.report(value, seen)
