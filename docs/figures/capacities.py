"""Draws capacities.svg, the figure of docs/explanation/routing.md: sizes that follow what batches need.

python docs/figures/capacities.py
"""

import numpy as np
from svg import save

from recjax.embedding.routing.capacity import CapacityLadder, Kinds
from recjax.utils import plots

STEPS = 1200


def required() -> np.ndarray:
    """Rows of the longest list in each step: made up, with a busy hour in which bags are longer."""
    busy_S = 1 + 0.5 * np.exp(-(((np.arange(STEPS) - 150) / 40) ** 2))
    return np.random.default_rng(1).poisson(2000 * busy_S)


def draw() -> None:
    """Writes the figure beside this file."""
    ladder, needs_S = CapacityLadder(kinds=Kinds.of_names((), (), ["rows"])), required()
    sizes_S = [ladder.fit({"rows": int(need)})["rows"] for need in needs_S]
    figure = plots.figure(7.2, 2.7)
    panel = figure.subplots()
    plots.plain(panel)
    panel.plot(needs_S, color=plots.ORANGE, linewidth=0.6, label="the longest list of the batch")
    panel.plot(sizes_S, color=plots.BLUE, linewidth=1.6, label="capacity, with which it is laid out")
    panel.set(xlim=(0, STEPS), ylim=(1500, None))
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylabel("rows", fontsize=9)
    panel.tick_params(labelsize=8)
    panel.legend(fontsize=8, frameon=False)
    save(figure, __file__)
    changes = [(step, a, b) for step, (a, b) in enumerate(zip(sizes_S, sizes_S[1:], strict=False), 1) if a != b]
    print("programs:", len(set(sizes_S)), "changes (step, from, to):", changes)
    print(f"padding: {sum(sizes_S) / needs_S.sum():.3f}")


if __name__ == "__main__":
    draw()
