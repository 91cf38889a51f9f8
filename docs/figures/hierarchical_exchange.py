"""Draws hierarchical_exchange.svg, the figure of docs/explanation/hierarchical_exchange.md.

python docs/figures/hierarchical_exchange.py
"""

from matplotlib.axes import Axes
from svg import save

from recjax.utils import plots

INK, FILL = "#1d2733", "#eef1f4"
# Devices of two hosts, (x, y). Device 0 of host 0 and device 1 of host 0 want row 7, which device 3 owns.
PLACES = {(0, 0): (0, 3.0), (0, 1): (0, 2.0), (1, 0): (3, 3.0), (1, 1): (3, 2.0)}
Arrow = tuple[tuple[int, int], tuple[int, int], str, float]
ONE_STEP: tuple[Arrow, ...] = (((1, 1), (0, 0), plots.ORANGE, 0.0), ((1, 1), (0, 1), plots.ORANGE, 0.0))
TWO_STEPS: tuple[Arrow, ...] = (((1, 1), (0, 1), plots.ORANGE, 0.0), ((0, 1), (0, 0), plots.BLUE, 0.0))


def panel_of(panel: Axes, title: str, arrows: tuple[Arrow, ...], notes: dict[tuple[int, int], str]) -> None:
    """Draws two hosts of two devices each, and the way of one row between them."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    for host, x in ((0, 0), (1, 3)):
        frame = FancyBboxPatch((x - 0.85, 1.45), 1.7, 2.1, "round,pad=0.05", fc=FILL, ec="none", zorder=0)
        panel.add_patch(frame)
        panel.text(x, 3.75, f"host {host}", ha="center", fontsize=9, color=INK, weight="bold")
    for (host, number), (x, y) in PLACES.items():
        box = FancyBboxPatch((x - 0.55, y - 0.22), 1.1, 0.44, "round,pad=0.04", fc="white", ec=INK, lw=0.9, zorder=2)
        panel.add_patch(box)
        text = f"device {2 * host + number}\n{notes.get((host, number), '')}".strip()
        panel.text(x, y, text, ha="center", va="center", fontsize=8, color=INK, zorder=3, linespacing=1.2)
    for start, end, colour, curve in arrows:
        (a, b), (c, d) = PLACES[start], PLACES[end]
        inside = start[0] == end[0]
        ends = ((a, b + 0.28), (c, d - 0.28)) if inside else ((a - 0.62, b), (c + 0.62, d))
        style = f"arc3,rad={curve}"
        patch = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=12, lw=1.8, color=colour, connectionstyle=style)
        panel.add_patch(patch)
    panel.set_title(title, fontsize=9.5, loc="left", color=INK)
    panel.set(xlim=(-1, 4), ylim=(1.3, 4.0))
    panel.axis("off")


def draw() -> None:
    """Writes the figure beside this file."""
    figure = plots.figure(8.2, 2.6)
    wants = {(0, 0): "wants row 7", (0, 1): "wants row 7", (1, 1): "owns row 7"}
    relay = {**wants, (0, 1): "wants 7, relay"}
    left, right = figure.subplots(1, 2)
    panel_of(left, "one step: the row crosses twice", ONE_STEP, wants)
    panel_of(right, "two steps: it crosses once, then inside the host", TWO_STEPS, relay)
    save(figure, __file__)


if __name__ == "__main__":
    draw()
