"""Sizes that routers lay batches out for: they grow where a batch needs more, and a resumed run has the same ones."""

import copy
import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recjax.config.presets import load
from recjax.embedding.routing import capacity
from recjax.train import routers
from recjax.train.build import build_trainer
from recjax.train.routers import PackedBatches
from recjax.train.trainer import Trainer

pytestmark = pytest.mark.light_compile

SMALL = ("data.rows=400,300", "data.ids_per_bag=0,1", "data.train_rows=2000", "train.batch_size=40")


def trainer(*overrides: str) -> Trainer:
    return build_trainer(load("synthetic", (*SMALL, "mesh.devices=2", "plan=row_wise", *overrides)))


def equal(left: PackedBatches, right: PackedBatches) -> bool:
    return form(left) == form(right) and np.array_equal(left.words_KxNxE, right.words_KxNxE)


def form(batches: PackedBatches) -> Any:
    return batches.form, batches.sizes


@pytest.mark.full
@pytest.mark.parametrize("routing", ["host", "device"])
def test_placing_a_batch_grows_capacities_that_are_short(routing):
    made = trainer(f"train.routing={routing}")
    stream = made.train_inputs()

    def first(capacities: dict[str, int]) -> Any:
        stream.load_state_dict({"position": 0, "capacities": capacities, "peaks": {}})
        return next(stream)

    new = first({})
    required = stream.latest.routed.required_capacities | made.router.counted(stream.latest.routed)
    wide, kinds = dict.fromkeys(required, 10**4), capacity.Kinds.of(made.bound)
    assert len(required) > 1
    for name, size in required.items():
        enough = capacity.grow(wide | {name: size - 1}, required, kinds)
        assert enough[name] >= size
        assert equal(first(wide | {name: size - 1}), first(enough))
        assert not equal(first(wide), first(enough))
    assert equal(new, first(capacity.grow({}, required, kinds)))


@pytest.mark.full
@pytest.mark.parametrize("routing", ["host", "device"])
def test_a_resumed_run_has_the_sizes_of_one_that_went_on(routing, monkeypatch):
    """Sizes rise with the batches and fall every three steps; a run may be resumed before any of them."""
    monkeypatch.setattr(capacity, "PERIOD", 3)
    monkeypatch.setattr(capacity, "_WORTH", 1.0)
    monkeypatch.setattr(capacity, "_power_of_two", lambda n: True)  # periods of one length
    monkeypatch.setattr(capacity.Kinds, "of", lambda bound: capacity.ALONE)  # each alone, with little room: they change
    made = trainer(f"train.routing={routing}")
    stream, states, whole = made.train_inputs(), [], []
    for _ in range(24):
        states.append(copy.deepcopy(stream.state_dict()))
        whole.append(form(next(stream)))
    lengths = [sum(of.words) for of, _ in whole]
    changes = [later > earlier for earlier, later in itertools.pairwise(lengths) if later != earlier]
    assert {True, False} == set(changes)
    for step, state in enumerate(states[:22]):
        again = made.train_inputs()
        again.load_state_dict(json.loads(json.dumps(state)))
        shapes = [form(inputs) for inputs in itertools.islice(again, 24 - step)]
        assert shapes == whole[step:]


@pytest.mark.parametrize(
    ("platform", "overrides", "name"),
    [
        ("gpu", (), "device"),
        ("tpu", (), "device"),
        ("cpu", (), "host"),
        ("gpu", ("embedding.hot.rows=8", "embedding.hot.refresh=5"), "host"),  # rows are hot that no program knows
        ("gpu", ("train.routing=host",), "host"),
    ],
)
def test_accelerators_route_unless_the_host_alone_knows_where_rows_are(
    platform: str, overrides: tuple[str, ...], name: str
) -> None:
    there: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    made = trainer(*overrides)
    assert routers.choose(made.config, made.bound, there, np.float32, "auto", False, made.source.schema).name == name
    assert routers.choose(made.config, made.bound, there, np.float32, "auto", True, made.source.schema).name == "host"
