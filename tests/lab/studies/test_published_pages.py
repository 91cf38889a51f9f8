"""What pages of results say of predictions: the figures that the code gives today."""

import re
from pathlib import Path

import pytest

from recjax.lab.studies.foresight import published

PAGE = Path(__file__).parents[3] / "docs" / "results" / "communication.md"
_ROW = re.compile(r"\| ([\d.,]+)%? \(predicted\) \| (yes|no) \| (?:whole model A on 128 V100: )?(.*) \|$")


@pytest.mark.full  # plans model A three times
def test_predictions_of_model_a_are_those_of_the_page():
    """Three pairs of rows: the share of communication and samples/s, each within 2% of what the code predicts."""
    lines = [
        line for line in PAGE.read_text().splitlines() if "whole model A on 128 V100" in line or "likewise |" in line
    ]
    printed = [_ROW.search(line) for line in lines if "(predicted)" in line]
    rows = published.model_a()["rows"]
    assert len(printed) == 2 * len(rows) == 6
    for share, speed, row in zip(printed[::2], printed[1::2], rows, strict=True):
        assert share[3] == row["what"]
        assert float(share[1]) / 100 == pytest.approx(row["exposed_share"], rel=0.02)
        assert float(speed[1].replace(",", "")) == pytest.approx(row["samples_per_s"], rel=0.02)
        verdicts = [of.cells()[4] for of in published.rows("time", [row])]
        assert [share[2], speed[2]] == verdicts


def test_the_network_is_the_source_s():
    """Eight cards of 200 Gb/s for eight GPUs."""
    assert published.NETWORK.value == 8 * 200e9 / 8 / 8
