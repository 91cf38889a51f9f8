"""The look that recjax's pictures share: palette, panels, legends and the PNG that is made of them.

Matplotlib is imported where a figure is made, so that recjax stays light; a Figure of its own needs no display and no
global state.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#4878a8", "#d1662c", "#2f7d4f", "#777777"
# Any two can be told apart by people who do not see red or green, too.
PALETTE = (BLUE, ORANGE, GREEN, "#332288", "#88ccee", "#6a1b4d", "#e6c229", "#9a9a9a", "#552211", "#f0b8a0")
HATCHES = ("", "////", "....", "xxxx", "||||", "----")  # beside colours, of which some are printed in the same grey
MARKERS = "os^DvP*X"  # likewise


@contextlib.contextmanager
def literal() -> Iterator[None]:
    """Within it matplotlib draws texts as they are written: a dollar sign begins no formula, which may be wrong.

    A character that the font lacks is an empty box, and no warning.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def plain(panel: Axes, grid: Any = "y") -> None:
    """Takes the frame's upper and right line away, and draws a faint grid below all else; `grid`: x, y or both."""
    panel.set_prop_cycle(color=PALETTE)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=grid, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)


def logarithmic(panel: Axes, axes: Sequence[Literal["x", "y"]]) -> None:
    """Makes axes logarithmic, with plain numbers: in `literal` powers of ten would not be drawn as such.

    Less than two powers of ten have numbers between them, too.
    """
    for name in axes:
        axis = panel.xaxis if name == "x" else panel.yaxis

        def between(value: float, _: Any, axis: Any = axis) -> str:
            low, high = axis.get_view_interval()
            return f"{value:,g}" if high < 100 * low and f"{value:e}"[0] in "25" else ""

        panel.set(**{f"{name}scale": "log"})
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.set_minor_formatter(between)


def whole_numbers(panel: Axes) -> None:
    """Puts ticks of the horizontal axis at whole numbers alone, such as steps or ranks, of which there may be few."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))


def stacked(
    panel: Axes,
    at: Sequence[Any],
    parts: Mapping[str, Sequence[float]],
    colours: Iterable[str],
    upright: bool = False,
    hatched: bool = False,
    **how: Any,
) -> None:
    """Bars at some places, whose parts stand one after the other.

    Args:
      panel: to draw on.
      at: where: numbers or names.
      parts: label -> of each bar.
      colours: of the parts.
      upright: whether bars go upwards, and not to the right.
      hatched: whether parts also differ by `HATCHES`, and have an edge.
      how: further arguments of matplotlib's `bar` or `barh`.
    """
    bars, start = (panel.bar, "bottom") if upright else (panel.barh, "left")
    ends = [0.0] * len(at)
    for place, ((label, lengths), colour) in enumerate(zip(parts.items(), colours, strict=False)):
        own: dict[str, Any] = {start: ends, "facecolor": colour, "label": label}
        if hatched:
            own |= {"hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white", "linewidth": 0.5}
        bars(at, lengths, **own, **how)
        ends = [a + b for a, b in zip(ends, lengths, strict=True)]


def legend_below(panel: Axes, columns: int = 2, size: float = 8, handles: Sequence[Any] | None = None) -> None:
    """A legend below the panel and its axis, where it hides nothing; of all that has a label, or of `handles`."""
    given = {} if handles is None else {"handles": handles}
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, fontsize=size, frameon=False, **given)


def legend_of_all(figure: Figure, of: Axes, columns: int = 4) -> None:
    """One legend for all panels, below them; of all that has a label in one of them."""
    handles, labels = of.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, edgecolor="none")


def legend_beside(panel: Axes) -> None:
    """A legend to the right of the panel, where it hides neither data nor labels."""
    panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)


def png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
