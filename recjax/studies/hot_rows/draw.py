"""The pictures of the study of hot rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from recjax.studies.report import Picture
from recjax.utils import plots


def pictures(result: dict[str, Any]) -> list[Picture]:
    """Draws the presence of items, bytes and, where they were measured, times."""
    with plots.literal():
        made = [Picture("presence.png", "Items by the number of batches that they are in, and the look-ups that the "
                        "most present ones take.", _presence(result)),
                Picture("bytes.png", "Bytes that a device sends for the tables in a step.",
                        _arms(result, "bytes sent a step, MiB", lambda of: of["bytes"]["padded"] / 2**20))]  # fmt: skip
        if "times" in result["arms"][0]:
            made.append(Picture("cpu.png", "CPU time of a step, routing included.",
                                _arms(result, "CPU time of a step, ms", lambda of: of["times"]["cpu_ms"])))  # fmt: skip
    return made


def _presence(result: dict[str, Any]) -> bytes:
    """In how many batches items are, and the look-ups that those in at least so many take."""
    found = result["presence"]
    figure = plots.figure(10.0, 4.0)
    left, right = figure.subplots(1, 2)
    batches = [int(n) for n in found["histogram"]]
    plots.plain(left)
    left.bar(batches, list(found["histogram"].values()), color=plots.BLUE, width=1.0)
    plots.logarithmic(left, ["y"])
    plots.whole_numbers(left)
    left.set(xlabel=f"batches of {found['batches']} that an item is in", ylabel="items")
    counts = np.array(list(found["histogram"].values()))
    at_least = np.cumsum(counts[::-1])[::-1] / counts.sum()
    plots.plain(right, grid="both")
    right.plot(100 * at_least, [100 * share for share in found["accesses"].values()], color=plots.ORANGE)
    plots.logarithmic(right, ["x"])
    right.set(xlabel="items, % of those seen, the most present first", ylabel="look-ups that they take, %")
    right.set_ylim(0, 101)
    figure.suptitle(_title(result), fontsize=10)
    return plots.png(figure)


def _arms(result: dict[str, Any], unit: str, measure: Any) -> bytes:
    """A panel for each number of devices, a bar for each way to hold the tables."""
    devices = list(dict.fromkeys(of["devices"] for of in result["arms"]))
    own = [[of for of in result["arms"] if of["devices"] == n] for n in devices]
    figure = plots.figure(5.4 * len(devices), 1.4 + 0.34 * len(own[0]))
    for panel, number, found in zip(figure.subplots(1, len(devices), squeeze=False)[0], devices, own, strict=True):
        plots.plain(panel, grid="x")
        labels = [of["label"] for of in found][::-1]
        colours = [plots.GREY if not of["rows"] else plots.ORANGE for of in found][::-1]
        panel.barh(labels, [measure(of) for of in found][::-1], color=colours)
        panel.set_xlabel(unit)
        panel.set_title(f"{number} device(s)", fontsize=9)
    figure.suptitle(_title(result), fontsize=10)
    return plots.png(figure)


def _title(result: dict[str, Any]) -> str:
    about = result["about"]
    return f"{about['model']} on {about['data']}, batches of {about['batch_size']:,}"
