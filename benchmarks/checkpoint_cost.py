"""What do a save and a restore cost? Prints seconds and the memory beyond the arrays, beside Orbax's own defaults.

    python benchmarks/checkpoint_cost.py [--mib 1024] [--folder DIR]

Orbax alone neither flushes to the disk nor verifies anything. Each measurement has a process of its own,
for the peak of a process's memory never sinks. Linux only.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from recjax.train.checkpoint.array_store import Arrays
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.utils.lazy_arrays import load


def state(mib: int) -> Arrays:
    """26 tables, of which one has over half of all bytes, and a small dense part."""
    sizes = [mib * 5 // 8, mib * 3 // 16, *[mib // 128] * 24]
    rng = np.random.default_rng(0)
    tables = {f"t{i}": rng.standard_normal((max(s * 2**14, 16), 16), np.float32) for i, s in enumerate(sizes)}
    return {"tables": tables, "dense": {f"w{i}": rng.standard_normal((64, 64)) for i in range(20)}}


def loaded(restored: Restored) -> Arrays:
    """All arrays in memory, as Orbax gives them."""
    return load(restored.arrays)


def status(field: str) -> float:
    """VmRSS or VmHWM, its highest value so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measured(name: str, action: Callable[[], object], arrays_mib: float) -> None:
    """Prints time, processor time and peak memory beyond what was there and beyond `arrays_mib`."""
    before, start, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    action()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    extra = status("VmHWM") - before - arrays_mib
    print(f"{name:28} {seconds:7.2f} s  {cpu:7.2f} s of CPU  {extra:7.0f} MiB beyond the arrays", flush=True)


def run(what: str, folder: Path, mib: int) -> None:
    """One measurement, in a process of its own."""
    jax.devices()
    if what == "recjax save":
        arrays = state(mib)
        with Checkpoints(folder / "ours", 2) as checkpoints:
            measured("recjax: save returns", lambda: checkpoints.save(1, arrays, {}), 0)
            measured("recjax: save complete", checkpoints.wait, 0)
    elif what == "recjax restore":
        measured("recjax: verify and restore", lambda: Checkpoints(folder / "ours", 2).restore(1, loaded), mib)
    elif what == "orbax save":
        arrays = state(mib)
        with ocp.PyTreeCheckpointer() as checkpointer:
            measured("Orbax's defaults: save", lambda: checkpointer.save(folder / "theirs", arrays), 0)
    else:
        with ocp.PyTreeCheckpointer() as checkpointer:
            measured("Orbax's defaults: restore", lambda: checkpointer.restore(folder / "theirs"), mib)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, 128 or more, or 0 for a few KiB")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for what in ("recjax save", "recjax restore", "orbax save", "orbax restore"):
            process = processes.Process(target=run, args=(what, Path(folder), options.mib))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"the measurement of {what} ended with status {process.exitcode}")


if __name__ == "__main__":
    main()
