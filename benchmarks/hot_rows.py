"""CPU time of routing with and without hot rows, by turns, and what these can save by the law of the ids.

    python benchmarks/hot_rows.py PRESET [a.b=value ...] [--rows 0,4000,auto] [--rounds 24]

Of a preset whose data are a `zipf_stream`, for 8 devices; auto is the number that embedding.hot.machine=FILE gives. A
turn routes and packs two batches, which NumPy does in one thread; nothing is compiled, and no table is made. Times less
are medians of the ratios within a round, with the range of the middle half. By the law: the rows that a device still
asks for, how many fewer these are, and the share of the ids that name hot ones; and the rows that the owner asked for
most is asked for over the mean, if owners had contiguous ranges of ids.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.zipf import asked_for, contiguous_owners, law  # noqa: E402

from recjax.config.presets import load  # noqa: E402
from recjax.config.run import RunConfig  # noqa: E402
from recjax.embedding.routing import host  # noqa: E402
from recjax.embedding.segment import HOT_PLACEMENTS, RowIds  # noqa: E402
from recjax.train.build import build_trainer  # noqa: E402
from recjax.train.routers import place_all  # noqa: E402
from recjax.utils.text import aligned  # noqa: E402

DEVICES, BATCHES = 8, 4


class Routing:
    """The host's part of a step, ready to take turns."""

    def __init__(self, config: RunConfig) -> None:
        """Reads and routes some batches, which also says how large their arrays are."""
        self.trainer, self.size = build_trainer(config, weights=False), config.train.batch_size
        routed = list(itertools.islice(self.trainer.routed_batches(), BATCHES))
        self.read = [batch.batch for batch in routed]
        _, self.sizes = place_all(self.trainer.router, routed)
        travelling = [group for group in self.trainer.bound.listing if group.spread]
        self.asked = sum(self.sizes[group.name] * group.num_row_lists for group in travelling)
        sets = [
            s.rows for segments in self.trainer.plan.tables.values() for s in segments if s.placement in HOT_PLACEMENTS
        ]
        self.chosen = sum(len(rows.ids) for rows in sets if isinstance(rows, RowIds))

    def ms(self, nth: int) -> float:
        """CPU time of two batches, ms of one."""
        began = time.process_time()
        for n in (2 * nth, 2 * nth + 1):
            routed = host.route_on_host(self.read[n % BATCHES], self.trainer.bound, self.size)
            host.pack(routed, self.trainer.bound, self.sizes, self.trainer.dtype)
        return (time.process_time() - began) * 1e3 / 2


def by_law(config: RunConfig, count: int) -> list[str]:
    """Returns what `count` hot rows save in the mean."""
    schema = config.data.open().schema
    ids = [(f.bag or 1) * config.train.batch_size // DEVICES for f in schema.features]
    laws = [law(f.rows, config.data.exponent) for f in schema.features]
    asked = [asked_for(law_V, n) for law_V, n in zip(laws, ids, strict=True)]
    all_M, all_ids_M = np.concatenate(asked), np.concatenate([law_V * n for law_V, n in zip(laws, ids, strict=True)])
    hot_M = np.zeros(len(all_M), bool)
    hot_M[np.argsort(-all_M, kind="stable")[:count]] = True
    cells = [
        f"{all_M[~hot_M].sum():,.0f}",
        f"{all_M[hot_M].sum() / all_M.sum():.1%}",
        f"{all_ids_M[hot_M].sum() / all_ids_M.sum():.1%}",
    ]
    cuts = np.cumsum([len(of) for of in asked])[:-1]
    for each_M in (all_M, all_ids_M):
        rest = np.split(np.where(hot_M, 0, each_M), cuts)
        owners_N = sum(contiguous_owners(of, DEVICES) for of in rest)
        cells.append(f"{np.max(owners_N) / np.mean(owners_N):.2f}")
    return cells


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--rows", default="0,4000,16000")
    parser.add_argument("--rounds", type=int, default=24, help="0: no times")
    options, overrides = parser.parse_known_args()
    counts = options.rows.split(",")
    own = [f"mesh.devices={DEVICES}", "train.workers=0", "embedding.hot.memory_mib=1000000", *overrides]
    configs = [load(options.preset, [*own, f"embedding.hot.rows={count}"]) for count in counts]
    print(f"{options.preset} {' '.join(overrides)}, batches of {configs[0].train.batch_size:,} on {DEVICES} devices")
    cells = [["hot rows", "rows asked for", "fewer", "of ids", "contiguous max/mean", "without dedup"]]
    cells += [[count, *by_law(configs[0], int(count))] for count in counts if count != "auto"]
    print("\n".join(aligned(cells)))
    if not options.rounds:
        return
    all_of = [Routing(config) for config in configs]
    ms_RxA = np.array([[one.ms(turn) for one in all_of] for turn in range(options.rounds + 1)])[1:]
    cells = [["hot rows", "CPU ms", "middle half", "times less", "middle half", "rows asked for, padded"]]
    for n, (count, one) in enumerate(zip(counts, all_of, strict=True)):
        low, middle, high = np.quantile(ms_RxA[:, n], [0.25, 0.5, 0.75])
        less = np.quantile(ms_RxA[:, 0] / ms_RxA[:, n], [0.25, 0.5, 0.75])
        name = f"{one.chosen:,}" + (" (auto)" if count == "auto" else "")
        cells.append(
            [
                name,
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{less[1]:.2f}",
                f"{less[0]:.2f} to {less[2]:.2f}",
                f"{one.asked:,}",
            ]
        )
    print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
