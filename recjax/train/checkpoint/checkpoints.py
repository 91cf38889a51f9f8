"""Checkpoints of a run: whole or not there, verified before use, written and read without a copy in memory.

    checkpoints/00000100/state/            the arrays (Orbax; any tool that reads Orbax reads them)
    checkpoints/00000100/part-00003/       rectangles of arrays that process 3 held, if there were several (Orbax)
    checkpoints/00000100/manifest.json     step, the caller's meta, every array's type, every file's checksum
    checkpoints/00000100/manifest.sha256   the manifest's own checksum
    checkpoints/.unfinished-00000200-...   being written or deleted; never read

A checkpoint may be an increment, which is read over those that it was made after: see `chain.py`.

A checkpoint is written under an unfinished name, flushed to the disk, and renamed last: a process that is
killed, or a machine that loses power, at any moment leaves a complete newest checkpoint.

Of several processes each writes and flushes what it holds, and tells process 0, which commits all of it by that rename
once everybody has. They tell each other so through `distributed.post`, from the threads that write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from recjax.errors import CheckpointDamage, TrainingError
from recjax.parallel import distributed, watchdog
from recjax.train.checkpoint import array_store, manifest, reading, save_protocol
from recjax.train.checkpoint import chain as chains
from recjax.train.checkpoint.array_store import Arrays
from recjax.train.checkpoint.chain import Chain, Link
from recjax.utils.files import disk_error, flush_folder

_NAME = re.compile(r"(\d{8,})(\.replaced)?")
_UNFINISHED = ".unfinished-"
_saves = itertools.count()  # begun in this process; all processes count alike
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint.

    Attributes:
      step: the training step after which it was saved.
      arrays: nested dict of lazy arrays, with the types and shapes that were saved.
      meta: the `meta` of `save`, as JSON reads it back (tuples are lists).
      chain: the checkpoints that it is read from, itself the last: what an increment after it names.
    """

    step: int
    arrays: Arrays
    meta: dict[str, Any]
    chain: Chain = ()


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints in one folder. Use it as a context manager, or call `close`.

    All processes of a run save and restore together; what process 0 finds in the folder counts.
    Reading changes nothing on the disk, so that a run can be evaluated while it trains.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Opens the folder, which need not exist yet.

        Args:
          directory: the folder of all checkpoints of one run.
          keep: how many of the newest to keep, at least 2: while one is found damaged, the one before serves.
        """
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2 checkpoints are kept, so that one may be damaged")
        self._directory = directory
        self._keep = keep
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[Chain] | None = None
        self._arrays_read = threading.Event()  # whether the arrays of the last save have been read
        self._arrays_read.set()
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints that are there, ascending. Reading one shows whether it is intact."""
        return list(self._folders(together=False))

    def metas(self) -> dict[int, dict[str, Any]]:
        """Step -> the `meta` of each checkpoint that is there, ascending, as its manifest has it: nothing is verified.

        Checkpoints whose manifest cannot be read are left out.
        """
        peeked = {step: manifest.peek(folder).get("meta") for step, folder in self._folders(together=False).items()}
        return {step: meta for step, meta in peeked.items() if isinstance(meta, dict)}

    def holds(self, chain: Chain) -> bool:
        """Returns whether the checkpoints of a chain are there as they were, as far as their manifests tell."""
        return chains.is_there(self._folders(together=False), chain)

    def save(
        self, step: int, arrays: Arrays, meta: dict[str, Any], pinned: int | None = None, after: Chain = ()
    ) -> None:
        """Starts to write a checkpoint in the background; waits first for one that is still being written.

        When it is complete, what is no longer needed goes: all but the newest `keep`, those that they pin, and those
        that these need (`chain.steps_that_stay`); those that `newest` found damaged; and those of later steps, which
        belong to a course that the run left when it went back to an earlier checkpoint.

        Args:
          step: training steps done.
          arrays: nested dict of NumPy or lazy arrays. They are not copied: nobody changes them until
            `wait_for_arrays`, `wait`, `close` or the next `save` returns.
          meta: JSON values, taken over before this returns.
          pinned: a step whose checkpoint (this or an earlier one) is kept besides the newest, such as the
            best one so far. It is kept as long as this one, since a run that goes back to this one needs it again.
          after: of an increment, the checkpoints that it is read over, all of earlier steps; (): it is whole.

        Raises:
          TrainingError: the save *before* this one failed: no space, no permission. This one is not begun.
          TypeError: arrays or meta that cannot be stored.
        """
        chain = {"chain": [dataclasses.asdict(link) for link in after]} if after else {}
        content = {"step": step, "pinned": pinned, "arrays": array_store.describe(arrays), "meta": meta, **chain}
        content = json.loads(json.dumps(content))
        self.wait()
        self._arrays_read.clear()
        save = self._save if distributed.is_main() else self._save_part
        self._saving = self._worker.submit(save, next(_saves), step, arrays, content)

    def wait_for_arrays(self) -> None:
        """Returns when the arrays of the last save may change: all are in files, or the save has failed.

        What is left, flushing and checksums, goes on in the background; an error of the save comes with `wait`.
        """
        self._arrays_read.wait()

    def wait(self) -> Chain:
        """Returns when no checkpoint is being written any more.

        Returns:
          What an increment after the one that was being written names; () if none was.

        Raises:
          TrainingError: the last save failed: no space, no permission. The checkpoints before it are intact.
        """
        saving, self._saving = self._saving, None
        return () if saving is None else saving.result()

    def close(self) -> None:
        """Waits for the last save and ends the background thread.

        Raises:
          TrainingError: as for `wait`.
        """
        try:
            with watchdog.during("checkpoint"):
                self.wait()
        finally:
            self._worker.shutdown()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes. If the body failed and the last save too, the body's error stays and gets a note."""
        try:
            self.close()
        except TrainingError as failed_save:
            if error is None:
                raise
            error.add_note(str(failed_save))

    def newest(self, report: Callable[[str], None], use: Callable[[Restored], T]) -> T | None:
        """Restores the newest checkpoint that is intact; every file is verified before anything is used.

        Args:
          report: called once for each damaged checkpoint that is passed over, with a paragraph that names it,
            the file, what is wrong with it, and the checkpoint that is used instead.
          use: called with the checkpoint, whose lazy arrays must be read before it returns: later a run that goes on
            may remove the files. If a file is damaged then, it is called again with the checkpoint before.

        Returns:
          The result of `use`, or None if there is no checkpoint at all.

        Raises:
          TrainingError: there are checkpoints, but none is intact; or one cannot be read by this user, or
            was written in another format.
        """
        self.wait()
        damages: dict[Path, str] = {}
        folders, known = self._folders(), chains.Known()
        for step, folder in reversed(folders.items()):
            try:
                used = _used(folders, step, use, known)
            except manifest.CorruptCheckpointError as damage:
                if reading.gone(folder):  # a run that goes on has removed it meanwhile, and so has newer ones
                    return self.newest(report, use)
                damages[folder] = str(damage)
                self._damaged.add(step)
                continue
            for damaged, what in damages.items():
                report(
                    f"checkpoint {damaged} is damaged: {what}. The one before it, of step {step}, is used instead; "
                    "the damaged one is removed when the next is complete."
                )
            return used
        if damages:
            raise CheckpointDamage(
                f"none of the {len(damages)} checkpoints in {self._directory} is intact: "
                + "; ".join(f"in {folder.name}, {what}" for folder, what in damages.items())
                + ". Restore the folder from a backup, or start again with another --out."
            )
        return None

    def restore(self, step: int, use: Callable[[Restored], T]) -> T:
        """Restores the checkpoint of one step, verified and used as by `newest`.

        Raises:
          CheckpointDamage: it is damaged.
          TrainingError: there is none of that step, it cannot be read, or has another format.
        """
        self.wait()
        folders = self._folders()
        others = ", ".join(str(other) for other in folders if other != step) or "none"
        if step not in folders:
            raise TrainingError(
                f"{self._directory} has no checkpoint of step {step}; the steps that it has: {others}. Choose one of "
                "these, or another run folder."
            )
        try:
            return _used(folders, step, use, {})
        except manifest.CorruptCheckpointError as damage:
            if reading.gone(folders[step]):
                return self.restore(step, use)
            raise CheckpointDamage(
                f"checkpoint {folders[step]} is damaged: {damage}. Restore it from a backup, or choose another step; "
                f"the others there: {others}."
            ) from damage

    def _folders(self, together: bool = True) -> dict[int, Path]:
        """Returns step -> folder, ascending; with `together`, which all processes must call, as process 0 sees them."""
        try:
            names = sorted(os.listdir(self._directory))
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise reading.unreadable(self._directory, error) from error
        if together:
            names = json.loads(distributed.from_main("its checkpoints", json.dumps(names)))
        # Backwards, so that "00000100", if it is there, takes the place of "00000100.replaced".
        folders = {int(m[1]): self._directory / m[0] for name in reversed(names) if (m := _NAME.fullmatch(name))}
        return {step: folders[step] for step in sorted(folders)}

    def _save(self, turn: int, step: int, arrays: Arrays, content: dict[str, Any]) -> Chain:
        """Saves a checkpoint, and returns its chain; runs in the background thread of process 0."""
        final = self._directory / f"{step:08}"
        unfinished = self._unfinished(step)
        others = range(1, distributed.processes())
        whole, pieces = array_store.parted(arrays)
        try:
            if not self._directory.is_dir():
                self._directory.mkdir(parents=True)
                flush_folder(self._directory.parent)
            self._sweep()
            try:
                unfinished.mkdir()
                if others:
                    save_protocol.broadcast(turn, "folder", unfinished.name)
                written = {"state": whole} | ({reading.part(0): pieces} if pieces else {})
                samples = {name: array_store.write(unfinished / name, held) for name, held in written.items()}
                self._arrays_read.set()
                for name, held in written.items():
                    array_store.compare(unfinished / name, held, samples[name])
                known: manifest.Files = {}
                if others:  # who write to this folder, too
                    for name in written:
                        known |= _flushed(unfinished / name)
                    content["parts"] = [array_store.corners(arrays)]
                    for k in others:
                        answer = save_protocol.wait_for_worker(turn, k)
                        content["parts"].append(answer["corners"])
                        known |= answer["files"]
                    save_protocol.forget(turn - 1)  # all others have begun this one
                    reading.read(unfinished, content)  # what they wrote is here, too
                sha256 = manifest.seal(unfinished, content, known)
                self._put(unfinished, final)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            self._damaged.discard(step)
            self._retire(step)
            if others:
                save_protocol.broadcast(turn, "done", "saved")
            return (*chains.of_content(content), Link(step, sha256, array_store.size_bytes(arrays)))
        except BaseException as error:
            failed = _failed(final, error, array_store.size_bytes(arrays))
            if others:
                for key in ("folder", "done"):
                    save_protocol.broadcast(turn, key, f"!{failed}")
            if failed is error:
                raise
            raise failed from error
        finally:
            self._arrays_read.set()

    def _save_part(self, turn: int, step: int, arrays: Arrays, content: dict[str, Any]) -> Chain:
        """Saves the part of another process than 0 and waits for process 0's verdict; runs in its background thread."""
        me = distributed.process()
        try:
            name = save_protocol.wait_for_main(turn, "folder")
            _, pieces = array_store.parted(arrays)
            folder = self._directory / name / reading.part(me)
            try:
                samples = array_store.write(folder, pieces) if pieces else {}
                self._arrays_read.set()
                if pieces:
                    array_store.compare(folder, pieces, samples)
                files = _flushed(folder)
            except BaseException as error:
                failed = _failed(folder, error, array_store.size_bytes(pieces))
                save_protocol.report_to_main(turn, {"error": str(failed)})
                if failed is error:
                    raise
                raise failed from error
            save_protocol.report_to_main(turn, {"corners": array_store.corners(arrays), "files": files})
            save_protocol.wait_for_main(turn, "done")
            return ()
        finally:
            self._arrays_read.set()

    def _put(self, unfinished: Path, final: Path) -> None:
        """Gives the complete folder its name. An older one of that name is found until then."""
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            os.rename(final, replaced)
        os.rename(unfinished, final)
        flush_folder(self._directory)
        if replaced.exists():
            self._delete(replaced)

    def _retire(self, step: int) -> None:
        folders = self._folders(together=False)
        intact = [other for other in folders if other <= step and other not in self._damaged]
        content_of = functools.cache(lambda other: manifest.peek(folders[other]) if other in folders else {})
        stay = chains.steps_that_stay(intact, self._keep, content_of)
        for other in sorted(set(folders) - stay, reverse=True):  # an increment before what it needs
            self._delete(folders[other])
            self._damaged.discard(other)

    def _delete(self, folder: Path) -> None:
        # Renamed first: a folder that is half deleted must not pass for a damaged checkpoint.
        doomed = self._unfinished(int(folder.name.partition(".")[0]))
        os.rename(folder, doomed)
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Removes what a killed process left: it was never complete, or was being deleted."""
        for name in os.listdir(self._directory):
            replaced = name.endswith(".replaced") and (self._directory / name.removesuffix(".replaced")).exists()
            if replaced or name.startswith(_UNFINISHED):
                shutil.rmtree(self._directory / name)

    def _unfinished(self, step: int) -> Path:
        return self._directory / f"{_UNFINISHED}{step:08}-{secrets.token_hex(4)}"


def _used(folders: Mapping[int, Path], step: int, use: Callable[[Restored], T], known: chains.Known) -> T:
    """Returns the result of `use` on a checkpoint; `CorruptCheckpointError` in all processes if any cannot read it."""
    with watchdog.during("restore"):
        contents, damage = chains.verified(folders, step, known)
        if not damage:
            try:
                arrays, chain = chains.read(folders, contents)
                restored = Restored(step, arrays, contents[-1]["meta"], chain)
            except manifest.CorruptCheckpointError as error:
                damage = str(error)
            except (KeyError, TypeError, AttributeError) as error:
                damage = f"it cannot be read: {error}"
        reading.agree(f"what checkpoint {step} is", damage)
        try:
            used = use(restored)
        except manifest.CorruptCheckpointError as error:
            damage = str(error)
        reading.agree(f"whether checkpoint {step} could be read", damage)
        return used


def _failed(folder: Path, error: BaseException, needed_bytes: int) -> BaseException:
    """Makes of a disk's error in a save one for the user; returns any other error as it is."""
    if isinstance(error, manifest.CorruptCheckpointError):
        return TrainingError(
            f"checkpoint {folder} does not read back as it was written: {error}. It is not kept; those before it are "
            "as they were. Check the disk and its mount, and start the same command again, or choose another --out."
        )
    return disk_error(folder, error, needed_bytes, resumes=True) if isinstance(error, OSError) else error


def _flushed(folder: Path) -> manifest.Files:
    """Flushes a folder of a checkpoint, which need not exist; returns its files by their paths in the checkpoint."""
    return {f"{folder.name}/{path}": what for path, what in manifest.flush(folder).items()} if folder.exists() else {}
