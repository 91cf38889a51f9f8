"""Does the step's time grow with the rows of a table? Prints milliseconds a step and the ratio to the smallest.

    python benchmarks/step_time_by_rows.py [--devices 8] [--batch-size 4096] [--rows 10000 1000000 10000000]

The batch, and so the number of distinct rows that it touches, is the same at every size: ids are drawn
from the first 10,000 rows. Sizes take turns, so that drift of the machine falls on all of them alike.
"""

import argparse
import statistics
import sys
import time

import jax
import numpy as np
import optax

from recjax.data.batch import Bags, Batch
from recjax.embedding.bind import bind
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import make_plan
from recjax.embedding.routing.host import pack, route_on_host
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig, make_mesh, put_share
from recjax.train import state as states
from recjax.train.module import ModuleDef
from recjax.train.routers import HostRouter, pad
from recjax.train.run.summary import versions
from recjax.train.step import make_train_step

TABLES, DIM, DENSE = 4, 16, 13


class Runner:
    """A model with tables of `rows` rows, and a few routed batches for it."""

    def __init__(self, rows: int, devices: int, batch_size: int) -> None:
        """Builds and compiles."""
        names = tuple(f"t{i}" for i in range(TABLES))
        tables = tuple(TableSpec(n, rows, DIM, RowWiseAdagrad(0.05)) for n in names)
        features = tuple(FeatureSpec(n, n) for n in names)
        mesh = make_mesh(MeshConfig(devices, "cpu"))
        bound = bind(make_plan("row_wise", tables), tables, features, devices)
        config = DLRMConfig(bottom=(64, DIM), top=(64, 1))
        model = config.build(DENSE, dict.fromkeys(names, DIM), dtype=np.float32, seed=0)
        tx = optax.adagrad(0.05)
        self.state = states.create(model, bound, mesh, tx, 0, np.float32)
        self.step = make_train_step(ModuleDef.of(model), bound, mesh, tx)
        rng = np.random.default_rng(0)
        counted = []
        for _ in range(4):
            bags = {n: Bags((rng.zipf(1.1, (batch_size, 1)) - 1) % 10_000) for n in names}
            dense = rng.standard_normal((batch_size, DENSE)).astype(np.float32)
            labels = (rng.random(batch_size) < 0.3).astype(np.float32)
            counted.append(route_on_host(Batch(dense, bags, labels, np.ones_like(labels)), bound, batch_size))
        # One capacity for every table size, or the sizes would exchange different amounts of padding.
        capacities = {bound.groups[0].name: batch_size * TABLES // devices}
        router = HostRouter(bound, mesh, np.float32)
        self.inputs = [put_share(pad(c, pack(c, bound, capacities), router), mesh) for c in counted]
        self.run(8)

    def run(self, steps: int) -> float:
        """Milliseconds a step."""
        began = time.perf_counter()
        for i in range(steps):
            self.state, metrics = self.step(self.state, self.inputs[i % len(self.inputs)])
            metrics["loss"].block_until_ready()
        return (time.perf_counter() - began) / steps * 1e3


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    options = parser.parse_args()
    runners = {}
    for rows in options.rows:
        print(f"building {TABLES} tables of {rows:,} x {DIM}", file=sys.stderr)
        runners[rows] = Runner(rows, options.devices, options.batch_size)
    times: dict[int, list[float]] = {rows: [] for rows in runners}
    for _ in range(options.rounds):
        for rows, runner in runners.items():
            times[rows].append(runner.run(options.steps))
    print(f"{options.devices} devices, batch {options.batch_size}, {versions()}, {jax.devices()[0].device_kind}")
    first = times[options.rows[0]]
    print(f"{'rows':>12} {'ms/step':>9} {'q25':>7} {'q75':>7} {'ratio':>7}   (median of {options.rounds} rounds)")
    for rows, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        ratio = statistics.median(a / b for a, b in zip(values, first, strict=True))
        print(f"{rows:12,} {median:9.2f} {low:7.2f} {high:7.2f} {ratio:7.3f}")


if __name__ == "__main__":
    main()
