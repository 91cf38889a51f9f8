"""Draws row_order.svg, the figure of docs/explanation/row_order.md, and prints the numbers of that page.

python docs/figures/row_order.py
"""

import numpy as np
from svg import save

from recjax.embedding.row_order import RowOrder, Split
from recjax.utils import plots

ROWS, DEVICES, BATCH = 1_000_000, 8, 4096
EXPONENTS = (0.8, 1.05, 1.2)
IDS = (1, 10, 26)  # of a sample, all of one table


def asked(owner_NxL: np.ndarray, ids_NxL: np.ndarray) -> np.ndarray:
    """Distinct rows that each device asks of each owner, [N, N]."""
    counts = [[len(np.unique(ids_NxL[n][owner_NxL[n] == o])) for o in range(DEVICES)] for n in range(DEVICES)]
    return np.array(counts)


def measure(exponent: float, ids: int) -> list[np.ndarray]:
    """The counts of one batch with contiguous ranges of ids, and in recjax's order. Id 0 is the most frequent."""
    chances_V = np.cumsum(np.arange(1, ROWS + 1) ** -exponent)
    drawn = np.random.default_rng(0).random((DEVICES, BATCH // DEVICES * ids))
    ids_NxL = np.searchsorted(chances_V / chances_V[-1], drawn)
    split, order = Split(ROWS, DEVICES), RowOrder(ROWS)
    return [asked(split.owner_and_offset(at)[0], ids_NxL) for at in (ids_NxL, order.position(ids_NxL))]


def padded(counts_NxN: np.ndarray) -> float:
    """Padded over useful: all lists are as long as the longest."""
    return float(counts_NxN.max() * counts_NxN.size / counts_NxN.sum())


def draw(counts: list[np.ndarray]) -> None:
    """Writes the figure beside this file."""
    figure = plots.figure(7.2, 2.7)
    titles = ("contiguous ranges of ids", "recjax's order")
    for panel, counts_NxN, title, colour in zip(
        figure.subplots(1, 2, sharey=True), counts, titles, (plots.ORANGE, plots.BLUE), strict=True
    ):
        plots.plain(panel)
        panel.bar(np.arange(DEVICES), counts_NxN.sum(axis=0), color=colour, width=0.7)
        panel.set_title(f"{title}: padded / useful {padded(counts_NxN):.2f}", fontsize=9, loc="left")
        panel.set_xlabel("owner", fontsize=9)
        panel.tick_params(labelsize=8)
    figure.axes[0].set_ylabel("rows asked of it in a step", fontsize=9)
    save(figure, __file__)


def main() -> None:
    """Prints and draws."""
    print("exponent  ids a sample  contiguous  recjax")
    for exponent in EXPONENTS:
        for ids in IDS:
            counts = measure(exponent, ids)
            print(f"{exponent:8}  {ids:12}  {padded(counts[0]):10.2f}  {padded(counts[1]):6.2f}")
            if (exponent, ids) == (1.05, 26):
                draw(counts)


if __name__ == "__main__":
    main()
