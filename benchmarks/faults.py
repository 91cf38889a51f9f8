"""Faults of the machine, one verb at a time: a full disk, a read-only folder, little memory, a clock that jumps.

    python benchmarks/faults.py
    python benchmarks/faults.py --verbs train resume --faults full clock

Each case starts a command in a process of its own and hits it; then the same command is given once more, without the
fault. Of each the table tells the exit status and the last words of the first; "one paragraph" is NO where it showed a
traceback; and "mended" is yes where the second ended well, with what an undisturbed command leaves: the same weights,
prepared data and scores bit for bit, and an export of the same files. The full disk is a small tmpfs, and the folder is
read-only for a process without CAP_DAC_OVERRIDE: both need root. The clock needs libfaketime (Debian: faketime).

Under libfaketime a training stood still after a jump by -24 h in two of three tries: not known whether by libfaketime.
A limit on addresses may end a process within XLA or BLAS, which abort: then there is no paragraph, and status 134 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import glob
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import tables
from support.commands import arrays, steps_of, write_preset

from recjax.data.source import SPLITS
from recjax.data.storage.blocks import open_prepared

STEPS = 60
SETTINGS = [f"train.steps={STEPS}", "train.eval_every=1000", "train.checkpoint_every=5", "mesh.devices=2"]
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"
VERBS = ("train", "resume", "prepare", "export", "predict")
FULL_BYTES = (0, 20_000, 200_000)  # that are free
FILE_BYTES = (1_000, 30_000)  # of the largest file
MEMORY_MB = (800, 1_600, 2_000, 2_400)  # of addresses; a small run on two cores takes some 2,300
JUMPS_S = (-86_400, 86_400)


@dataclasses.dataclass
class Case:
    """A command in a folder of its own.

    Attributes:
      arguments: of the command.
      folder: where it writes.
      under_way: whether it has begun to do its work; None: no fault comes in its middle.
      result: what a command leaves that was not disturbed, as values to compare.
    """

    arguments: list[str]
    folder: Path
    under_way: Callable[[], bool] | None
    result: Callable[[], Any]


@dataclasses.dataclass
class Ended:
    """The end of a command: its exit status, and what it wrote on standard error."""

    status: int
    err: str


def start(case: Case, *, before: Callable[[], None] | None = None, prefix: list[str], env: dict[str, str]) -> Any:
    command = [*prefix, sys.executable, "-m", "recjax", *case.arguments]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        env=os.environ | {"PYTHONPATH": path, "RECJAX_CACHE": str(case.folder / "cache")} | env,
    )


def end(process: Any, limit_s: float = 180.0) -> Ended:
    try:
        _, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
        return Ended(-1, f"{err}\nno end within {limit_s:g} s")
    return Ended(process.returncode, err)


def run(case: Case, **options: Any) -> Ended:
    return end(start(case, **{"prefix": [], "env": {}, **options}))


def wait_for(case: Case, process: Any, limit_s: float = 90.0) -> None:
    """Until the command is under way, or has ended."""
    until = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < until:
        if case.under_way is not None and case.under_way():
            return
        time.sleep(0.01)


def steps(path: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        return steps_of(path, "train")
    return []


def rows_of(prepared: Path) -> list[bytes]:
    """All rows of prepared data; their files hold random marks beside."""
    source = open_prepared(prepared)
    batches = [tables.whole(source, split) for split in SPLITS]
    arrays = [(batch.labels, batch.dense, *(bags.ids for bags in batch.bags.values())) for batch in batches if batch]
    return [array.tobytes() for each in arrays for array in each]


class Bench:
    """What the cases start from: a run with its first steps, a whole one, and a table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.preset = write_preset(folder)
        self.table = tables.write(tables.clicks(60_000, lists=False), folder / "clicks.csv")
        small = ["train", "table", f"data.from={self.table}", "data.label=clicked", "mesh.devices=1", "embedding.dim=4"]
        self.whole = folder / "whole"
        made = Case([*small, "train.steps=5", "--out", str(self.whole)], folder, None, lambda: None)
        self.half = folder / "half"
        half = Case(
            ["train", str(self.preset), *SETTINGS, "train.steps=20", "--out", str(self.half)],
            folder,
            None,
            lambda: None,
        )
        for each in (made, half):
            ended = run(each)
            assert ended.status == 0, ended.err

    def case(self, verb: str, folder: Path) -> Case:
        """The command of a verb that writes to a folder; what it starts from lies there."""
        out = folder / "out"
        if verb in ("train", "resume"):
            if verb == "resume":
                shutil.copytree(self.half, out)
            first = 20 if verb == "resume" else 0
            return Case(
                ["train", str(self.preset), *SETTINGS, "--out", str(out)],
                folder,
                lambda: len(steps(out)) > first + 6,
                lambda: {key: value.tobytes() for key, value in arrays(out, STEPS).items()},
            )
        if verb == "prepare":
            arguments = ["data", "prepare", "table", "--from", str(self.table), "--out", str(out), "label=clicked"]
            return Case(arguments, folder, lambda: any(folder.glob(".out*")), lambda: rows_of(out))
        more = ["--input", str(self.table)] if verb == "predict" else []
        to = folder / "scores.csv" if verb == "predict" else out
        return Case(
            [verb, str(self.whole), *more, "--out", str(to)],
            folder,
            lambda: any(path.name not in ("cache", "ballast") for path in folder.iterdir()),
            lambda: to.read_bytes() if to.is_file() else sorted(str(path.relative_to(to)) for path in to.rglob("*")),
        )


@contextlib.contextmanager
def mount(folder: Path, mb: int) -> Iterator[Path]:
    """A disk of its own."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mb}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, free_bytes: int) -> None:
    """Fills the disk but for some bytes."""
    left = shutil.disk_usage(folder).free - free_bytes
    with contextlib.suppress(OSError), open(folder / "ballast", "ab") as file:
        while left > 0:
            left -= file.write(b"\0" * min(left, 2**20))
            file.flush()


def full(case: Case, free_bytes: int, in_its_middle: bool) -> Ended:
    if not in_its_middle:
        fill(case.folder, free_bytes)
        ended = run(case)
    else:
        process = start(case, prefix=[], env={})
        wait_for(case, process)
        fill(case.folder, free_bytes)
        ended = end(process)
    (case.folder / "ballast").unlink(missing_ok=True)
    return ended


def read_only(case: Case) -> Ended:
    process = start(case, prefix=["setpriv", "--bounding-set", "-dac_override,-dac_read_search"], env={})
    wait_for(case, process)
    folders = [case.folder, *(path for path in case.folder.rglob("*") if path.is_dir())]
    for path in folders:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o555)
    ended = end(process)
    for path in folders:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o755)
    return ended


def limited(case: Case, kind: int, most: int) -> Ended:
    return run(case, before=lambda: resource.setrlimit(kind, (most, most)))


def jump(case: Case, by_s: int) -> Ended:
    """The wall clock jumps in the middle; the monotonic one does not, as of Linux."""
    at = case.folder / "faketime"
    at.write_text("+0\n")
    (library,) = glob.glob(FAKETIME)[:1]
    env = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(at), "FAKETIME_NO_CACHE": "1"}
    process = start(case, prefix=[], env=env | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"})
    wait_for(case, process)
    at.write_text(f"{by_s:+d}\n")
    ended = end(process)
    at.unlink()
    return ended


def faults() -> dict[str, list[tuple[str, Callable[[Case], Ended]]]]:
    """Kind of fault -> cases of it, by name."""
    return {
        "full": [
            *(
                (f"{free:,} bytes free", functools.partial(full, free_bytes=free, in_its_middle=False))
                for free in FULL_BYTES
            ),
            ("full in its middle", functools.partial(full, free_bytes=0, in_its_middle=True)),
        ],
        "file": [
            (f"files of {most:,} bytes", functools.partial(limited, kind=resource.RLIMIT_FSIZE, most=most))
            for most in FILE_BYTES
        ],
        "read-only": [("read-only in its middle", read_only)],
        "memory": [
            (f"{mb:,} MB of addresses", functools.partial(limited, kind=resource.RLIMIT_AS, most=mb * 10**6))
            for mb in MEMORY_MB
        ],
        "clock": [(f"clock {by_s / 3600:+.0f} h", functools.partial(jump, by_s=by_s)) for by_s in JUMPS_S],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbs", nargs="*", choices=VERBS, default=VERBS)
    parser.add_argument("--faults", nargs="*", choices=list(faults()), default=list(faults()))
    parser.add_argument("--mb", type=int, default=64, help="size of the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recjax-faults-") as name:
        bench = Bench(Path(name))
        print(f"{'verb':8} {'fault':24} {'status':>6} {'one paragraph':13} {'mended':6} last words", flush=True)
        for verb in options.verbs:
            with mount(Path(name) / f"{verb}-truth", options.mb) as folder:
                case = bench.case(verb, folder)
                ended = run(case)
                assert ended.status == 0, ended.err
                truth = case.result()
            for kind in options.faults:
                for number, (fault, hit) in enumerate(faults()[kind]):
                    with mount(Path(name) / f"{verb}-{kind}-{number}", options.mb) as folder:
                        case = bench.case(verb, folder)
                        ended = hit(case)
                        again = run(case) if ended.status else ended
                        mended = again.status == 0 and case.result() == truth
                    paragraph = (
                        ended.err.count("recjax: error: ") == (ended.status != 0) and "Traceback" not in ended.err
                    )
                    last = ended.err.strip().splitlines()[-1] if ended.status and ended.err.strip() else ""
                    words = f"{'yes' if paragraph else 'NO':13} {'yes' if mended else 'NO':6} {last}"
                    print(f"{verb:8} {fault:24} {ended.status:6} {words}", flush=True)
                    if not mended:
                        print(f"  again: {again.status} {again.err.strip()[-300:]}", flush=True)


if __name__ == "__main__":
    main()
