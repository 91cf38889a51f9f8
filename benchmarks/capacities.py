"""How many programs a run with jagged features takes, and what padding costs it: a simulation, which compiles nothing.

    python benchmarks/capacities.py --samples 64 --steps 20000 --growth 0.1 --seeds 10

26 jagged features of lognormal bags (ten ids, sigma 1), 8 devices; ids of each table are drawn with probabilities
1 / rank^1.05 of 20,000 rows, which lie anywhere among the devices. Distinct rows are counted for 19,200 samples of a
device, and drawn from these counts for further steps; with `--growth` bags and distinct rows grow by such a share,
slowly. A line for each seed: programs, and sizes as multiples of the mean.
"""

import argparse

import numpy as np

from recjax.embedding.routing.capacity import CapacityLadder, Kinds

F, N, V = 26, 8, 20_000
NAMES = [f"f{n}" for n in range(F)]


def ids_of_bags(samples: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Ids of each feature that each device has, [steps, devices, features]."""
    sums = np.zeros((steps * N * F, 1), np.int64)
    for _ in range(samples // 64):
        for part in np.array_split(sums, max(1, steps // 62)):
            bags = np.exp(rng.standard_normal((len(part), 64), np.float32) + np.float32(np.log(10) - 0.5))
            part += bags.astype(np.int64).sum(axis=1, keepdims=True)
    return sums.reshape(steps, N, F)


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


def simulate(options: argparse.Namespace, seed: int) -> tuple[int, float, float]:
    """Programs of a run, and mean sizes of ids and of rows as multiples of what is needed on the mean."""
    rng = np.random.default_rng(seed)
    ids_SxNxF = ids_of_bags(options.samples, options.steps, rng)
    counted = rows_on_the_wire(ids_SxNxF[: 19_200 // options.samples], rng)
    rows_S = counted if len(counted) >= options.steps else rng.choice(counted, options.steps)
    grown_Sx1 = 1 + options.growth * np.arange(options.steps)[:, None] / options.steps
    needs = np.column_stack([ids_SxNxF.max(axis=1), rows_S[: options.steps]]) * grown_Sx1
    own = Kinds.of_names(NAMES, (), ["rows"])
    ladder = CapacityLadder(kinds=own)
    sizes = np.array(
        [
            list(ladder.fit(dict(zip([*NAMES, "rows"], of_step, strict=True))).values())
            for of_step in needs.astype(int).tolist()
        ]
    )
    mean = ids_SxNxF.mean() * grown_Sx1.mean()
    return len(np.unique(sizes, axis=0)), sizes[:, :F].mean() / mean, sizes[:, F].mean() / needs[:, F].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64, help="of a device; a multiple of 64")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--growth", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed")
    options = parser.parse_args()
    found = []
    for seed in range(options.first, options.first + options.seeds):
        found.append(simulate(options, seed))
        print("seed {}: {} programs, sizes of ids {:.2f} times the mean, of rows {:.3f}".format(seed, *found[-1]))
    programs, ids, rows = zip(*found, strict=True)
    print(f"at most {max(programs)} programs; on the mean of seeds ids {np.mean(ids):.2f}, rows {np.mean(rows):.3f}")


if __name__ == "__main__":
    main()
