"""Training steps by turns: routed on the host and on the devices, one and several a call, and plain PyTorch.

    python benchmarks/accelerator_steps.py [--batch 4096] [--rounds 5] [--steps 40] [--no-torch] [OVERRIDE ...]

For a GPU; elsewhere it runs and says little. The profile is of the last way. All ways train one state.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from typing import Any

import jax
import numpy as np

from recjax.config.presets import load
from recjax.lab.bench import breakdown
from recjax.lab.bench.peer import Peer
from recjax.lab.bench.timing import Ours, spread
from recjax.lab.replay import profile
from recjax.train.build import build_trainer
from recjax.utils.text import aligned

CALLS = (1, 16)  # steps of a call


def main() -> None:
    """Prints ms of a step, its CPU time and PyTorch's time over it, then what device and host did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bench_kaggle16")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-torch", action="store_true")
    options, overrides = parser.parse_known_args()
    given = [f"train.batch_size={options.batch}", *overrides]
    source = load(options.preset, given).data.open()
    sides = {}
    for routing, count in itertools.product(("host", "device"), CALLS):
        config = load(options.preset, [*given, f"train.routing={routing}", f"train.steps_per_call={count}"])
        sides[f"{routing}, {count} a call"] = Ours(build_trainer(config, source, ("train",)))
    first, *_, last = sides.values()
    state = first.trainer.init_state()
    with contextlib.ExitStack() as stack:
        peer = None if options.no_torch else stack.enter_context(Peer("torch", first.trainer, state))
        ms: dict[str, list[float]] = {}
        cpu_ms: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):  # the first compiles, and does not count
            for name, side in sides.items():
                state, one = side.round(state, options.steps)
                if number:
                    ms.setdefault(name, []).append(one.seconds / options.steps * 1e3)
                    cpu_ms.setdefault(name, []).append((one.cpu_seconds or 0) / options.steps * 1e3)
            if peer:
                seconds = peer.round("float32", options.steps).seconds
                if number:
                    ms.setdefault("PyTorch", []).append(seconds / options.steps * 1e3)
    lines = [("", "ms a step", "CPU ms", "PyTorch's over it")]
    for name, found in ms.items():
        ratio = _spread(np.array(ms["PyTorch"]) / found) if "PyTorch" in ms else ""
        lines.append((name, _spread(found), _spread(cpu_ms[name]) if name in cpu_ms else "", ratio))
    print("\n".join(aligned(lines)), flush=True)
    for part, values in _profiled(last, state).items():
        print(f"{part}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))


def _spread(values: Any) -> str:
    found = spread(values)
    return f"{found['median']:.2f} ({found['q1']:.2f} - {found['q3']:.2f})"


def _profiled(side: Ours, state: Any) -> dict[str, dict[str, float]]:
    """Milliseconds of a step by part, on the device and on the host."""
    trace = profile.profile(lambda: side.round(state, 10, untimed=1), None)
    inputs = side.trainer.first_inputs(side.capacities)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    hlo = side.trainer.step_program.trace(abstract, inputs).lower().compile().as_text() or ""
    found = breakdown.read(trace, hlo)
    profile.discard(trace)
    return {"device, ms": found["device_ms"], "host, ms": found["host_ms"]}


if __name__ == "__main__":
    main()
