"""The study of replica groups: the order of its data, its arithmetic, and a whole one that is short."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import inside
from support.yelp import many

import recjax
from recjax.data.source import SPLITS, BlockSource, concatenate
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.layout import SUMMED
from recjax.embedding.routing import capacity
from recjax.errors import ConfigError
from recjax.lab.studies import report
from recjax.lab.studies.replica_groups import compared, study
from recjax.lab.studies.replica_groups.alignment import distances, procrustes
from recjax.lab.studies.replica_groups.arranged import Arranged, Parts
from recjax.lab.studies.replica_groups.cost import PARTS, PRECISIONS, sync_bytes
from recjax.lab.studies.replica_groups.curves import Curves, milliseconds
from recjax.lab.studies.replica_groups.training import Arm, configured, run
from recjax.planning.compiled_collectives import collectives
from recjax.train.build import build_trainer
from recjax.train.compile_only import compile_step
from recjax.train.trainer import Trainer

pytestmark = pytest.mark.light_compile

GROUPS, SIZE, EPOCHS = 3, 50, 2
SHORT = dataclasses.replace(study.SMALL, iterations=20)


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


def test_whole_parts_show_all_samples_to_every_group() -> None:
    one, order = arranged("whole")
    assert order.shape[1] == 1000 // SIZE
    for epoch in order:
        for group in range(GROUPS):
            np.testing.assert_array_equal(np.sort(epoch[:, group].ravel()), np.arange(1000))
        assert (epoch[:, 0] != epoch[:, 1]).mean() > 0.9
    whole = concatenate([one.source.read("train", i) for i in range(len(one.source.row_counts("train")))])
    np.testing.assert_array_equal(one.met_by(2, 70).dense, whole.dense[order[0, :, 2].ravel()[:70]])
    assert one.met_by(0, 10**6).size == 1000


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


def measured(groups: int, seed: int, **measures: Any) -> dict[str, Any]:
    return {"name": f"{groups}", "groups": groups, "seed": seed, "measures": {"iteration": [0, 10, 20, 30], **measures}}


def test_values_are_read_off_the_measures_of_all_seeds() -> None:
    one = [measured(1, s, accuracy=[0.5, 0.6, 0.7 + s / 10, 0.65]) for s in range(2)]
    two = [measured(2, s, accuracy=[0.5, 0.7, 0.8, 0.8], distance=[0.0, 4.0, 5.0, 5.5 - s]) for s in range(2)]
    curves = Curves([one[0], two[0], one[1], two[1]])
    assert curves.last("2", "distance").values == (5.5, 4.5) and curves.first("1", "accuracy").mean == 0.5
    assert curves.last("2", "distance").text(1) == "5.0 (4.5 to 5.5)"
    assert curves.growth("2", "distance").values == (0.125, -0.125)  # of the first third's 4
    assert curves.drift("2", "distance").values == (0.5 / 5.5, -0.5 / 4.5)
    share = curves.share_of_iterations("2", "accuracy", "1", "accuracy")
    assert share is not None and share.values == (10 / 20, 20 / 20)  # one's best is at 20
    assert curves.share_of_iterations("1", "accuracy", "2", "accuracy") is None
    assert curves.get("1", "distance").size == 0
    assert milliseconds([1.0] * 50 + [3.0] * 51) == {"p5": 1.0, "median": 3.0, "p95": 3.0}


def test_alignment_is_the_nearest_rotation() -> None:
    """Of two columns found by trying all angles, with and without a reflection."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 2))
    angles = np.linspace(0, 2 * np.pi, 20_001)
    cos, sin = np.cos(angles), np.sin(angles)
    turns: Any = np.stack([[[cos, -sin], [sin, cos]], [[cos, sin], [sin, -cos]]]).transpose(0, 3, 1, 2)
    truth = np.linalg.norm(a - b @ turns, axis=(2, 3)).min()
    assert procrustes(a, b) == pytest.approx(truth, rel=1e-6) and truth < np.linalg.norm(a - b)
    a, b = rng.normal(size=(2, 40, 6))
    turned, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    assert procrustes(a, a @ turned) == pytest.approx(0, abs=1e-6)
    groups = [{"t": {"rows": x}, "u": {"rows": 2 * x[:9]}} for x in (a, b, a @ turned)]
    found = distances(groups)
    pairs = [(a, b), (a, a @ turned), (b, a @ turned)]
    squares = [np.square(x - y).sum() + 4 * np.square(x[:9] - y[:9]).sum() for x, y in pairs]
    assert found["distance"] == pytest.approx(np.sqrt(np.mean(squares)))
    least = [procrustes(x, y) ** 2 + 4 * procrustes(x[:9], y[:9]) ** 2 for x, y in pairs]
    assert found["aligned"] == pytest.approx(np.sqrt(np.mean(least)))


@pytest.mark.parametrize("clipped", [False, True])
def test_what_is_trained(clipped: bool) -> None:
    options = dataclasses.replace(study.SMALL, seeds=2)
    found = list(study.trainings("movie", options, clipped))
    names = [(arm.name, seed) for arm, seed in found]
    assert len(set(names)) == len(names)
    assert collections.Counter(seed for _, seed in names) == {0: 14 if clipped else 16, 1: 10 if clipped else 12}
    assert len(list(study.trainings("", dataclasses.replace(options, all_seeds=True), clipped))) == 30 - 4 * clipped
    with_dot = list(study.trainings("movie", options, clipped, "dot"))
    assert {(arm.groups, arm.parts, seed) for arm, seed in with_dot if arm.interaction == "dot"} == {
        (1, "random", 0),
        (2, "fixed", 0),
        (1, "random", 1),
        (2, "fixed", 1),
    }
    assert [one for one in with_dot if not one[0].interaction] == found
    every = {arm.every for arm, _ in found if arm.sync == "average"}
    assert every == {study.SMALL.iterations // 10}


def test_the_other_interaction_has_the_width_that_it_needs() -> None:
    config = configured(recjax.load("movietweetings", "model.bottom=20"), Arm(1, interaction="dot"), 1, 64)
    assert (config.model.interaction, config.model.bottom) == ("dot", (32,))
    assert configured(recjax.load("movietweetings"), Arm(1), 1, 64).model.interaction == "cat"


def test_a_stopped_study_has_whole_arms_and_lists_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after five trainings: one arm has its three seeds, the next one two. Then it goes on."""
    left = 5

    def trained(*_: Any) -> dict[str, list[float]]:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return {"iteration": [0.0]}

    monkeypatch.setattr(study, "run", trained)
    monkeypatch.setattr(study, "arranged", lambda *_: None)
    monkeypatch.setattr(study, "_bytes", lambda *_: {})
    monkeypatch.setattr(compared, "report", lambda _: None)
    monkeypatch.setattr(report, "write", lambda *_: [])
    config = recjax.load("synthetic", "data.train_rows=1000")
    options = dataclasses.replace(study.SMALL, timed=0)
    with pytest.raises(KeyboardInterrupt):
        study.study(config, tmp_path, options)
    parts = [json.loads(line)["part"] for line in (tmp_path / "finished.jsonl").read_text().splitlines()]
    one, exact = Arm(1).name, Arm(2, "exact").name
    assert parts == [f"training: {name}, seed {s}" for name, seeds in ((one, 3), (exact, 2)) for s in range(seeds)]
    left = 100
    result, _ = study.study(config, tmp_path, options)
    listed = [(training["seed"], training["name"]) for training in result["trainings"]]
    of_figures, further = listed[: listed.index((1, one))], listed[listed.index((1, one)) :]
    assert left == 100 - (len(listed) - 5)
    assert [seed for seed, _ in listed] == [0] * len(of_figures) + [1] * (len(further) // 2) + [2] * (len(further) // 2)
    assert [name for _, name in of_figures[: len(further) // 2]] == [name for seed, name in listed if seed == 1]


def made_up() -> dict[str, Any]:
    """Results of a study whose every value is chosen by hand."""
    trainings = []
    for arm, seed in study.trainings("movie", study.SMALL, False, "dot"):
        measures: dict[str, list[float]] = {"iteration": [0, 100, 200, 300]}
        better = 0.01 * arm.groups + 0.001 * seed
        measures |= {n: [0.5, 0.6, 0.7 + better, 0.7] for n in ("accuracy", "auc", "train_accuracy")}
        if arm.sync != "exact":
            start = 8.0 if arm.init == "own" else 0.0
            measures |= {"distance": [start, 9, 10, 10.1], "aligned": [start / 2, 4, 5, 5.05]}
            measures |= {n: [0.5, 0.55, 0.6, 0.65] for n in ("own_accuracy", "own_train_accuracy")}
            measures |= {f"accuracy_{g}": [0.5, 0.6, 0.6, 0.64 + g / 100] for g in range(arm.groups)}
        fields = {**dataclasses.asdict(arm), "label": arm.label, "name": arm.name, "seed": seed}
        trainings.append({**fields, "measures": measures})
    parts = dict.fromkeys((*PARTS, "other", "idle"), 1.0)
    parts |= {"exchange in the group": 2.5, "total": sum(parts.values())}
    cases = [(Arm(1), 1, 8.0), (Arm(1), 2, 35.0), (Arm(2, "never"), 1, 12.0), (Arm(2, "never", delay=1), 1, 11.0)]
    series = [
        {"label": arm.label, "devices": n, "ms": [ms] * 9 + [9 * ms], "parts": parts, "batch": 64}
        for arm, n, ms in cases
    ]
    times = [{"varied": "groups", "groups": 2, "dim": 8, "batch": 64, "sync": "never", "ms": parts}]
    sent = {f"rows {p}": 1000.0 for p in PRECISIONS} | {f"tables {p}, every 1": 60000.0 for p in PRECISIONS}
    about = {"model": "dlrm", "data": "made up", "samples": 100, "batch_size_of_a_group": 64}
    return {"about": about, "trainings": trainings, "series": series, "times": times, "bytes": {"2": {"sent": sent}}}


def test_the_report_compares_figure_by_figure() -> None:
    rows = {(row.figure, row.quantity): row for row in compared.rows(made_up())}

    def row(figure: str, begins: str) -> Any:
        (found,) = [of for (at, quantity), of in rows.items() if at == figure and quantity.startswith(begins)]
        return found

    start = row("figure 4", "norm of E0 - E1 at the start, same seed")
    assert (start.ours, start.same) == ("0.00 (0.00 to 0.00)", True)
    start = row("figure 4", "norm of E0 - E1 at the start, different seeds")
    assert (start.ours, start.same) == ("8.00 (8.00 to 8.00)", True)
    assert row("figure 4", "at the end, same seed, data partitioned").same
    assert row("figure 4", "at the end, different seeds").ours.endswith("last third 0.010 (0.010 to 0.010) of the norm")
    assert "5.05" in row("figure 4", "the same after orthogonal (Procrustes) alignment, same").ours
    assert row("figure 5", "accuracy in training").ours == "0.7000 (0.7000 to 0.7000)"
    assert (
        row("figures 5-6", "iterations to one node's best test accuracy, over those that it took: the nodes").ours
        == "not reached with every seed"
    )
    exact = row("figures 5-6", "iterations to one node's best test accuracy, over those that it took: tables kept")
    assert (exact.source, exact.ours, exact.same) == ("not stated", "1.00 (1.00 to 1.00)", None)
    exact = row(
        "figures 5-6", "iterations to one node's best accuracy in training, over those that it took: tables kept"
    )
    assert (exact.source, exact.ours, exact.same) == ("0.5", "1.00 (1.00 to 1.00)", False)
    ratio = row("figures 11-12", "synchronised over independent")
    assert (ratio.source, ratio.ours, ratio.same) == ("1.57, so slower", "1.50", True)
    two = row("section 4.4", "an iteration on two devices")
    assert two.ours.startswith("4.38 (35.0 ms") and two.same and two.why.startswith("2.5 ms of it exchange rows")
    assert row("figure 13", "test accuracy of node 0").ours == "0.6400 (0.6400 to 0.6400)"
    assert row("figure 14", "test accuracy of node 1").why == "the nodes differ by 0.0100 (0.0100 to 0.0100)"
    assert "a device sends 2,000 bytes an iteration, for those 1,000" in (
        row("future work", "test AUC of tables averaged every 30 iterations in int8").why
    )
    dot = row("figure 5", "the same with the dot interaction, one node")
    assert dot.why.startswith("on the test split 0.7000") and row("figure 6", "the same with the dot").ours == (
        "0.6500 (0.6500 to 0.6500)"
    )
    figures = {at for at, _ in rows}
    assert {f"figure {n}" for n in (4, 5, 6, 7, 8, 9, 10, 13, 14)} <= figures


def trained_or_made_up(trainer: Trainer, *how: Any) -> dict[str, Any]:
    """Trains three arms; for the others, whose programs would have to be compiled, makes measures up."""
    train, groups = trainer.config.train, trainer.bound.replicas
    shaped = trainer.config.model.top[:-1] in [shape.widths for shape in study.SHAPES]
    if groups == 2 and train.replica_sync != "average" and not shaped:
        return run(trainer, *how)
    measures: dict[str, Any] = {"iteration": [0.0, 2.0, 4.0]}
    names = ["accuracy", "auc", "logloss", "train_accuracy"]
    if trainer.bound.independent:
        names += ["distance", "aligned", "accuracy_0", "accuracy_1", *(f"own_{name}" for name in names)]
    return measures | {name: [0.4, 0.5, 0.6] for name in names}


@pytest.mark.full
def test_a_short_study_has_all_its_figures_and_goes_on(
    preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "GROUPS", (1, 2))
    own, kept = Arm(2, "never", parts="fixed"), study.trainings
    few: tuple[Arm, ...] = (Arm(1), Arm(2), Arm(2, "never"), own, Arm(2, "never", parts="whole", init="own"))
    few += tuple(Arm(2, "never", parts="fixed", shape=shape) for shape in study.SHAPES)
    few += tuple(Arm(2, "average", 2, precision=precision) for precision in PRECISIONS)
    assert {arm.name for arm in few} < {arm.name for arm, _ in kept("", dataclasses.replace(SHORT, seeds=1), False)}
    monkeypatch.setattr(study, "trainings", lambda *_: [(arm, 0) for arm in few])
    monkeypatch.setattr(study, "SHAPED_BATCH", 32)
    monkeypatch.setattr(study, "run", trained_or_made_up)
    small = "train.batch_size=64 mesh.devices=2 --iterations 4 --every 2 --seeds 1 --timed 0".split()
    words = ("study", "replicas", preset, *small, "--out", tmp_path / "study", "--json")
    done = inside(*words)
    assert done.status == 0, done.err
    result = done.result
    folder = tmp_path / "study"
    assert {
        key: value for key, value in json.loads((folder / "replicas.json").read_text()).items() if key != "report"
    } == {key: value for key, value in result.items() if key != "files"}
    pictures = {name for name in result["files"] if name.endswith(".png")}
    assert pictures == {"norm.png", "training.png", "nodes.png", "accuracy.png", "open.png", "bytes.png"}
    assert all((folder / name).stat().st_size > 10_000 for name in pictures)
    found = next(t["measures"] for t in result["trainings"] if t["name"] == own.name)
    assert found["iteration"] == [0, 2, 4] and found["distance"][0] == 0 < found["distance"][1] < found["distance"][2]
    assert 0 < found["aligned"][2] < found["distance"][2]
    exact = next(t["measures"] for t in result["trainings"] if t["sync"] == "exact" and t["groups"] == 2)
    assert "distance" not in exact and exact["accuracy"][0] == found["accuracy"][0] == found["own_accuracy"][0]
    seeded = next(t["measures"] for t in result["trainings"] if t["init"] == "own")
    assert seeded["distance"][0] > 1
    again = inside(*words)  # which finds all done
    assert again.result["trainings"] == result["trainings"] and "training:" not in again.err
    other = inside(*words[:-1], "--seeds", "2")
    assert other.status == 2 and "holds parts of this study that were made with other settings (options)" in other.err


def test_yelp_is_studied_by_business_and_by_review(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "study", lambda config, out, options: (config, out))
    raw = many(tmp_path / "raw")
    (raw / "yelp_academic_dataset_business.json").write_text(
        "".join(json.dumps({"business_id": f"b{i}", "stars": 3 + i}) + "\n" for i in range(3))
    )
    config = recjax.load("yelp", "data.test_fraction=0.4", "data.validation_fraction=0")
    found: Any = study.on_yelp(config, raw, tmp_path / "out", study.SMALL)
    assert [(per, out.name) for per, (_, out) in found.items()] == [("business",) * 2, ("review",) * 2]
    opened = {per: config.data.open() for per, (config, _) in found.items()}
    rows = {per: [int(source.row_counts(split).sum()) for split in SPLITS] for per, source in opened.items()}
    assert rows == {"business": [2, 0, 1], "review": [48, 0, 32]}
    labels = np.concatenate([opened["business"].read(split, 0).labels for split in ("train", "test")])
    assert sorted(labels) == [0, 0, 1]  # stars of 3, 4 and 5
    with pytest.raises(ConfigError, match="the preset trains on movietweetings"):
        study.on_yelp(recjax.load("movietweetings"), raw, tmp_path / "out", study.SMALL)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    done = inside("study", "replicas", "seed=1", "--out", tmp_path, "--every", "0")
    assert done.status == 2 and "--every is 0; it must be at least 1." in done.err
