"""How long does the simulator take? One DLRM iteration on 128 ranks with 128 chunks a collective, and on 1,024.

    python benchmarks/simulate_speed.py

What it printed for one case at a time (--only) on two cores that others used at the same time (load 12), Python 3.11.7:
seconds of CPU, which such a load about doubles. On a load of 3 the double binary tree took 15.7 s of wall clock.

    ranks  topology         all-reduce, all-to-all       CPU s     events  peak MiB  played     simulated
      128  switch:128       direct, direct                 0.8    655,422        38  one rank    18.74 ms
      128  switch:128       ring, direct                   1.5  1,268,286        43  one rank    20.59 ms
      128  8 a node         hierarchical, hierarchical     0.3    220,222        37  one rank    16.70 ms
      128  switch:128       double binary tree, direct    25.7  5,284,480       250  all ranks   19.46 ms
      128  switch:128       halving-doubling, direct      37.2 12,918,528       361  all ranks   18.80 ms  (asked for)
     1024  switch:1024      direct, direct                10.9  5,242,942       234  one rank    18.86 ms
     1024  switch:1024      ring, direct                  17.5 10,213,950       140  one rank    80.03 ms
     1024  8 a node         hierarchical, hierarchical     2.4  1,338,430        42  one rank    16.94 ms

Halving-doubling by one rank, which is exact and the default, takes 0.2 s. So 128 ranks stay below 30 s, on one rank by
far; of the algorithms only the double binary tree needs all ranks.
"""

import argparse
import resource
import time

from recjax.lab.simulate.dlrm import PRESETS, dlrm
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import System
from recjax.lab.simulate.topology import read_topology

FLAT, DEEP = "switch:{}", "switch:8,switch:{}"
# name, topology, all-reduce, all-to-all, ranks, shortcut
CASES = [
    ("direct", FLAT, "direct", "direct", 128, "auto"),
    ("ring", FLAT, "ring", "direct", 128, "auto"),
    ("hierarchical", DEEP, "hierarchical", "hierarchical", 128, "auto"),
    ("double binary tree, every rank", FLAT, "double_binary_tree", "direct", 128, "auto"),
    ("double binary tree, 8 a node, every rank", DEEP, "double_binary_tree", "direct", 128, "auto"),
    ("halving-doubling, every rank", FLAT, "halving_doubling", "direct", 128, "never"),
    ("direct", FLAT, "direct", "direct", 1024, "auto"),
    ("ring", FLAT, "ring", "direct", 1024, "auto"),
    ("hierarchical", DEEP, "hierarchical", "hierarchical", 1024, "auto"),
]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--only", type=int, help="one case, by its number from 0")
    options = parser.parse_args()
    for name, text, all_reduce, exchange, ranks, shortcut in CASES if options.only is None else [CASES[options.only]]:
        sizes = text.format(ranks // 8 if text == DEEP else ranks)
        topology = read_topology(sizes, [12.5e9], [500.0])
        system = System({"all_reduce": all_reduce, "all_to_all": exchange}, options.chunks, scheduling="lifo")
        start, cpu = time.perf_counter(), time.process_time()
        result = simulate(dlrm(PRESETS["hoti2020"], ranks), topology, system, shortcut)  # type: ignore[arg-type]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        took = f"{seconds:6.1f} s ({cpu:5.1f} s of CPU), {result.events:10,} events, peak so far {memory:,.0f} MiB"
        simulated = f"{result.time_ns / 1e6:.2f} ms simulated, {'one rank' if result.shortcut else 'all ranks'} played"
        print(f"{ranks:5} ranks, {sizes:19} {name:41} {took}; {simulated}", flush=True)


if __name__ == "__main__":
    main()
