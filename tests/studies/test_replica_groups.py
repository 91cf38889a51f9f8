"""The study of replica groups: the order of its data, its arithmetic, and a whole one that is short."""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import inside

import recjax
from recjax.comms.compiled import collectives
from recjax.data.source import BlockSource, concatenate
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.layout import SUMMED
from recjax.embedding.routing import capacity
from recjax.errors import ConfigError
from recjax.studies.replica_groups import study
from recjax.studies.replica_groups.arranged import Arranged, Parts
from recjax.studies.replica_groups.cost import sync_bytes
from recjax.studies.replica_groups.training import Arm, configured
from recjax.train.compile_only import compile_step
from recjax.train.trainer import build_trainer

GROUPS, SIZE, EPOCHS = 3, 50, 2


def source() -> Synthetic:
    return Synthetic(rows=(40, 400), ids_per_bag=(1, 1), weighted=(False, False), train_rows=1000)


def arranged(parts: Parts, feature: str = "sparse_0") -> tuple[Arranged, np.ndarray]:
    """And the indices of the samples: [epochs, batches, groups, samples]."""
    one = Arranged(source().open(), GROUPS, SIZE, parts, feature, EPOCHS, seed=3)
    return one, one.order.reshape(EPOCHS, -1, GROUPS, SIZE)


def test_the_rows_are_those_of_the_order() -> None:
    one, _ = arranged("random")
    original: BlockSource = one.source
    assert one.row_counts("train").sum() == len(one.order) == EPOCHS * 6 * GROUPS * SIZE
    rows = concatenate([one.read("train", i) for i in range(len(one.row_counts("train")))])
    whole = concatenate([original.read("train", i) for i in range(len(original.row_counts("train")))])
    np.testing.assert_array_equal(rows.dense, whole.dense[one.order])
    np.testing.assert_array_equal(rows.bags["sparse_1"].ids, whole.bags["sparse_1"].ids[one.order])
    assert [one.read("train", i).position for i in (0,)] == [0]
    np.testing.assert_array_equal(one.read("test", 0).labels, original.read("test", 0).labels)


@pytest.mark.parametrize("parts", ["random", "fixed", "by_feature"])
def test_each_epoch_is_new_and_names_no_sample_twice(parts: Parts) -> None:
    _, order = arranged(parts)
    assert all(len(np.unique(epoch)) == epoch.size for epoch in order)
    assert (order[0] != order[1]).mean() > 0.9
    first, second = ([set(epoch[:, g].ravel()) for g in range(GROUPS)] for epoch in order)
    shared = [len(first[a] & second[b]) for a in range(GROUPS) for b in range(GROUPS) if a != b]
    assert min(shared) > 50 if parts == "random" else max(shared) == 0


def test_parts_by_a_feature_have_its_values_for_themselves() -> None:
    one, order = arranged("by_feature")
    whole = concatenate([one.source.read("train", i) for i in range(len(one.source.row_counts("train")))])
    values = [set(whole.bags["sparse_0"].ids[order[:, :, g].ravel(), 0]) for g in range(GROUPS)]
    assert all(values) and not (values[0] & values[1] or values[0] & values[2] or values[1] & values[2])


def test_too_few_samples_are_told() -> None:
    with pytest.raises(ConfigError, match="3 groups with 400 samples of a batch each are more than the 1,000 training"):
        _ = Arranged(source().open(), GROUPS, 400, "random", "", 1, 0).order


def test_bytes_of_row_gradients_are_those_of_the_compiled_program() -> None:
    """What arrives from the other groups, of an all-gather's result; the formula counts what is sent, as much."""
    config = configured(recjax.load("synthetic", "plan=row_wise"), Arm(4), devices=2, batch_size=64)
    trainer = build_trainer(config, weights=False)
    needs = next(trainer.routed_batches()).routed.required_capacities
    capacities = capacity.grow({}, needs)
    exact = capacities | {name: needs[name] for name in needs if name.endswith(SUMMED)}
    text = compile_step(trainer, exact).as_text()
    received = sum(c.result_bytes * 3 / 4 for c in collectives(text) if c.phase == "replica_exchange")
    assert received > 0 and sync_bytes(trainer.bound, needs)["rows float32"] == pytest.approx(received)


def test_bytes_of_whole_tables_are_those_of_a_ring() -> None:
    config = configured(recjax.load("synthetic", "plan=row_wise", "data.rows=100,60"), Arm(2), 1, 64)
    trainer = build_trainer(config, weights=False)
    found = sync_bytes(trainer.bound, collections.defaultdict(int))
    D = config.embedding.dim
    assert found["tables float32"] == 160 * (D + 1) * 4  # 2 (G - 1) / G is 1; row-wise Adagrad has one slot a row
    assert found["tables int8"] == 160 * (D + 8 + 4)


def test_claims_are_read_off_the_measures() -> None:
    def training(groups: int, accuracy: list[float], **more: Any) -> dict[str, Any]:
        measures = {"iteration": [0.0, 10.0, 20.0, 30.0], "accuracy": accuracy, **more}
        return {"groups": groups, "sync": "never", "label": f"{groups}", "parts": "random", "measures": measures}

    one = training(1, [0.5, 0.6, 0.7, 0.65])
    two = training(2, [0.5, 0.7, 0.8, 0.8], own_accuracy=[0.5, 0.6, 0.6, 0.6], distance=[0.0, 4.0, 5.0, 5.5])
    found = study.claims([one, two])
    assert found["accuracy_of_one_group"] == 0.7
    assert found["iterations_to_reach"]["2, samples random"] == {"mean": 10, "own": None}
    assert found["distance"]["2, samples random"] == {"thirds": [4.0, 5.0, 5.5], "last_growth_over_first": 0.125}


@pytest.mark.full
def test_a_short_study_has_all_its_figures(preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "GROUPS", (1, 2))
    done = inside("study", "replicas", preset, "train.batch_size=64", "mesh.devices=2", "--out", tmp_path / "study",
                  "--iterations", "4", "--every", "2", "--timed", "0", "--json")  # fmt: skip
    assert done.status == 0, done.err
    result = done.result
    assert json.loads((tmp_path / "study" / "replicas.json").read_text()) == result
    assert {Path(path).name for path in result["figures"]} == {"accuracy.png", "distance.png", "bytes.png"}
    assert all(Path(path).stat().st_size > 10_000 for path in result["figures"])
    own = next(t["measures"] for t in result["trainings"] if t["sync"] == "never")
    assert own["iteration"] == [0, 2, 4] and own["distance"][0] == 0 < own["distance"][1] < own["distance"][2]
    exact = next(t["measures"] for t in result["trainings"] if t["sync"] == "exact" and t["groups"] == 2)
    assert "distance" not in exact and exact["accuracy"][0] == own["accuracy"][0] == own["own_accuracy"][0]


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    done = inside("study", "replicas", "seed=1", "--out", tmp_path, "--every", "0")
    assert done.status == 2 and "--every is 0; it must be at least 1." in done.err
