"""Training steps of one preset under several sets of overrides, by turns: ratios of time, and bytes between devices.

    python benchmarks/by_turns.py PRESET [a.b=value ...] --arm "a.b=value c.d=value" --arm "..." [--rounds 12]

Prints for every arm the time and CPU time of a step beside which the next batch is routed, medians over rounds; of
every arm the ratio to the first in the same round: the median, with the range of the middle half and of all rounds; and
the bytes that a device sends for tables in a step, useful and padded, from the compiled program.
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

from recjax.config.presets import load  # noqa: E402
from recjax.lab.studies.hot_rows.measure import Arm, Contestant, turns  # noqa: E402
from recjax.utils.text import aligned  # noqa: E402


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--arm", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    options, overrides = parser.parse_known_args()
    arms = []
    for arm in options.arm:
        config = load(options.preset, ["mesh.devices=8", *overrides, *arm.split()])
        arms.append(Contestant(Arm(arm, tuple(arm.split())), config, batches=4))
    times_RxAx2 = turns(arms, options.rounds, options.steps)[:, :, [2, 1]]
    ratios_RxAx2 = times_RxAx2 / times_RxAx2[:, :1]
    cells = [
        ["arm", "ms", "CPU ms", "ratio", "middle half", "all", "CPU ratio", "middle half", "useful MB", "padded MB"]
    ]
    for n, one in enumerate(arms):
        sent = one.bytes()
        own = []
        for kind in (0, 1):
            ratios = ratios_RxAx2[:, n, kind]
            low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            own.append([f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{ratios.min():.3f} to {ratios.max():.3f}"])
        ms = [f"{ms:.1f}" for ms in np.median(times_RxAx2[:, n], axis=0)]
        bytes_ = [f"{sent[kind] / 1e6:.2f}" for kind in ("useful", "padded")]
        cells.append([one.arm.label, *ms, *own[0], *own[1][:2], *bytes_])
    print(f"{options.preset} {' '.join(overrides)}, 8 host devices, {options.rounds} rounds of {options.steps} steps")
    print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
