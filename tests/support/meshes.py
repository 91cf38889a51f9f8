"""A run's numbers on meshes of every kind, and after a resume, against those of one device."""

from pathlib import Path
from typing import Any

import numpy as np

import recjax
from support.commands import lines_of

MESHES = {
    "one": ("mesh.devices=1",),
    "two": ("mesh.devices=2", "plan=column_wise", "train.steps_per_call=3"),
    "three": ("mesh.devices=3", "train.accumulate=2"),
    "eight": ("mesh.devices=8", "plan=row_wise", "embedding.hot.rows=3"),
    "device": ("mesh.devices=2", "train.routing=device"),
}


def assert_alike_on_meshes(config: Any, folder: Path) -> None:
    """Trains a float64 config on each mesh, three steps and then the rest, and compares losses and AUC to 1e-9."""
    numbers: dict[str, list[float]] = {}
    for name, settings in MESHES.items():
        first = recjax.override(config, [*settings, "train.steps=3", "train.checkpoint_every=3"])
        recjax.fit(first, folder / name)
        recjax.fit(recjax.override(first, ["train.steps=0"]), folder / name)
        numbers[name] = [line["loss"] for line in lines_of(folder / name, "train")]
        numbers[name] += [line["auc"] for split in ("validation", "test") for line in lines_of(folder / name, split)]
    assert len(numbers["one"]) > 5
    for name, values in numbers.items():
        np.testing.assert_allclose(values, numbers["one"], rtol=1e-9, err_msg=name)
