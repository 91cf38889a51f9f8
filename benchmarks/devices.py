"""What eight host devices cost against one, with and without de-duplication: time a step, host time, and bytes.

    python benchmarks/devices.py [--devices 8] [--batch-size 4096] [--rounds 5] [--steps 10]

On one machine more devices bring no more cores, so that what the step takes longer is what the exchanges cost: copies
in memory, the routing, and threads that wait for each other. The bytes are those that would leave a device on a
network. Movietweetings' ratings; Criteo Kaggle's tables (rows capped at 2 million, D=16) with Zipf ids and with uniform
ones. All rows are spread (plan=row_wise). Settings take turns, so that drift of the machine falls on all alike.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import recjax
from recjax.config.presets import load
from recjax.lab.bench.timing import Ours
from recjax.planning.compiled_collectives import wire_bytes
from recjax.train.build import build_trainer
from recjax.train.run.summary import versions
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer

DATA = {
    "movietweetings": ("movietweetings",),
    "Zipf 1.1": ("bench_kaggle16",),
    "uniform": ("bench_kaggle16", "data.exponent=0"),
}


class Contestant:
    """One setting: its state, and what was measured."""

    def __init__(self, preset: str, *overrides: str) -> None:
        """Builds it."""
        self.trainer: Trainer = build_trainer(load(preset, (*overrides, "plan=row_wise")), splits=("train",))
        self.ours = Ours(self.trainer)
        self.state: TrainState = self.trainer.init_state()
        self.ms: list[float] = []

    def round(self, steps: int) -> None:
        """Trains some steps."""
        self.state, done = self.ours.round(self.state, steps)
        self.ms.append(1e3 * done.seconds / steps)

    def host_ms(self) -> float:
        """Milliseconds of CPU to count one batch and to lay it out, when nothing else runs."""
        train = self.trainer.config.train
        batch = next(self.trainer.routed_batches()).batch
        taken = []
        for _ in range(7):
            start = time.process_time()
            routed = self.trainer.route(batch, train.batch_size).routed
            self.trainer.router.lay_out(routed, self.ours.capacities)
            taken.append(1e3 * (time.process_time() - start))
        return statistics.median(taken)

    def kib(self) -> tuple[float, float]:
        """KiB of ids, rows and gradients that leave a device in a step: useful and padded."""
        inputs = self.trainer.first_inputs(self.ours.capacities)
        hlo = self.trainer.step_program.lower(self.state, inputs).compile().as_text() or ""
        lines: list[dict[str, Any]] = wire_bytes(hlo, self.trainer.bound, inputs.routing, 4)
        found = [x for x in lines if x["phase"] in ("id_exchange", "row_exchange", "grad_exchange")]
        return sum(x["useful_bytes"] for x in found) / 1024, sum(x["padded_bytes"] for x in found) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    print(f"recjax {recjax.__version__}, {versions()}, batch {args.batch_size:,}")
    print(
        f"{'ids':<16}{'devices':>8} {'dedup':<6}{'ms a step':>11}{'quartiles':>18}{'host ms':>9}{'KiB':>9}{'padded':>9}"
    )
    for name, (preset, *overrides) in DATA.items():
        common = (*overrides, f"train.batch_size={args.batch_size}", "mesh.platform=cpu")
        settings = [(n, d) for n in (args.devices, 1) for d in ("true", "false")]
        contestants = {
            (n, d): Contestant(preset, *common, f"mesh.devices={n}", f"embedding.dedup={d}") for n, d in settings
        }
        for number in range(args.rounds + 1):
            for contestant in contestants.values():
                contestant.round(args.steps)
                print(f"{name}: round {number} of {args.rounds}", file=sys.stderr)
        for (n, dedup), contestant in contestants.items():
            ms = contestant.ms[1:]  # the first round compiled
            low, middle, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
            useful, padded = contestant.kib() if n > 1 else (0, 0)
            print(
                f"{name:<16}{n:>8} {'yes' if dedup == 'true' else 'no':<6}{middle:>11.1f}{low:>9.1f} -{high:>7.1f}"
                f"{contestant.host_ms():>9.2f}{useful:>9,.0f}{padded:>9,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
