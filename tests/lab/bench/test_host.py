"""What a training costs the host: one transfer and one program a call, with batches of the real stream."""

from typing import Any

import pytest
from support.commands import inside

pytestmark = pytest.mark.full

SMALL = ("bench_kaggle16", "data.max_rows=300", "data.train_rows=20000", "train.batch_size=64", "mesh.platform=cpu")


def measured(*more: str) -> Any:
    return inside("bench", *SMALL, "--host", "--rounds", "2", "--steps", "16", *more, "--json").result


@pytest.mark.parametrize("count", [1, 8])
def test_a_call_is_one_transfer_and_one_program(count: int) -> None:
    result = measured(f"train.steps_per_call={count}")
    host, setup = result["host"], result["setup"]
    assert (host["puts"], host["dispatches"]) == (1, 1)
    assert 0 < host["main_us"] <= host["process_us"] and host["take_us"] > 0
    assert (setup["routing"], setup["steps_per_call"], setup["batch_size"]) == ("device", count, 64)
    assert setup["bytes"] == 64 * (26 + 13 + 2) * 4  # ids, dense features, label and weight: no more travels


def test_a_host_that_moves_rows_is_refused() -> None:
    done = inside("bench", *SMALL, "--host", "tier.device_bytes=20KB")
    assert done.status == 2 and "--host measures a host that only feeds the devices" in done.err
