"""How long does the simulator take? One DLRM iteration on 128 ranks with 128 chunks a collective, and on 1,024.

    python tests/benchmarks/simulate_speed.py

DOC
"""

import argparse
import resource
import time

from recjax.simulate.dlrm import PRESETS, dlrm
from recjax.simulate.execution import simulate
from recjax.simulate.system import System
from recjax.simulate.topology import read_topology

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
