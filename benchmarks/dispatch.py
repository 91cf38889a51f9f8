"""Time that the thread that trains takes to dispatch a step, beside the same program called with plain lists of arrays.

    python benchmarks/dispatch.py [--preset movietweetings] [--devices 1] [--rounds 10] [OVERRIDE ...]

Devices are idle at each call. Microseconds until the call returns, and of CPU time of the calling thread: medians over
rounds of the medians of the steps in each, with the middle half of the rounds. The two are called by turns.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recjax.config.presets import load
from recjax.train.build import build_trainer
from recjax.utils.text import aligned


def dispatched(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any, steps: int) -> tuple[Any, Any]:
    """The state after so many steps; and microseconds, [2]: until a call returns, of its thread."""
    times = []
    for _ in range(steps):
        cpu, began = time.thread_time(), time.perf_counter()
        state, metrics = step(state, inputs)
        times.append((time.perf_counter() - began, time.thread_time() - cpu))
        jax.block_until_ready((state, metrics))
    return state, 1e6 * np.median(times, axis=0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="movietweetings")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    options, overrides = parser.parse_known_args()
    trainer = build_trainer(load(options.preset, [f"mesh.devices={options.devices}", *overrides]))
    state, inputs = trainer.init_state(), next(trainer.train_inputs())
    leaves, structure = jax.tree.flatten((state, inputs))
    of_state = jax.tree.structure(state)
    program: Any = trainer.step_program

    def plain(state: list[jax.Array], inputs: list[jax.Array]) -> Any:
        after, metrics = program.__wrapped__(*jax.tree.unflatten(structure, [*state, *inputs]))
        return jax.tree.leaves(after), jax.tree.leaves(metrics)

    listed = jax.jit(plain, donate_argnums=0), jax.tree.leaves(inputs)
    found = []
    for _ in range(options.rounds + 1):
        state, of_step = dispatched(trainer.train_step, state, inputs, options.steps)
        held, of_lists = dispatched(listed[0], jax.tree.leaves(state), listed[1], options.steps)
        state = jax.tree.unflatten(of_state, held)
        found.append((of_step, of_lists))
    quartiles = np.quantile(found[1:], [0.25, 0.5, 0.75], axis=0)
    cells = [[f"{len(leaves)} arrays, {options.devices} devices", "call, us", "middle half", "CPU, us", "middle half"]]
    for n, name in enumerate(("training step", "plain lists")):
        of = [[f"{us[1]:.0f}", f"{us[0]:.0f} to {us[2]:.0f}"] for us in quartiles[:, n].T]
        cells.append([name, *of[0], *of[1]])
    print("\n".join(aligned(cells)))


if __name__ == "__main__":
    main()
