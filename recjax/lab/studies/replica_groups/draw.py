"""The pictures of the study of replica groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.lab.studies.replica_groups.cost import PARTS, PRECISIONS
from recjax.lab.studies.replica_groups.curves import Curves
from recjax.lab.studies.report import Picture
from recjax.utils import plots

_STYLES = ("-", "--", ":", "-.")
# Of the parts of an iteration, which stand one after the other.
_STACK = ("#4878a8", "#a3c1dd", "#2f7d4f", "#d1662c", "#e6b89c", "#332288", "#cccccc", "#eeeeee")
_COLOURS = dict(zip((*PARTS, "other", "idle"), _STACK, strict=True))
_KEYS = {"groups": "groups", "batch of a group": "batch", "columns D": "dim"}
Line = tuple[str, str, str]  # name of an arm, measure, label


def of_trainings(result: Mapping[str, Any]) -> list[Picture]:
    """The pictures of measures against the iteration: lines are means over seeds, bands go from least to largest."""
    curves = Curves(result["trainings"])
    apart = [name for name, arm in curves.arms.items() if arm["sync"] == "never" and not arm["shape"]]
    apart = [n for n in apart if curves.arms[n]["groups"] == 2 and not curves.arms[n]["delay"]]
    apart = [n for n in apart if not curves.arms[n]["interaction"]]
    one = next(name for name, arm in curves.arms.items() if arm["groups"] == 1)
    fixed = next(name for name in apart if curves.arms[name]["parts"] == "fixed")
    plain = [n for n, a in curves.arms.items() if a["parts"] == "random" and not a["delay"] and a["sync"] != "average"]
    plain = [n for n in plain if not curves.arms[n]["interaction"]]
    other = [n for n, a in curves.arms.items() if a["interaction"]]
    open_ = [n for n, a in curves.arms.items() if a["sync"] == "average" or a["delay"]]
    shaped = [name for name, arm in curves.arms.items() if arm["shape"]]
    norms: list[tuple[str, list[Line]]] = [
        ("norm of the difference of tables", [(name, "distance", name) for name in apart]),
        ("norm after orthogonal alignment", [(name, "aligned", name) for name in apart]),
    ]
    training: list[tuple[str, list[Line]]] = [
        ("accuracy", [(one, "train_accuracy", "in training"), (one, "accuracy", "test")]),
        ("accuracy", [(fixed, "own_train_accuracy", "in training"), (fixed, "own_accuracy", "test")]),
    ]
    whole: list[Line] = [(name, "accuracy", name.removesuffix(", samples random")) for name in plain]
    ranked: list[Line] = [(name, "auc", label) for name, _, label in whole]
    nodes = [(name, [(name, f"accuracy_{g}", f"node {g}") for g in range(2)]) for name in shaped]
    made = [
        _lines(curves, "norm", norms, "Figure 4: how far the tables of two nodes are apart.", ("", "")),
        _lines(
            curves,
            "training",
            training,
            "Figures 5 and 6: accuracy in training and on the test split, of one node and of two (own tables, data "
            "partitioned).",
            ("one node", "two nodes"),
        ),
        _lines(
            curves,
            "nodes",
            [("test accuracy", lines) for _, lines in nodes],
            "Figures 13 and 14: test accuracy of both nodes; untrained models are below the scale.",
            [name.removesuffix(", samples fixed") for name, _ in nodes],
        ),
        _lines(
            curves,
            "accuracy",
            [("test accuracy", whole), ("test AUC", ranked)],
            "One, two and four groups: test accuracy and AUC, of independent tables by their means. Untrained "
            "models are below the scale.",
            ("", ""),
        ),
    ]
    if other:
        turned_to = curves.arms[other[0]]["interaction"]
        called, usual = f"{turned_to} interaction", f"{'cat' if turned_to == 'dot' else 'dot'} interaction"
        both = [(one, other[0], ""), (fixed, other[1], "own_")]
        pairs: list[list[Line]] = [
            [
                (name, own + measure, f"{what}, {shown}")
                for name, what in ((arm, usual), (turned, called))
                for measure, shown in (("train_accuracy", "in training"), ("accuracy", "test"))
            ]
            for arm, turned, own in both
        ]
        text = f"Figures 5 and 6 again, with DLRM's {called} beside."
        panels = [("accuracy", lines) for lines in pairs]
        made.insert(2, _lines(curves, "interaction", panels, text, ("one node", "two nodes")))
    if open_:
        text = (
            "Averages in fewer bytes, and gradients one iteration late: test AUC. Untrained models are below the scale."
        )
        made.append(_lines(curves, "open", [("test AUC", [(name, "auc", name) for name in open_])], text, ("",)))
    return made


def _lines(
    curves: Curves, name: str, panels: Sequence[tuple[str, list[Line]]], text: str, titles: Sequence[str]
) -> Picture:
    """A panel for each (label of the axis, lines); panels with the same unit have one scale.

    That of a test split's measures begins at the lowest after the first, which is of untrained models.
    """
    with plots.literal():
        most = max(len(lines) for _, lines in panels)
        figure = plots.figure(max(5.6 * len(panels), 8.0), 3.6 + 0.24 * most)
        same = len({label for label, _ in panels}) == 1 or "norm" in panels[0][0]
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=same)[0]
        trained: dict[str, list[float]] = {label: [] for label, _ in panels}
        for axis, (label, lines), title in zip(axes, panels, titles, strict=True):
            plots.plain(axis)
            for i, (arm, measure, called) in enumerate(lines):
                values, at = curves.get(arm, measure), curves.iterations(arm)
                colour = plots.PALETTE[i % len(plots.PALETTE)]
                axis.plot(at, values.mean(axis=0), _STYLES[i % len(_STYLES)], color=colour, lw=1.6, label=called)
                axis.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, lw=0)
                trained[label] += [float(x) for x in values[:, 1:].ravel()]
            if label.startswith("test") and (found := trained[label]):  # chance would take most of the scale
                margin = 0.05 * (max(found) - min(found)) or 0.01
                axis.set_ylim(min(found) - margin, max(found) + margin)
            axis.set_xlabel("iteration")
            plots.whole_numbers(axis)
            axis.set_ylabel(label)
            axis.yaxis.set_tick_params(labelleft=True)
            axis.set_title(title, fontsize=10)
        alike = len({tuple(called for _, _, called in lines) for _, lines in panels}) == 1
        if alike:
            plots.legend_of_all(figure, axes[0], 1 if max(len(called) for _, _, called in panels[0][1]) > 40 else 2)
        else:
            for axis in axes:
                plots.legend_below(axis, 1)
        return Picture(f"{name}.png", text, plots.png(figure))


def of_times(result: Mapping[str, Any]) -> list[Picture]:
    """The pictures of what iterations take."""
    if not result["series"]:
        return []
    return [_series(result["series"]), _parts(result["series"]), _distribution(result["series"]), _varied(result)]


def _called(of: Mapping[str, Any]) -> str:
    return f"{of['label']}, {of['devices']} device{'s' if of['devices'] > 1 else ''} a group"


def _series(series: Sequence[Mapping[str, Any]]) -> Picture:
    with plots.literal():
        figure = plots.figure(8.0, 1.5 * len(series) + 0.6)
        axes = figure.subplots(len(series), 1, squeeze=False, sharex=True)[:, 0]
        top = 1.15 * max(float(np.percentile(of["ms"], 95)) for of in series)
        for axis, of in zip(axes, series, strict=True):
            plots.plain(axis)
            axis.plot(np.arange(1, len(of["ms"]) + 1), of["ms"], color=plots.BLUE, lw=0.9)
            beyond = sum(ms > top for ms in of["ms"])
            axis.set_title(_called(of) + (f"; {beyond} beyond the scale" if beyond else ""), fontsize=9, loc="left")
            axis.set(ylabel="ms", ylim=(0, top))
        axes[-1].set_xlabel("iteration")
        plots.whole_numbers(axes[-1])
        return Picture("series.png", "Figures 7 and 8: the time of each iteration.", plots.png(figure))


def _parts(series: Sequence[Mapping[str, Any]]) -> Picture:
    with plots.literal():
        figure = plots.figure(8.4, 0.45 * len(series) + 1.7)
        axis = figure.subplots()
        plots.plain(axis, grid="x")
        parts = {part: [of["parts"][part] for of in series] for part in _COLOURS}
        plots.stacked(axis, [_called(of) for of in series], parts, _COLOURS.values())
        axis.invert_yaxis()
        axis.set_xlabel("ms of an iteration, mean of a profile")
        plots.legend_of_all(figure, axis)
        return Picture("parts.png", "Figures 9 and 10: the parts of an iteration.", plots.png(figure))


def _distribution(series: Sequence[Mapping[str, Any]]) -> Picture:
    with plots.literal():
        figure = plots.figure(8.0, 3.6 + 0.24 * len(series))
        axis = figure.subplots()
        plots.plain(axis)
        top = max(float(np.percentile(of["ms"], 95)) for of in series)
        for i, of in enumerate(series):
            share = 100 * np.arange(1, len(of["ms"]) + 1) / len(of["ms"])
            axis.step(
                np.sort(of["ms"]),
                share,
                _STYLES[i % 4],
                where="post",
                color=plots.PALETTE[i],
                lw=1.4,
                label=_called(of),
            )
        axis.set(xlim=(0, top), ylim=(0, 101), xlabel="ms of an iteration", ylabel="iterations that take no longer, %")
        plots.legend_below(axis, 1)
        return Picture("distribution.png", "Figures 11 and 12: how iterations' times are spread.", plots.png(figure))


def _varied(result: Mapping[str, Any]) -> Picture:
    varied = list(dict.fromkeys(case["varied"] for case in result["times"]))
    with plots.literal():
        figure = plots.figure(5.0 * len(varied), 4.2)
        for axis, what in zip(figure.subplots(1, len(varied), squeeze=False)[0], varied, strict=True):
            plots.plain(axis)
            cases = [c for c in result["times"] if c["varied"] == what]
            if what != "groups":  # the middle belongs to each
                cases += [c for c in result["times"] if c["varied"] == "groups" and c["groups"] == 2]
            cases.sort(key=lambda c: (c[_KEYS[what]], c["sync"]))
            parts = {part: [c["ms"][part] for c in cases] for part in _COLOURS}
            plots.stacked(axis, range(len(cases)), parts, _COLOURS.values(), upright=True, width=0.7)
            short = {"never": "own", "exact": "exact"}
            axis.set_xticks(range(len(cases)), [f"{c[_KEYS[what]]}\n{short[c['sync']]}" for c in cases], fontsize=8)
            axis.set(xlabel=f"{what}; tables own to each group, or exact", ylabel="ms of an iteration")
        plots.legend_of_all(figure, axis)
        text = "Parts of an iteration with one device a group: groups, batch and columns varied."
        return Picture("times.png", text, plots.png(figure))


def of_bytes(result: Mapping[str, Any]) -> Picture:
    """The bytes that keep tables synchronous."""
    found = result["bytes"]
    with plots.literal():
        figure = plots.figure(6.4 * len(found), 4.2)
        axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for axis, (groups, of) in zip(axes, found.items(), strict=True):
            plots.plain(axis)
            names = [name.replace(" float32", "") for name in of["sent"] if "float32" in name]
            for i, (precision, colour) in enumerate(zip(PRECISIONS, ("#4878a8", "#a3c1dd", "#d1662c"), strict=True)):
                at = [j + (i - 1) * 0.27 for j in range(len(names))]
                sizes = [of["sent"][_with(name, precision)] for name in names]
                axis.bar(at, sizes, width=0.25, color=colour, label=precision)
            labels = ["row gradients,\nexact" if name == "rows" else name.replace(", ", ",\n") for name in names]
            axis.set_xticks(range(len(names)), labels, fontsize=8)
            plots.logarithmic(axis, ["y"])
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axis.set_ylabel("bytes an iteration and device")
            axis.set_title(f"{groups} groups", fontsize=9)
        plots.legend_of_all(figure, axes[0])
        text = "Bytes an iteration that the fullest device sends to keep tables synchronous."
        return Picture("bytes.png", text, plots.png(figure))


def _with(name: str, precision: str) -> str:
    what, comma, rest = name.partition(",")
    return f"{what} {precision}{comma}{rest}"
