"""Draws batch_journey.svg, the figure of docs/explanation/architecture.md.

python docs/figures/batch_journey.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HOST, COMPUTE, TABLE, WIRE = "#e9ecef", "#d7e8f7", "#fde7c8", "#b3541e"
INK = "#1d2733"
LANES = {"host threads": 6.35, "device 0": 4.1, "device 1": 1.6}
WIDTH, HEIGHT = 1.72, 0.92
# Of both devices: text, first line in the name of its scope; position; colour.
STAGES = (
    ("its samples' ids\ndistinct, by owner", 1.75, COMPUTE),
    ("gather\nrows of its part\nof each table", 4.25, TABLE),
    ("pool, forward,\nbackward\nof its samples", 6.75, COMPUTE),
    ("sum gradients\nof each row", 9.25, COMPUTE),
    ("sparse_update\nrows and slots,\nin place", 11.75, TABLE),
)
EXCHANGES = (("id_exchange", 0), ("row_exchange", 1), ("grad_exchange", 3))


def box(ax, text: str, x: float, y: float, colour: str, width: float = WIDTH) -> None:
    """Draws a stage, centred at (x, y)."""
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - HEIGHT / 2),
            width,
            HEIGHT,
            "round,pad=0.04,rounding_size=0.1",
            fc=colour,
            ec=INK,
            lw=0.9,
        )
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=8.1, color=INK, linespacing=1.25)


def arrow(ax, start: tuple[float, float], end: tuple[float, float], colour: str = INK, style: str = "-|>") -> None:
    """Draws an arrow between two points."""
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=11, lw=1.3, color=colour, zorder=0.5))


def draw() -> None:
    """Writes the figure beside this file."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "recjax", "svg.fonttype": "path"})
    figure, ax = plt.subplots(figsize=(11, 5.9))
    for name, y in LANES.items():
        ax.axhspan(y - 0.85, y + 0.85, color="#f7f8fa", zorder=0)
        ax.text(-0.85, y, name.replace(" ", "\n"), ha="left", va="center", fontsize=10, weight="bold", color=INK)
    top = LANES["host threads"]
    for text, x in (
        ("read\nits slice of\nthe order", 1.75),
        ("route\nowners, distinct\nids, sizes", 4.25),
        ("place\non the devices", 6.75),
    ):
        box(ax, text, x, top, HOST)
    for x in (1.75, 4.25):
        arrow(ax, (x + WIDTH / 2 + 0.05, top), (x + 2.5 - WIDTH / 2 - 0.05, top))
    ax.text(8.0, top, "one batch ahead of the step,\nso that devices do not wait", va="center", fontsize=9, color=INK)
    rows = (LANES["device 0"], LANES["device 1"])
    for y in rows:
        for text, x, colour in STAGES:
            box(ax, text, x, y, colour)
        arrow(ax, (6.75 + WIDTH / 2 + 0.05, y), (9.25 - WIDTH / 2 - 0.05, y))
    arrow(ax, (6.4, top - HEIGHT / 2 - 0.05), (1.95, rows[0] + HEIGHT / 2 + 0.05))
    for name, at in EXCHANGES:
        left, right = STAGES[at][1] + WIDTH / 2 + 0.05, STAGES[at + 1][1] - WIDTH / 2 - 0.05
        for a in rows:
            for b in rows:
                arrow(ax, (left, a), (right, b), WIRE)
        ax.text((left + right) / 2, rows[1] - 0.76, name, ha="center", fontsize=9, color=WIRE, weight="bold")
    arrow(ax, (6.75, rows[0] - HEIGHT / 2 - 0.05), (6.75, rows[1] + HEIGHT / 2 + 0.05), WIRE, "<|-|>")
    middle = sum(rows) / 2
    ax.text(6.9, middle, "dense_grads: all-reduce,\nthen dense_update", va="center", fontsize=9, color=WIRE)
    legend = (
        "orange: the owner's part of the tables; its arrows: collectives    blue: a device's own samples    grey: host"
    )
    ax.text(-0.85, 0.3, legend, fontsize=9, color=INK)
    ax.set(xlim=(-0.95, 12.75), ylim=(0.1, 7.3))
    ax.axis("off")
    figure.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
