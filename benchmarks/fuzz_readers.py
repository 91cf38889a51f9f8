"""Do the readers refuse whatever is wrong with their input, and never crash, hang or swell?

    python benchmarks/fuzz_readers.py [--minutes 10] [--reader NAME] [--seed 0]

Damages good files (tests/support/fuzzing.py) and reads them, each reader in a process of its own with a limit of
memory. Prints a line for each reader: inputs tried, accepted, refused with a clear error, growth of memory after the
first fifth. Ends with status 1 after anything else: another exception, a crash, more than 2 s of CPU (or 20 s of
waiting) or 500 MB for an input, or growth above 64 MiB; then also prints the number of the input, which `--reader NAME
--number N` reads again.
"""

import argparse
import collections
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import fuzzing  # noqa: E402

CPU_S, WAIT_S, INPUT_MB, GROWTH_MIB, ROOM_GIB = 2, 20, 500, 64, 3


class TookTooLong(Exception):
    """An input was not done in time."""


class TookTooMuch(Exception):
    """An input took too much memory."""


def resident_mib() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def peak_mb(reset: bool = False) -> float:
    """Most memory of this process since it was last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def late(*_: object) -> None:
    """Ends the reading of an input."""
    raise TookTooLong


def try_one(name: str, number: int, seed: int, folder: Path) -> str:
    """Reads one damaged input; the outcome: accepted, or the class of the error that refused it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = fuzzing.TARGETS[name]
    fuzzing.damaged(target, folder, random.Random(f"{name} {seed} {number}"))
    before = peak_mb(reset=True)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    try:
        target.read(folder)
        return "accepted"
    except target.refusals as error:
        assert str(error).strip()
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if (more := peak_mb() - before) > INPUT_MB:
            raise TookTooMuch(f"{more:.0f} MB")


def watch() -> None:
    """Ends an input that is late by an exception."""
    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGPROF, late)


def read_many(name: str, seed: int, seconds: float, report: Path) -> None:
    """Reads inputs until the time is over; keeps the report up to date."""
    faulthandler.enable()
    watch()
    outcomes: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    settled, number = 0.0, 0
    with tempfile.TemporaryDirectory(prefix="recjax-fuzz-") as folder:
        (Path(folder) / "good").mkdir()
        fuzzing.TARGETS[name].write(Path(folder) / "good")
        fuzzing.TARGETS[name].read(Path(folder) / "good")  # imports, and what is made once
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0], -1))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_GIB * 2**30, -1))
        begin = time.monotonic()
        while (spent := time.monotonic() - begin) < seconds:
            Path(f"{report}.number").write_text(str(number))
            try:
                outcomes[try_one(name, number, seed, Path(folder) / "input")] += 1
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
                outcomes["DEFECT"] += 1
                if what not in failures:
                    failures[what] = f"input {number}: {str(error)[:200]}\n{traceback.format_exc()[-1500:]}"
            number += 1
            if not settled and spent > seconds / 5:
                gc.collect()
                settled = resident_mib()
        gc.collect()
        growth = resident_mib() - settled if settled else 0.0
    report.write_text(json.dumps({"outcomes": outcomes, "failures": failures, "growth": growth}))


def main() -> int:
    """Fuzzes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=fuzzing.TARGETS)
    parser.add_argument("--number", type=int, help="read this input alone, in this process")
    options = parser.parse_args()
    if options.number is not None:
        watch()
        with tempfile.TemporaryDirectory() as folder:
            print(try_one(options.reader, options.number, options.seed, Path(folder) / "input"))
        return 0
    names = [options.reader] if options.reader else list(fuzzing.TARGETS)
    seconds = 60 * options.minutes / len(names)
    total, bad = 0, []
    print(f"{'reader':22} {'inputs':>8} {'accepted':>9} {'refused':>8} {'growth, MiB':>12}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            process = multiprocessing.get_context("fork").Process(
                target=read_many, args=(name, options.seed, seconds, report)
            )
            process.start()
            process.join(seconds + 60)
            if process.is_alive():
                process.kill()
            if not report.exists():
                at = Path(f"{report}.number")
                bad.append(f"{name}: the process ended with {process.exitcode} at input {at.read_text() or '?'}")
                print(f"{name:22} {'died':>8}", flush=True)
                continue
            found = json.loads(report.read_text())
        outcomes = found["outcomes"]
        inputs, accepted = sum(outcomes.values()), outcomes.pop("accepted", 0)
        defects = outcomes.pop("DEFECT", 0)
        refused = sum(outcomes.values())
        total += inputs
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in outcomes.items())
        print(f"{name:22} {inputs:8,} {accepted:9,} {refused:8,} {found['growth']:12.1f}  {kinds}", flush=True)
        bad += [f"{name}: {what}, {text}" for what, text in found["failures"].items()]
        bad += [f"{name}: {defects} inputs with defects in all"] if defects else []
        if found["growth"] > GROWTH_MIB:
            bad.append(f"{name}: memory grew by {found['growth']:.0f} MiB")
    print(f"{total:,} inputs; {len(bad)} findings")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
