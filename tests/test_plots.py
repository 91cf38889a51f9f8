"""The look that pictures share: colours, and ticks as people read them."""

import itertools

import numpy as np
import pytest

from recjax.utils import plots

# What people without one kind of cone see, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # of linear sRGB


def lab(colour, seen):
    """CIELAB of a colour as #rrggbb, as it is seen."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = (
        np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in XYZ @ np.clip(np.array(seen) @ linear, 0, 1) / [0.9505, 1, 1.089]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("who", SEEN)
def test_any_two_colours_of_the_palette_differ_for_everybody(who):
    pairs = itertools.combinations(plots.PALETTE, 2)
    least = min((np.linalg.norm(lab(a, SEEN[who]) - lab(b, SEEN[who])), a, b) for a, b in pairs)
    assert least[0] > 20, least


def ticks(panel, which):
    axis = panel.xaxis if which == "x" else panel.yaxis
    panel.figure.canvas.draw()
    low, high = axis.get_view_interval()
    both = (
        *zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False),
        *zip(axis.get_minorticklocs(), axis.get_minorticklabels(), strict=False),
    )
    return {label.get_text() for at, label in both if low <= at <= high} - {""}


@pytest.mark.parametrize(("most", "texts"), [(40, {"2", "5", "10", "20"}), (4000, {"10", "100", "1,000"})])
def test_logarithmic_axes_have_plain_numbers_and_more_of_them_where_there_are_few(most, texts):
    with plots.literal():
        panel = plots.figure(4, 3).subplots()
        panel.plot([1.5, most], [1.5, most])
        plots.logarithmic(panel, ["y"])
        panel.set_ylim(1.5, most)
        assert ticks(panel, "y") == texts


def test_few_steps_have_whole_numbers():
    panel = plots.figure(6, 3).subplots()
    panel.plot([0, 1, 2], [1, 2, 3])
    plots.whole_numbers(panel)
    assert ticks(panel, "x") == {"0", "1", "2"}
