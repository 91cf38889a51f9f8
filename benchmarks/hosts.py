"""Rows that cross hosts in a step, forward: in one exchange between all devices, and in two steps by way of relays.

    python benchmarks/hosts.py [--preset bench_kaggle16 bench_multihot] [--mesh 8x2 64x8]

RoutedBatch, not measured: the first training batch of a preset, all tables row-wise in float32. Bytes are those of rows
alone, of all hosts together: the useful ones, and with the padding that the first step's capacities bring. A mesh is
devices x hosts; no device is needed. It printed:

    preset          devices  hosts  one step, MB  padded  two steps, MB  padded
    bench_kaggle16        8      2          1.58    1.82           1.23    1.31
    bench_kaggle16       64      8           3.9    12.8           2.78     3.9
    bench_multihot        8      2          40.4    43.1           28.9    31.1
    bench_multihot       64      8           107     154           70.7    81.7
"""

import argparse

import numpy as np

from recjax.config.presets import load
from recjax.config.run import RunConfig
from recjax.data.pipeline import batches
from recjax.embedding.bind import bind
from recjax.embedding.layout import ACROSS, BoundPlan
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import route_on_host
from recjax.embedding.routing.routed import RoutedBatch
from recjax.train.table_specs import specs
from recjax.utils.text import aligned


def crossing(counted: RoutedBatch, bound: BoundPlan, hosts: int) -> tuple[int, int]:
    """Useful and padded bytes of the rows that leave their host, where the devices stand in so many."""
    capacities = capacity.grow({}, counted.required_capacities)
    useful = padded = 0
    for group in bound.groups:
        counts_NxO = counted.true_counts(group.name).counts_NxO
        per_host, owners = group.devices // hosts, counts_NxO.shape[1]
        host_N, host_O = np.arange(group.devices) // per_host, np.arange(owners) // (owners // hosts)
        away_NxO = host_N[:, None] != host_O
        row_bytes = group.dim * 4
        useful += int(counts_NxO[away_NxO].sum()) * row_bytes
        padded += int(away_NxO.sum()) * capacities[group.name + ACROSS if group.two_step else group.name] * row_bytes
    return useful, padded


def counts(config: RunConfig, devices: int, hosts: int) -> list[tuple[int, int]]:
    """`crossing` in one exchange, and in two steps."""
    source, train = config.data.open(), config.train
    tables, features = specs(config, source.schema)
    batch = next(batches(source, "train", train.batch_size, seed=config.seed, shuffle=train.shuffle, workers=0))
    found = []
    for known in (1, hosts):
        bound = bind(make_plan("row_wise", tables), tables, features, devices, hosts=known)
        found.append(crossing(route_on_host(batch, bound, train.batch_size), bound, hosts))
    return found


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["bench_kaggle16", "bench_multihot"])
    parser.add_argument("--mesh", nargs="+", default=["8x2", "64x8"])
    options = parser.parse_args()
    rows = [["preset", "devices", "hosts", "one step, MB", "padded", "two steps, MB", "padded"]]
    for preset in options.preset:
        for mesh in options.mesh:
            devices, hosts = map(int, mesh.split("x"))
            sizes = [size / 1e6 for pair in counts(load(preset, ()), devices, hosts) for size in pair]
            rows.append([preset, str(devices), str(hosts), *(f"{size:.3g}" for size in sizes)])
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
