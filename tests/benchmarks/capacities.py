"""How many programs a run with jagged features takes, and what padding costs it: a simulation, which compiles nothing.

    python tests/benchmarks/capacities.py --samples 64 --steps 20000 --growth 0.1

26 jagged features of lognormal bags (ten ids, sigma 1), 8 devices; ids of each table are drawn with probabilities
1 / rank^1.05 of 20,000 rows, which lie anywhere among the devices. Steps beyond 2,000 take up sums of bags that others
had, in other company; with `--growth` bags and distinct rows grow by such a share, slowly.
"""

import argparse

import numpy as np

from recjax.embedding.routing.capacity import CapacityLadder, Kinds

F, N, V = 26, 8, 20_000
NAMES = [f"f{n}" for n in range(F)]


def ids_of_bags(samples: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Ids of each feature that each device has, [steps, devices, features]."""
    sums = np.zeros((min(steps, 2000) * N * F, 1), np.int64)
    for _ in range(samples // 64):
        for part in np.array_split(sums, 32):
            bags = np.exp(rng.standard_normal((len(part), 64), np.float32) + np.float32(np.log(10) - 0.5))
            part += bags.astype(np.int64).sum(axis=1, keepdims=True)
    chosen = sums[:, 0] if steps <= 2000 else rng.choice(sums[:, 0], steps * N * F)
    return chosen.reshape(steps, N, F)


def rows_on_the_wire(ids_SxNxF: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Most distinct rows that one device asks one other for, for each of some steps."""
    share_V = np.cumsum(1 / np.arange(1, V + 1) ** 1.05)
    row_of = rng.permutation(V)[np.searchsorted(share_V / share_V[-1], (np.arange(2**20) + 0.5) / 2**20)]
    found = np.zeros(len(ids_SxNxF), np.int64)
    for step, device in np.ndindex(ids_SxNxF.shape[:2]):
        table = np.repeat(np.arange(F), ids_SxNxF[step, device])
        asked = np.zeros(F * V, bool)
        asked[table * V + row_of[rng.integers(0, 2**20, len(table))]] = True
        found[step] = max(found[step], asked.reshape(-1, N).sum(axis=0).max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64, help="of a device; a multiple of 64")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--growth", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    ids_SxNxF = ids_of_bags(options.samples, options.steps, rng)
    counted = rows_on_the_wire(ids_SxNxF[: 19_200 // options.samples], rng)
    rows_S = counted if len(counted) >= options.steps else rng.choice(counted, options.steps)
    grown_Sx1 = 1 + options.growth * np.arange(options.steps)[:, None] / options.steps
    needs = np.column_stack([ids_SxNxF.max(axis=1), rows_S[: options.steps]]) * grown_Sx1
    own = Kinds.of_names(NAMES, (), ["rows"])
    ladder = CapacityLadder(kinds=own)
    sizes = np.array([list(ladder.fit(dict(zip([*NAMES, "rows"], of_step, strict=True))).values())
                      for of_step in needs.astype(int).tolist()])  # fmt: skip
    print(f"{len(np.unique(sizes, axis=0))} programs")
    mean = ids_SxNxF.mean() * grown_Sx1.mean()
    print(f"sizes of ids {sizes[:, :F].mean() / mean:.2f} times the mean, "
          f"of rows {sizes[:, F].mean() / needs[:, F].mean():.2f} times")  # fmt: skip


if __name__ == "__main__":
    main()
