"""The pictures of the study of hot rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from recjax.lab.studies.report import Picture
from recjax.utils import plots


def pictures(result: dict[str, Any]) -> list[Picture]:
    """Draws the presence of items, bytes and, where they were measured, times."""
    with plots.literal():
        made = [
            Picture(
                "presence.png",
                "Items by the number of batches that they are in, and the look-ups that the most present ones take.",
                _presence(result),
            ),
            Picture(
                "bytes.png",
                "Bytes that a device sends for the tables in a step.",
                _arms(result, "bytes sent a step, MiB", lambda of: of["bytes"]["padded"] / 2**20),
            ),
        ]
        if result["copies"]:
            made.append(
                Picture(
                    "copies.png",
                    "Bytes of hot rows with a copy on every device and on every host, of a device.",
                    _copies(result),
                )
            )
        if "times" in result["arms"][0]:
            made.append(
                Picture(
                    "cpu.png",
                    "CPU time of a step, routing included.",
                    _arms(result, "CPU time of a step, ms", lambda of: of["times"]["cpu_ms"]),
                )
            )
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
    figure = plots.figure(5.4 * len(devices), 1.7 + 0.34 * len(own[0]))
    panels = figure.subplots(1, len(devices), squeeze=False)[0]
    for panel, number, found in zip(panels, devices, own, strict=True):
        plots.plain(panel, grid="x")
        labels = [of["label"] for of in found][::-1]
        colours = [plots.GREY if not of["rows"] else plots.ORANGE for of in found][::-1]
        panel.barh(labels, [measure(of) for of in found][::-1], color=colours)
        panel.set_xlabel(unit)
        panel.set_title(f"{number} device(s)", fontsize=9)
        for words, colour in (("without hot rows", plots.GREY), ("with hot rows", plots.ORANGE)):
            panel.barh([labels[0]], [0], color=colour, label=words)
    plots.legend_of_all(figure, panels[0])
    figure.suptitle(_title(result), fontsize=10)
    return plots.png(figure)


def _copies(result: dict[str, Any]) -> bytes:
    """A panel for each number of devices in hosts, with the most hot rows: held, sent and across hosts in pairs."""
    most = max(of["rows"] for of in result["copies"])
    cases = list(dict.fromkeys((of["devices"], of["hosts"]) for of in result["copies"]))
    figure = plots.figure(4.8 * len(cases), 3.6)
    for panel, (devices, hosts) in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        plots.plain(panel)
        for shift, on, colour in ((-0.2, "device", plots.BLUE), (0.2, "host", plots.ORANGE)):
            (of,) = (
                c
                for c in result["copies"]
                if (c["devices"], c["hosts"], c["rows"]) == (devices, hosts, most) and c["on"] == on
            )
            sizes = [of[name] / 2**20 for name in ("held", "sent", "across")]
            panel.bar(np.arange(3) + shift, sizes, width=0.4, color=colour, label=f"a copy on every {on}")
        panel.set_xticks(range(3), ["held", "sent in a step", "across hosts"])
        panel.set(ylabel="MiB a device", title=f"{devices} devices in {hosts} host(s), {most:,} hot rows")
        panel.set_ylim(0, 1.3 * panel.get_ylim()[1])  # room for the legend
        panel.legend(fontsize=8, loc="upper left")
    return plots.png(figure)


def _title(result: dict[str, Any]) -> str:
    about = result["about"]
    return f"{about['model']} on {about['data']}, batches of {about['batch_size']:,}"
