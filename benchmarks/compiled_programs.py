r"""What a training step consists of when it is compiled for accelerators that need not be there: a row of a table.

    python benchmarks/compiled_programs.py h200 bench_mlperf64
    python benchmarks/compiled_programs.py v5e bench_kaggle16 mesh.devices=16 mesh.hosts=4 train.batch_size=65536

It takes the extra `aot`. Sizes of exchanges come from the first batch. Copies are operations that make an array of the
largest buffer's size, launches the operations that a device is given in one step. All sizes are MiB of one device.
"""

import argparse
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import aot  # noqa: E402

from recjax.config import presets  # noqa: E402
from recjax.lab.predict.targets import PLATFORM  # noqa: E402
from recjax.planning.compiled_collectives import collectives  # noqa: E402

TITLES = (
    "preset",
    "devices",
    "D",
    "tables, slots",
    "largest buffer",
    "temporaries",
    "copies",
    "launches",
    "loops",
    "collectives",
    "compiling, s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=PLATFORM)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = presets.load(options.preset, [*options.overrides, "mesh.platform=cpu"])
    found = aot.compiled(config, options.target, "train_step")
    groups = found.trainer.bound.groups
    largest = max(group.rows * group.width * 4 for group in groups)
    kinds = [collective.kind for collective in collectives(found.text)]
    cells = [
        options.preset,
        f"{found.trainer.bound.all_devices} x {options.target}",
        ", ".join(map(str, sorted({group.dim for group in groups}))),
        f"{sum(group.rows * group.row_bytes(4) for group in groups) / 2**20:,.1f}",
        f"{largest / 2**20:,.1f}",
        f"{found.memory.temp_size_in_bytes / 2**20:,.1f}",
        str(len(aot.copies(found.program, largest))),
        f"{aot.launches(found.program):,}",
        str(aot.loops(found.program)),
        ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none",
        f"{found.seconds:.0f}",
    ]
    print(f"JAX {jax.__version__}; " + "; ".join(options.overrides))
    for row in (TITLES, ["---"] * len(TITLES), cells):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
