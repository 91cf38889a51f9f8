"""Rows that lie on the devices of several processes train to the bits of rows that each of them reads."""

from pathlib import Path

import numpy as np
import pytest
from support.commands import lines_of, write_preset
from support.processes import newest, train_together

from recjax.config.presets import load
from recjax.data.storage.blocks import write_prepared

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.wide]

DATA = [
    "data.rows=400,300",
    "data.ids_per_bag=1,3",
    "data.train_rows=500",
    "data.validation_rows=0",
    "data.test_rows=0",
]
TRAIN = ["train.batch_size=40", "train.routing=device", "train.steps=16", "train.log_every=1", "mesh.devices=2"]


def test_rows_on_the_devices_of_two_processes_train_to_the_same_bits(tmp_path: Path) -> None:
    """Shuffled, over the end of an epoch of 13 batches; the last call of 3 steps crosses it."""
    source = load("synthetic", DATA).data.open()
    write_prepared(tmp_path / "data", source.name, source.schema, {"train": [source.read("train", 0)]}, {})
    preset, at = write_preset(tmp_path), ["data=prepared", f"data.path={tmp_path / 'data'}", "plan=row_wise"]
    for resident in ("never", "always"):
        how = [*at, *TRAIN, "train.steps_per_call=3", f"train.resident={resident}"]
        train_together(2, tmp_path / resident, preset, how)
    assert all("placing 500 training rows" in log.read_text() for log in tmp_path.glob("always.*.log"))
    losses = [[line["loss"] for line in lines_of(tmp_path / run, "train")] for run in ("never", "always")]
    assert losses[0] == losses[1] and len(losses[0]) == 16
    expected, found = newest(tmp_path / "never"), newest(tmp_path / "always")
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path, strict=True)
