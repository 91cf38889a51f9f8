"""Whole training steps by turns with dense products by the kernels, by XLA, by oneDNN and as measured tables choose.

    recjax bench bench_kaggle16 --products table.json
    python benchmarks/products.py bench_kaggle16 --tables table.json --rounds 6 --steps 8

Prints samples/s and CPU milliseconds of a step, and the ratio of samples/s to that of the kernels round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys

import numpy as np

from recjax import load
from recjax.lab.bench.machine_load import Others
from recjax.lab.bench.timing import Ours, Round, spread
from recjax.models.dense import onednn_there
from recjax.train.build import build_trainer
from recjax.train.products import in_words
from recjax.train.run.summary import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--tables", nargs="+", required=True, help="of recjax bench PRESET --products FILE")
    parser.add_argument("--ways", nargs="+", default=["kernels", "xla", *(["onednn"] if onednn_there() else [])])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    config = load(options.preset, *options.overrides)
    source = config.data.open()
    ways = [*options.ways, *options.tables]
    sides: dict[str, Ours] = {}
    for way in ways:
        train = dataclasses.replace(config.train, products=way)
        sides[way] = Ours(build_trainer(dataclasses.replace(config, train=train), source, ("train",)))
    first = sides[ways[0]].trainer
    state = first.init_state()
    done: dict[str, list[Round]] = {way: [] for way in ways}
    others = Others([])
    for number in range(options.rounds + 1):
        print(f"round {number} of {options.rounds}", file=sys.stderr)
        for way in ways if number % 2 else reversed(ways):
            state, one = sides[way].round(state, options.steps, untimed=2)
            if number:
                done[way].append(one)
    used = {name: version for name, version in versions().items() if name in ("python", "jax", "kernels")}
    print(f"{options.preset} {' '.join(options.overrides)}, {used}, others' share of the CPU: {others.share()}")
    batch = first.config.train.batch_size
    rates = {way: [options.steps * batch / one.seconds for one in rounds] for way, rounds in done.items()}
    for way in ways:
        ratios = spread([a / b for a, b in zip(rates[way], rates[ways[0]], strict=True)])
        cpu_ms = float(np.median([one.cpu_seconds or 0.0 for one in done[way]])) / options.steps * 1e3
        words = in_words(sides[way].trainer.products, first.mesh)
        print(
            f"  {words:60} {np.median(rates[way]):9,.0f} samples/s, CPU {cpu_ms:7.1f} ms, to the kernels "
            f"{ratios['median']:.3f} ({ratios['q1']:.3f} - {ratios['q3']:.3f})"
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
