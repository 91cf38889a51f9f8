"""Samples a second that one core can feed: data read, checked, routed or laid out, and placed on the devices.

    python benchmarks/host_path.py [--preset PRESET ...] [--batch 65536] [--steps 12] [OVERRIDE ...]

No accelerator is needed: 8 host devices take the arrays, and where devices route, what they do is left out. Seconds
are those of CPU time, of all threads together, so that other work on the machine disturbs little: with workers on
cores of their own the rate is as many times as high, until the thread that trains (pack and place) is the limit.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

from recjax.config.presets import load  # noqa: E402
from recjax.config.run import RunConfig  # noqa: E402
from recjax.embedding.routing import capacity, device, host  # noqa: E402
from recjax.embedding.routing.routed import Routing  # noqa: E402
from recjax.parallel.malloc import keep_freed_memory  # noqa: E402
from recjax.train.build import build_trainer  # noqa: E402
from recjax.train.routers import InFlight, place  # noqa: E402
from recjax.train.trainer import Trainer  # noqa: E402
from recjax.utils.text import aligned  # noqa: E402


def packed(trainer: Trainer, batch: InFlight, sizes: dict[str, int]) -> Any:
    """The routing of a batch, as far as the host makes it."""
    routed = batch.routed
    if trainer.config.train.routing == "host":
        return host.pack(routed, trainer.bound, sizes, trainer.dtype)
    features = device.pack_ids(routed, trainer.bound, sizes, trainer.dtype)
    return Routing({}, features, host.pack_pooled(routed, trainer.bound, sizes, trainer.dtype))


def measured(config: RunConfig, steps: int) -> dict[str, float]:
    """CPU seconds of a batch, by part."""
    keep_freed_memory()
    trainer = build_trainer(config, weights=False)
    stream = trainer.routed_batches()
    first = list(itertools.islice(stream, 3))
    sizes: dict[str, int] = {}
    for batch in first:
        sizes = capacity.grow(sizes, batch.routed.required_capacities)
    spent = dict.fromkeys(("read and route", "pack", "place"), 0.0)

    def timed(part: str, do: Callable[[], Any]) -> Any:
        begun = time.process_time()
        found = do()
        spent[part] += time.process_time() - begun
        return found

    for n in range(steps + 2):
        if n == 2:
            spent = dict.fromkeys(spent, 0.0)
        batch = timed("read and route", lambda: next(stream))
        sizes = capacity.grow(sizes, batch.routed.required_capacities)
        routing = timed("pack", functools.partial(packed, trainer, batch, sizes))
        given = batch.batch, routing, batch.routed.local, trainer.mesh, trainer.dtype
        timed("place", functools.partial(lambda *of: jax.block_until_ready(place(*of)), *given))
    return {part: seconds / steps for part, seconds in spent.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", nargs="+", default=["bench_multihot", "bench_kaggle16"])
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--routing", nargs="+", default=["device", "host"])
    options, overrides = parser.parse_known_args()
    cells = [["preset", "routing", "CPU ms a batch: read and route", "pack", "place", "samples / CPU s"]]
    for preset, routing in itertools.product(options.preset, options.routing):
        own = [f"train.batch_size={options.batch}", f"train.routing={routing}", "train.workers=0", "mesh.devices=8"]
        found = measured(load(preset, [*own, *overrides]), options.steps)
        rate = options.batch / sum(found.values())
        cells.append([preset, routing, *(f"{1e3 * s:.1f}" for s in found.values()), f"{rate:,.0f}"])
    print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
