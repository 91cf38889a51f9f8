"""Writes the figures of this folder: SVG files that are the same, byte by byte, however often they are drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: "Figure", script: str) -> None:
    """Writes a figure beside the script that draws it; letters are outlines, so that no font is needed."""
    with matplotlib.rc_context({"svg.hashsalt": "recjax", "svg.fonttype": "path"}):
        figure.savefig(Path(script).with_suffix(".svg"), bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
