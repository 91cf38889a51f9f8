"""Exact search of the best items for all users, by turns with one large product of the same vectors.

    python benchmarks/top_k.py [--users 29858] [--items 40981] [--dim 64] [--k 20] [--devices 1] [--rounds 4]

Each user has 27 items that are left out. Prints for each round the rate of both, counting the products u . v alone; the
median of their ratios; the memory that the search took on top of the vectors and of what is left out; and a digest of
the lists, which is the same on any number of devices.
"""

import argparse
import hashlib
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh
from recjax.train.top_k import USERS, ItemSearch, make_index
from recjax.utils.host_memory import peak_bytes

LEFT_OUT, PRODUCT, PART = 27, 4096, 16_384  # items of a user; users of the large product; items that come together


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("users", 29_858), ("items", 40_981), ("dim", 64), ("k", 20), ("devices", 1), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    U, V, D, N = options.users, options.items, options.dim, options.devices
    mesh, rng = make_mesh(MeshConfig(devices=N)), np.random.default_rng(0)
    users_UxD, items_VxD = (rng.normal(size=(n, D)).astype(np.float32) for n in (U, V))
    out_UxX = rng.integers(0, V, (U, LEFT_OUT))

    def spread(x: np.ndarray, rows: int) -> jax.Array:
        padded = np.concatenate([x, np.zeros((rows - len(x), D), np.float32)])
        return jax.device_put(padded, NamedSharding(mesh, P(BATCH_AXES)))

    local = -(-PART // N)
    parts = (spread(items_VxD[start : start + PART], local * N) for start in range(0, V, PART))
    search = ItemSearch(make_index(mesh, parts, np.arange(V), PART, local, V), options.k)

    def groups() -> Iterator[tuple[jax.Array, np.ndarray, np.ndarray]]:
        for start in range(0, U, USERS):
            of_group, out = users_UxD[start : start + USERS], out_UxX[start : start + USERS]
            yield spread(of_group, -(-USERS // N) * N), np.repeat(np.arange(len(out)), LEFT_OUT), out.ravel()

    before = peak_bytes()
    lists = np.concatenate([items for items, _ in search.best(groups())])[:U]
    print(f"memory on top of vectors: {(peak_bytes() - before) / 2**20:,.0f} MiB at most, program included")
    print(f"lists: {hashlib.sha256(lists.tobytes()).hexdigest()[:16]}")
    product = jax.jit(lambda u, v: jnp.matmul(u, v.T, precision="highest"))
    left, right = jax.device_put((users_UxD[:PRODUCT], items_VxD), mesh.devices.flat[0])
    jax.block_until_ready(product(left, right))
    ratios = []
    for _ in range(options.rounds):
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            jax.block_until_ready(product(left, right))
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in search.best(groups()):
            pass
        rates = 2 * U * V * D / (time.perf_counter() - began), 2 * len(left) * V * D / float(np.mean(seconds))
        ratios.append(rates[0] / rates[1])
        print(f"search {rates[0] / 1e9:.1f} GFLOP/s, product {rates[1] / 1e9:.1f}, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
