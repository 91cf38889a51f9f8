"""How much faster are the kernels than the plain formulations? Prints both in milliseconds, and their ratio.

    python benchmarks/kernels.py [--batch-size 4096] [--rounds 15] [--only bags]

Forward alone, and forward and backward together, jitted: dense layers of the standing presets, with ReLU; and at the
shapes of 26 tables, interactions of 27 vectors, and bags of 1 and of 10 ids drawn with Zipf 1.1 from 26 tables of a
million rows. The two take turns, so that drift of the machine falls on both alike; the ratio is the median of the
rounds' ratios, with its quartiles. Memory that is freed stays with the process: else both would spend much of their
time on fresh pages from the system.

On two cores of an Intel Xeon with AMX (Python 3.12, JAX 0.12.0.1; not a quiet machine) XLA took, for layers of width
256 and more, 1.4 to 2.2 times as long in float32 and 0.9 to 1.7 times in bfloat16 (one output, float32, forward and
backward: half as long), for interactions 1.2 to 3.6 times with the way back, for bags of 10 ids 2.7 to 4.3 times.
"""

import argparse
import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.embedding.pooling import sum_bags
from recjax.models.dense import dense
from recjax.models.layers import dot_interaction
from recjax.train.run.summary import versions

TABLES, ROWS, IDS = 26, 1_000_000, 10
LAYERS = [(13, 512), (512, 256), (256, 64), (367, 512), (256, 1), (415, 1024), (1024, 1024), (1024, 512), (512, 512)]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def plain_bags(rows_UxD: jax.Array, inverse_NxH: jax.Array) -> jax.Array:
    """The sums [N, D] by XLA alone."""
    return sum_bags(rows_UxD, ((inverse_NxH, None),))[0]


plain_layer = functools.partial(dense, relu=True)  # of a batch x, W and b, while the kernels are switched off
layer = functools.partial(kernels.dense, relu=True)


def compiled(function: Callable[..., Any], inputs: tuple[Any, ...], backward: bool) -> Callable[[], None]:
    """`function` of the inputs, or its gradients too, for the inputs in float32 or bfloat16; ready to be timed."""
    pulled = jnp.ones_like(function(*inputs))

    def both(cotangent: Any, *inputs: Any) -> Any:
        at = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of(*some: Any) -> Any:
            given = list(inputs)
            for i, x in zip(at, some, strict=True):
                given[i] = x
            return function(*given)

        value, pull = jax.vjp(of, *(inputs[i] for i in at))
        return value, pull(cotangent)

    arguments = (pulled, *inputs) if backward else inputs
    program = jax.jit(both if backward else function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def bags_of(batch_size: int, ids: int, rng: np.random.Generator) -> tuple[int, np.ndarray]:
    """U, and inverse [26 * B, ids]: what routing makes of Zipf ids, without duplicates among the rows."""
    offset, parts = 0, []
    for _ in range(TABLES):
        unique, inverse = np.unique((rng.zipf(1.1, batch_size * ids) - 1) % ROWS, return_inverse=True)
        parts.append(inverse.reshape(batch_size, ids) + offset)
        offset += len(unique)
    return offset, np.concatenate(parts).astype(np.int32)


def cases(batch_size: int) -> Any:
    """(name, plain, kernel, inputs) of everything that is compared."""
    rng = np.random.default_rng(0)
    for K, N in LAYERS:
        kernel, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((K, N), (N,)))
        for dtype in (jnp.float32, jnp.bfloat16):
            x = jnp.asarray(rng.standard_normal((batch_size, K)), dtype)
            yield f"dense {K}-{N} {jnp.dtype(dtype).name}", plain_layer, layer, (x, kernel, bias)
    for dim in (16, 64, 128):
        for dtype in (jnp.float32, jnp.bfloat16):
            vectors = jnp.asarray(rng.standard_normal((batch_size, TABLES + 1, dim)), dtype)
            name = f"interaction D={dim} {jnp.dtype(dtype).name}"
            yield name, dot_interaction, kernels.interaction, (vectors,)
    for ids in (1, IDS):
        unique, inverse = bags_of(batch_size, ids, rng)
        for dim in (16, 64, 128):
            rows = jnp.asarray(rng.standard_normal((unique, dim)), jnp.float32)
            yield f"bags of {ids} D={dim} U={unique:,}", plain_bags, kernels.bags, (rows, jnp.asarray(inverse))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="leave out what does not begin so")
    options = parser.parse_args()
    if not kernels.available(jnp.float32):
        raise SystemExit("recjax-kernels is not installed: pip install ./kernels")
    import recjax_kernels

    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    print(f"batch {options.batch_size}, {versions()}, {recjax_kernels.instruction_set()}")
    print(f"{'':34} {'':16} {'plain ms':>9} {'kernel ms':>9} {'ratio':>6} {'q25':>6} {'q75':>6}")
    for name, plain, kernel, inputs in cases(options.batch_size):
        if not name.startswith(options.only):
            continue
        for backward in (False, True):
            with kernels.switched_off():
                slow = compiled(plain, inputs, backward)
            fast = compiled(kernel, inputs, backward)
            times: list[tuple[float, float]] = []
            for _ in range(options.rounds + 1):
                began = time.perf_counter()
                slow()
                middle = time.perf_counter()
                fast()
                times.append((middle - began, time.perf_counter() - middle))
            times = times[1:]
            ratios = [a / b for a, b in times]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            first, second = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            what = "forward+backward" if backward else "forward"
            print(f"{name:34} {what:16} {first:9.2f} {second:9.2f} {ratio:6.1f} {low:6.1f} {high:6.1f}", flush=True)


if __name__ == "__main__":
    main()
