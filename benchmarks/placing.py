"""Time in which the thread that trains pads a batch and places it on the devices, where processes are several.

    python benchmarks/placing.py [--preset PRESET ...] [--batch 65536] [--rounds 15] [OVERRIDE ...]

Two processes of this machine, each with 4 host devices, place their halves of a batch at the same time. Devices route:
so it is all ids of the batch. Milliseconds are those of the first process, medians over rounds of five, with the middle
half of the rounds: until the call returns, until the arrays are there, and of CPU time of all its threads.
"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recjax.config.presets import load
from recjax.embedding.routing import device, host
from recjax.embedding.routing.routed import Routing
from recjax.parallel.malloc import keep_freed_memory
from recjax.train.build import build_trainer
from recjax.train.routers import place
from recjax.utils.text import aligned


def placed(preset: str, batch: int, overrides: list[str]) -> Callable[[], Any]:
    """Returns the call that places the first batch of a preset."""
    how = ["train.routing=device", "train.workers=0", "mesh.devices=8", "mesh.platform=cpu"]
    trainer = build_trainer(load(preset, [f"train.batch_size={batch}", *how, *overrides]), weights=False)
    routed = next(trainer.routed_batches()).routed
    sizes = routed.required_capacities
    features = device.pack_ids(routed, trainer.bound, sizes, trainer.dtype)
    routing = Routing({}, features, host.pack_pooled(routed, trainer.bound, sizes, trainer.dtype))
    return lambda: place(routed.batch, routing, routed.local, trainer.mesh, trainer.dtype)


def measured(work: Callable[[], Any], rounds: int) -> np.ndarray:
    """Seconds of each round, [rounds, 3]: of the call, until all is there, of CPU time."""
    found = []
    for _ in range(rounds + 1):
        times = []
        for _ in range(5):
            cpu, began = time.process_time(), time.perf_counter()
            made = work()
            called = time.perf_counter() - began
            jax.block_until_ready(made)
            times.append((called, time.perf_counter() - began, time.process_time() - cpu))
        found.append(np.median(times, axis=0))
    return np.array(found[1:])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", nargs="+", default=["bench_kaggle16", "bench_multihot"])
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--of", nargs=2, metavar=("PROCESS", "PORT"), help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.of is None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        both = [subprocess.Popen([sys.executable, *sys.argv, "--of", str(process), port]) for process in (0, 1)]
        sys.exit(max(one.wait() for one in both))
    process, port = int(options.of[0]), options.of[1]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    keep_freed_memory()
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    cells = [["preset", "arrays", "MB a process", "call, ms", "middle half", "there, ms", "CPU, ms"]]
    for preset in options.preset:
        work = placed(preset, options.batch, overrides)
        arrays = jax.tree.leaves(work())
        mb = sum(part.data.nbytes for x in arrays for part in x.addressable_shards) / 1e6
        low, middle, high = 1e3 * np.quantile(measured(work, options.rounds), [0.25, 0.5, 0.75], axis=0)
        times = [f"{middle[0]:.2f}", f"{low[0]:.2f} to {high[0]:.2f}", f"{middle[1]:.2f}", f"{middle[2]:.2f}"]
        cells.append([preset, str(len(arrays)), f"{mb:.1f}", *times])
    if process == 0:
        print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
