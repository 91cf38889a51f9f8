"""The progress of a training as a bar in a notebook, where lines that pile up below each other would be in the way."""

from __future__ import annotations

import sys
import warnings
from typing import Any, TextIO


def in_notebook() -> bool:
    """Returns True if this process is the kernel of a notebook. Nothing is imported to find out."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookBar:
    """A bar of tqdm: one of ipywidgets where that is installed, else one of characters."""

    def __init__(self, total: int, step: int, stream: TextIO) -> None:
        """Draws the bar at `step` of `total`; characters go to `stream`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that ipywidgets is missing: the other bar will do
            from tqdm.auto import tqdm
        self._bar: Any = tqdm(total=total, initial=step, file=stream, bar_format="{percentage:3.0f}%|{bar}| {desc}")

    def update(self, step: int, text: str) -> None:
        """Draws it again at `step`, with the text of the progress line."""
        self._bar.set_description_str(text, refresh=False)
        self._bar.n = step
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Writes a line of its own, which the bar does not run into."""
        self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        """Ends the bar, which stays as it is."""
        self._bar.close()
