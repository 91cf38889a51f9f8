"""Training steps with a part of the rows on the devices against steps with all rows there, by turns.

    python benchmarks/tier_speed.py [PRESET a.b=value ...] [--shares 0.8,0.2,0.05] [--disk DIR --dram 0.5]

A step is all of it: reading, routing, moves of rows, training. Caches are full when it begins, and every row has been
written; then each way trains --warm steps, until its cache holds what it would after a long training, and
the stream repeats no batch. For each share of the rows that the cache holds it prints the time of a
step, the ratio to the step with all rows on the devices in the same round (median, range), the time of the thread that
trains which goes into moves, that which it waits for reads, CPU time, rows found and not found, and records that the
disk reads and writes. With --disk the last share is measured once more with --dram of the rows in the host's memory and
the rest in a file there. With --machine FILE (`recjax calibrate`) it also prints by how much a step is predicted to be
slower, in the later half of as many steps. `--quick` is a short one, to see that it runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from recjax.config import presets
from recjax.lab.predict.tier_plan import tier_plan, with_share
from recjax.lab.studies.tiers.measure import Arm, by_turns, medians
from recjax.planning.machine import open_machine
from recjax.utils.text import aligned

PRESET = ("bench_kaggle16", "data.max_rows=400000", "data.distinct_blocks=512")
BARS = {0.8: 1.2, 0.2: 2.0, 0.05: 4.0}


def predicted(arm: Arm, config: Any, machine: str, steps: int) -> str:
    """The slowdown that is predicted for an arm over the host's memory; "" for others."""
    if arm.device == 1 or arm.disk or not machine:
        return ""
    config = presets.override(with_share(config, config.data.open(), arm.device), [f"train.steps={steps}"])
    return f"{tier_plan(config, open_machine(machine))['costs']['slowdown']:.2f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset", nargs="*", default=list(PRESET))
    parser.add_argument("--shares", default="0.8,0.2,0.05")
    parser.add_argument("--disk", default="")
    parser.add_argument("--dram", type=float, default=0.5)
    parser.add_argument("--disk-share", type=float, default=0.2)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--machine", default="")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.warm, options.rounds, options.steps = 8, 2, 4
    shares = [float(word) for word in options.shares.split(",")]
    arms = [Arm("all", 1.0), *(Arm(f"{share:g}", share) for share in shares)]
    if options.disk:
        label = f"{options.disk_share:g}, {options.dram:g} in memory, disk"
        arms.append(Arm(label, options.disk_share, options.dram, options.disk))
    config = presets.load(options.preset[0], options.preset[1:])
    found = by_turns(arms, config, options.warm, options.rounds, options.steps)
    head = "rows on the devices, ms, ratio, range, predicted, bar, moves ms, waits ms, CPU ms, hits, misses, hit rate, "
    cells = [(head + "reads, writes").split(", ")]
    for arm, turns in zip(arms, found, strict=True):
        ratios = np.array([turn["ms"] / all_["ms"] for turn, all_ in zip(turns, found[0], strict=True)])
        m = medians(turns)
        named = m["hits"] + m["misses"]
        cells.append(
            [
                arm.label,
                f"{m['ms']:.1f}",
                f"{np.median(ratios):.2f}",
                f"{ratios.min():.2f} to {ratios.max():.2f}",
                predicted(arm, config, options.machine, options.warm + options.rounds * options.steps),
                f"{BARS[arm.device]:g}" if arm.device in BARS and not arm.disk else "",
                f"{m['admit_ms']:.1f}",
                f"{m['waited_ms']:.1f}",
                f"{m['cpu_ms']:.1f}",
                f"{m['hits']:,.0f}",
                f"{m['misses']:,.0f}",
                f"{m['hits'] / named:.3f}" if named else "",
                f"{m['reads']:,.0f}",
                f"{m['writes']:,.0f}",
            ]
        )
    print(
        f"{' '.join(options.preset)}, {jax.devices()[0].device_kind}; {options.warm} steps before, {options.rounds} "
        f"rounds of {options.steps}"
    )
    print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
