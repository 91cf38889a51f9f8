"""Simulated collectives beside those of ASTRA-sim, the public simulator, built with its analytical network.

    python benchmarks/against_astra_sim.py FOLDER [--ranks 4,16,64] [--sizes 65536,1048576,67108864]

FOLDER has AstraSim_Analytical_Congestion_Aware and AstraSim_Analytical_Congestion_Unaware, as ASTRA-sim's
build/astra_analytical/build.sh makes them. Both simulators get the same collective on the same network (50 GB/s, of
2^30 bytes, 500 ns, 10 ns at the end of a message), with and without congestion, in one chunk or in four of which one is
under way. ASTRA-sim reads the workload as recjax writes it (`--format chakra-et`). Adding what came takes no time.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recjax.lab.formats import chakra_protobuf
from recjax.lab.formats.trace import Event, Trace
from recjax.lab.simulate.execution import simulate
from recjax.lab.simulate.system import System
from recjax.lab.simulate.topology import read_topology
from recjax.lab.simulate.workload import Operation, from_operations

NETWORKS = {"switch": "Switch", "ring": "Ring", "fully_connected": "FullyConnected"}
ALGORITHMS = {
    "ring": "ring",
    "direct": "direct",
    "double_binary_tree": "doubleBinaryTree",
    "halving_doubling": "halvingDoubling",
}
CASES = [
    ("all_reduce", "ring", ("ring", "switch", "fully_connected")),
    ("all_reduce", "direct", ("switch", "fully_connected")),
    ("all_reduce", "double_binary_tree", ("switch",)),
    ("all_reduce", "halving_doubling", ("ring", "switch", "fully_connected")),
    ("reduce_scatter", "ring", ("ring", "switch")),
    ("all_gather", "ring", ("ring", "switch")),
    ("all_to_all", "direct", ("switch", "fully_connected")),
]
GB_PER_S, LATENCY_NS, ENDPOINT_NS = 50.0, 500.0, 10.0
_AT_ONCE = 10**9  # GB/s of a rank's memory: ASTRA-sim counts passes over it that add what came, and recjax does not


def theirs(binaries: Path, folder: Path, congestion: bool) -> float:
    """Simulated time by ASTRA-sim of what lies in a folder, ns: of the rank that ends last."""
    kind = "Aware" if congestion else "Unaware"
    command = [
        str(binaries / f"AstraSim_Analytical_Congestion_{kind}"),
        f"--workload-configuration={folder / 'trace'}",
        f"--system-configuration={folder / 'system.json'}",
        f"--network-configuration={folder / 'network.yml'}",
        f"--remote-memory-configuration={folder / 'memory.json'}",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    found = [int(n) for n in re.findall(r"finished, (\d+) cycles", done.stdout + done.stderr)]
    if not found:
        raise SystemExit(f"ASTRA-sim did not finish {folder}:\n{(done.stdout + done.stderr)[-2000:]}")
    return float(max(found))


def write(folder: Path, name: str, algorithm: str, network: str, ranks: int, size: int, chunks: int) -> None:
    """Writes a workload, a system and a network for ASTRA-sim."""
    given = size // ranks if name == "all_gather" else size  # what a rank brings
    taken = size // ranks if name == "reduce_scatter" else size
    event = Event(0, name, name=name, in_bytes=given, out_bytes=taken, group=tuple(range(ranks)))
    for file, content in chakra_protobuf.write(Trace(ranks, {rank: (event,) for rank in range(ranks)})).items():
        (folder / file).write_bytes(content)
    how = {f"{of}-implementation": [ALGORITHMS[algorithm]] for of in ("all-reduce", "all-gather", "reduce-scatter")}
    system = how | {
        "all-to-all-implementation": ["direct"],
        "scheduling-policy": "LIFO",
        "endpoint-delay": ENDPOINT_NS,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": chunks,
        "collective-optimization": "baseline",
        "local-mem-bw": _AT_ONCE,
        "boost-mode": 0,
        "roofline-enabled": 0,
        "peak-perf": 900,
    }
    (folder / "system.json").write_text(json.dumps(system))
    (folder / "network.yml").write_text(
        f"topology: [ {NETWORKS[network]} ]\nnpus_count: [ {ranks} ]\n"
        f"bandwidth: [ {GB_PER_S} ]\nlatency: [ {LATENCY_NS} ]\n"
    )
    (folder / "memory.json").write_text(json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}))


def ours(name: str, algorithm: str, network: str, ranks: int, size: int, chunks: int, congestion: bool) -> float:
    """The same by recjax, ns."""
    workload = from_operations(name, [Operation(name, "collective", collective=name, bytes=size)])
    topology = read_topology(f"{network}:{ranks}", [GB_PER_S * 2**30], [LATENCY_NS])
    system = System(
        {name: algorithm}, chunks, endpoint_delay_ns=ENDPOINT_NS, in_flight=1, congestion=congestion, scheduling="lifo"
    )
    return simulate(workload, topology, system).time_ns


def cases(ranks: list[int], sizes: list[int]) -> Iterator[tuple[str, str, str, int, int, int]]:
    """Collective, algorithm, network, ranks, bytes, chunks."""
    for name, algorithm, networks in CASES:
        for network in networks:
            for count in ranks:
                for size in sizes:
                    for chunks in (1, 4):
                        yield name, algorithm, network, count, size, chunks


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with ASTRA-sim's binaries")
    parser.add_argument("--ranks", default="4,16,64")
    parser.add_argument("--sizes", default="65536,1048576,67108864", help="bytes of a collective")
    options = parser.parse_args()
    ranks, sizes = ([int(n) for n in text.split(",")] for text in (options.ranks, options.sizes))
    print("collective, algorithm, network, ranks, bytes, chunks: ASTRA-sim, recjax, ratio; without congestion the same")
    worst: dict[tuple[str, str, str, bool], float] = {}
    for case in cases(ranks, sizes):
        line = []
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), *case)
            for congestion in (True, False):
                there, here = theirs(options.folder.resolve(), Path(folder), congestion), ours(*case, congestion)
                line.append(f"{there:14,.0f} {here:14,.0f} {here / there:8.5f}")
                key = (*case[:3], congestion)
                worst[key] = max(worst.get(key, 0.0), abs(here / there - 1))
        print(*(f"{part:>18}" for part in case), *line, flush=True)
    print("\nlargest difference:")
    for (name, algorithm, network, congestion), most in worst.items():
        how = "" if congestion else ", without congestion"
        print(f"  {name} by {algorithm} on a {network}{how}: {most:.3%}")


if __name__ == "__main__":
    main()
