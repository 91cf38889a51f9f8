"""Trainings of a model of two sides: against the dense oracle, and as commands from a table to candidates."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.commands import inside, lines_of
from support.problems import Placed, Problem, compare, run_oracle, run_sharded, trainer_of

from recjax.config.run import RunConfig
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.source import between
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.models.batch_losses import BatchSoftmax, CosineContrastive, FullSoftmax
from recjax.models.two_tower import MFConfig, TwoTowerConfig
from recjax.planning.compiled_collectives import collectives
from recjax.train.step import StepOptions
from recjax.train.two_sided import item_keys

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

USERS, ITEMS, B, STEPS = 11, 13, 29, 3
SCHEMA = Schema((), (Feature("user", USERS), Feature("item", ITEMS), Feature("tags", 7, None), Feature("country", 5)))


class Source:
    """Rows of pairs in memory, some with label 0 and some without weight."""

    name, schema, fingerprint = "pairs", SCHEMA, "pairs"

    def __init__(self, rows: int) -> None:
        rng = np.random.default_rng(4)
        lengths = rng.integers(0, 3, rows)
        self.rows = Batch(
            np.zeros((rows, 0), np.float32),
            {
                "user": Bags(rng.integers(0, USERS, (rows, 1))),
                "item": Bags(np.minimum(rng.geometric(0.2, (rows, 1)), ITEMS) - 1),
                "tags": Bags(rng.integers(0, 7, lengths.sum()), lengths),
                "country": Bags(rng.integers(0, 5, (rows, 1))),
            },
            (rng.uniform(size=rows) > 0.1).astype(np.float32),
            (rng.uniform(size=rows) > 0.1).astype(np.float32) * rng.integers(1, 4, rows),
        )

    def row_counts(self, split: str) -> np.ndarray:
        return np.array([self.rows.size] if split == "train" else [], np.int64)

    def read(self, split: str, index: int) -> Batch:
        del split, index
        return self.rows


def tower(dense: Any, side: str, parts: list[Any]) -> Any:
    """Vectors of one side: two layers, made of length 1."""
    hidden = jnp.concatenate(parts, axis=1)
    for layer in range(2):
        path = f"{side}.mlp.layers.{layer}"
        hidden = hidden @ dense[f"{path}.kernel.value"] + dense[f"{path}.bias.value"][None]
        hidden = jnp.maximum(hidden, 0) if layer == 0 else hidden
    return hidden / jnp.linalg.norm(hidden, axis=1, keepdims=True)


def make_problem(loss: Any) -> Problem:
    """Some steps of two towers that see all features."""
    source: Any = Source(B * STEPS)
    item = ("item",) if loss.negatives else ("item", "tags")
    user = ("user", "country", *({"tags"} - {*item}))
    model = TwoTowerConfig(user=user, item=item, layers=(6, 4), loss=loss)
    tables = tuple(TableSpec(f.name, f.rows, 5, RowWiseAdagrad(0.1), 0.5) for f in SCHEMA.features)
    features = tuple(FeatureSpec(f.name, f.name, f.bag, "sum") for f in SCHEMA.features)
    if loss.negatives:
        features += (FeatureSpec("item.drawn", "item", loss.negatives, "none"),)
    batches = [between(source.rows, step * B, (step + 1) * B) for step in range(STEPS)]
    keys = item_keys(RunConfig(model=model), source)
    batches = [keys.with_drawn(batch, trains=True) for batch in batches]
    problem = Problem(batches, B, tables, features, model, 0, optax.sgd(0.05), source=source)
    problem.options = StepOptions(batch_loss=loss)
    each = [keys.of(batch) for batch in batches]
    ids_SxB, log_q_SxB = (np.stack([of[name] for of in each]) for name in ("ids_B", "log_q_B"))
    counted = (source.rows.labels > 0) & (source.rows.weights > 0)
    shares = np.bincount(source.rows.bags["item"].ids[counted, 0], minlength=ITEMS) / counted.sum()
    if loss.negatives:  # each known item is drawn as often, and those alone
        drawn_SxN = np.stack([of["drawn_BxM"].ravel() for of in each])
        assert set(drawn_SxN.ravel().tolist()) <= set(np.flatnonzero(shares).tolist())
        assert len({drawn.tobytes() for drawn in drawn_SxN}) == STEPS
    else:
        np.testing.assert_allclose(np.exp(log_q_SxB), shares[ids_SxB])

    sides = {"user": user, "item": item}

    def truth(dense: Any, kept: Any, x: Any, pooled: Any, y: Any, w: Any, step: Any) -> Any:
        user_side, item_side = (tower(dense, side, [pooled[name] for name in names]) for side, names in sides.items())
        ids, log_q, w = jnp.asarray(ids_SxB)[step], jnp.asarray(log_q_SxB)[step], w * y
        own = jnp.sum(user_side * item_side, axis=1)
        of_candidates, candidates, counts = ids, item_side, w > 0
        if loss.negatives:
            rows, _ = pooled["item.drawn"].padded(loss.negatives)
            candidates = tower(dense, "item", [rows.reshape(-1, rows.shape[2])])
            of_candidates, counts = jnp.asarray(drawn_SxN)[step], jnp.repeat(counts, loss.negatives)
            log_q = jnp.zeros(1)  # all alike: it moves no loss
        scores = user_side @ candidates.T
        other = counts[None] & (ids[:, None] != of_candidates[None])
        if isinstance(loss, BatchSoftmax):
            logits = jnp.where(other, scores / loss.temperature - log_q[None], -1e30)
            own_logit = own / loss.temperature - log_q
            each = jnp.logaddexp(jnp.log(jnp.sum(jnp.exp(logits), axis=1)), own_logit) - own_logit
        else:
            pushed = jnp.where(other, jnp.maximum(scores - loss.margin, 0), 0)
            each = 1 - own + loss.weight * jnp.sum(pushed, axis=1) / jnp.sum(other, axis=1, dtype=float)
        return jnp.sum(w * each) / jnp.sum(w), (kept, [])

    problem.truth = truth
    return problem


LOSSES = [
    BatchSoftmax(0.2),
    CosineContrastive(0, margin=0.1, weight=5.0),
    BatchSoftmax(0.3, in_batch=False, negatives=2),
]


@pytest.mark.parametrize("loss", LOSSES, ids=["softmax", "ccl", "drawn"])
def test_training_is_that_of_the_oracle_on_any_mesh(loss: Any) -> None:
    with jax.enable_x64(True):
        problem = make_problem(loss)
        truth = run_oracle(problem, np.float64)
        for devices, plan, how in (
            (1, "data_parallel", {}),
            (2, "table_wise", {"held": "sharded"}),
            (3, "row_wise", {}),
            (8, "row_wise", {"replicas": 2}),
        ):
            compare(run_sharded(problem, devices, plan, np.float64, **how), truth, loss_rtol=1e-9, atol=1e-9)


def make_full_problem(optimizer: Any) -> tuple[Problem, Problem]:
    """Some steps of a softmax over all items; and the same for the oracle, whose batches draw each item once."""
    loss = FullSoftmax(0.3, weight=1.2)
    source: Any = Source(B * STEPS)
    ids = np.minimum(source.rows.bags["item"].ids, ITEMS - 2)  # of the last there is no row, of item 2 no pair
    source.rows = source.rows.with_bags({**source.rows.bags, "item": Bags(ids)})
    source.rows = dataclasses.replace(source.rows, labels=source.rows.labels * (ids[:, 0] != 2))
    sides = {"user": ("user", "tags", "country"), "item": ("item",)}
    model = TwoTowerConfig(sides["user"], sides["item"], layers=(6, 4), loss=loss)
    tables = tuple(TableSpec(f.name, f.rows, 5, optimizer, 0.5) for f in SCHEMA.features)
    features = tuple(FeatureSpec(f.name, f.name, f.bag, "sum") for f in SCHEMA.features)
    batches = [between(source.rows, step * B, (step + 1) * B) for step in range(STEPS)]
    problem = Problem(batches, B, tables, features, model, 0, optax.sgd(0.05), source=source)
    problem.options = StepOptions(batch_loss=loss, clip_norm=0.1)
    known = item_keys(RunConfig(model=model), source).items
    assert known.tolist() == [0, 1, *range(3, ITEMS - 1)]  # the others are no candidates, and stay as they are

    def with_all(batch: Batch) -> Batch:
        lengths = np.zeros(batch.size, np.int64)
        lengths[0] = len(known)
        return batch.with_bags({**batch.bags, "item.all": Bags(known, lengths)})

    def truth(dense: Any, kept: Any, x: Any, pooled: Any, y: Any, w: Any, step: Any) -> Any:
        user_BxE, item_BxE = (tower(dense, side, [pooled[name] for name in names]) for side, names in sides.items())
        rows, _ = pooled["item.all"].padded(len(known))
        logits = user_BxE @ tower(dense, "item", [rows[0]]).T / loss.temperature
        own, ids_SxB = jnp.sum(user_BxE * item_BxE, axis=1), np.stack([b.bags["item"].ids[:, 0] for b in batches])
        logits = jnp.where(jnp.asarray(ids_SxB)[step][:, None] == known[None], -1e30, logits)
        logits = jnp.concatenate([own[:, None] / loss.temperature, logits], axis=1)
        each = loss.weight * jax.nn.logsumexp(logits, axis=1) - logits[:, 0]
        return jnp.sum(w * y * each) / jnp.sum(w * y), (kept, [])

    drawn = (*features, FeatureSpec("item.all", "item", None, "none"))
    return problem, dataclasses.replace(
        problem, batches=[with_all(batch) for batch in batches], features=drawn, truth=truth
    )


@pytest.mark.parametrize("optimizer", [Adam(0.05, weight_decay=0.1), RowWiseAdagrad(0.1, every_row=True)], ids=repr)
def test_a_softmax_over_all_items_is_that_of_the_oracle_on_any_mesh(optimizer: Any) -> None:
    with jax.enable_x64(True):
        problem, oracle = make_full_problem(optimizer)
        truth = run_oracle(oracle, np.float64)
        for devices, plan, how in (
            (1, "row_wise", {}),
            (2, "table_wise", {"lines": True}),
            (3, "row_wise", {"held": "sharded"}),
            (8, "row_wise", {"hosts": 2}),
            (3, "data_parallel", {}),
            (8, "data_parallel", {"replicas": 2}),
        ):
            compare(run_sharded(problem, devices, plan, np.float64, **how), truth, loss_rtol=1e-9, atol=1e-9)


def test_a_step_over_all_items_sends_no_more_and_holds_its_share_of_them_a_few_times() -> None:
    """Users go to the items. A device holds its items' rows, their gradients, these by row, and the new rows."""
    V, D, devices = 40_000, 128, 4
    source: Any = Source(B)
    source.schema = Schema((), (Feature("user", USERS), Feature("item", V)))
    source.rows = source.rows.with_bags({name: source.rows.bags[name] for name in ("user", "item")})
    tables = tuple(TableSpec(f.name, f.rows, D, Sgd(0.1), 0.5) for f in source.schema.features)
    features = tuple(FeatureSpec(table.name, table.name, 1, "sum") for table in tables)
    sent, extra_bytes = [], []
    for loss in (BatchSoftmax(), FullSoftmax()):
        model = MFConfig(user=("user",), item=("item",), loss=loss)
        problem = Problem([source.rows], B, tables, features, model, 0, optax.sgd(0.05), source=source)
        problem.options = StepOptions(batch_loss=loss)
        compiled = Placed.of(problem, trainer_of(problem, devices, "row_wise")).compiled
        found = collectives(compiled.as_text())
        sent.append(sorted((str(c.phase), c.kind, c.result_bytes) for c in found))
        extra_bytes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sent[0] == sent[1]
    share_bytes = V // devices * D * 4
    assert 10 * extra_bytes[0] < share_bytes < extra_bytes[1] < 5 * share_bytes


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks: users like the items of their own kind, k and those that differ from it by a multiple of 4."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("table") / "clicks.csv"
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["who", "sku", "when"])
        for when in range(3000):
            user = int(rng.integers(0, 60))
            rows.writerow([f"u{user}", 1000 + user % 4 + 4 * int(rng.integers(0, 80)), when])
    return file


@pytest.fixture(scope="module")
def command(table: Path) -> list[Any]:
    return [
        "train", "two_tower", f"data.from={table}", "data.user=who", "data.item=sku", "data.time=when", "model=mf",
        "embedding.dim=8", "embedding.optimizer.learning_rate=0.05", "train.batch_size=128", "train.epochs=4",
        "train.log_every=1", "compute_dtype=float64", "train.optimizer=adagrad",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(command: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device."""
    out = tmp_path_factory.mktemp("runs") / "one"
    done = inside(*command, "mesh.devices=1", "--out", out, "--json")
    assert done.status == 0, done.err
    return out


def test_a_table_of_pairs_is_learnt_and_ranked(run: Path) -> None:
    """A quarter of the items is right for a user: who knows that has twice the recall of popularity at least."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval"]["recall@20"] > 2 * summary["popularity"]["recall@20"]
    assert summary["chosen_by"] == "validation ndcg@20"
    assert summary["eval"]["users"] == summary["popularity"]["users"] > 50
    best = max(lines_of(run, "validation"), key=lambda line: line["ndcg@20"])
    assert best["step"] == summary["eval_step"]


def test_losses_measures_and_lists_are_the_same_on_any_mesh(run: Path, command: list[Any], tmp_path: Path) -> None:
    losses = [line["loss"] for line in lines_of(run, "train")]
    assert inside("predict", run, "mesh.devices=1", "--topk", 7, "--out", tmp_path / "one.csv").status == 0
    for devices in (3, 8):
        out = tmp_path / str(devices)
        done = inside(*command, f"mesh.devices={devices}", "plan=row_wise", "--out", out, "--json")
        assert done.status == 0, done.err
        np.testing.assert_allclose([line["loss"] for line in lines_of(out, "train")], losses, rtol=1e-9)
        assert done.result["eval"] == pytest.approx(json.loads((run / "summary.json").read_text())["eval"], rel=1e-9)
        file = tmp_path / f"{devices}.csv"
        assert inside("predict", run, f"mesh.devices={devices}", "--topk", 7, "--out", file).status == 0
        assert _items(file) == _items(tmp_path / "one.csv")


def _items(file: Path) -> list[tuple[str, str, str]]:
    with file.open() as rows:
        return [(row["who"], row["rank"], row["sku"]) for row in csv.DictReader(rows)]


def test_lists_leave_out_what_the_user_had(run: Path, table: Path, tmp_path: Path) -> None:
    with table.open() as rows:
        clicks = [(row["who"], row["sku"]) for row in csv.DictReader(rows)]
    before = {*clicks[: round(0.9 * len(clicks))]}
    (tmp_path / "some.csv").write_text("who\nu3\nu5\n")
    some = ["--input", tmp_path / "some.csv"]
    for options, left_out in (((), before), (("--exclude", "none"), set())):
        done = inside("predict", run, "--topk", 5, "--out", tmp_path / "c.csv", *some, *options, "--json")
        assert done.status == 0, done.err
        lists = _items(tmp_path / "c.csv")
        assert done.result["users"] == 2 and [who for who, *_ in lists] == ["u3"] * 5 + ["u5"] * 5
        assert not {(who, sku) for who, _, sku in lists} & left_out
    assert {(who, sku) for who, _, sku in lists} & before


def test_eval_ranks_and_says_what_it_leaves_out(run: Path) -> None:
    whole = inside("eval", run, "--topk", "5,20", "--json").result
    summary = json.loads((run / "summary.json").read_text())
    assert {name: whole[name] for name in summary["eval"]} == pytest.approx(summary["eval"], rel=1e-9)
    assert {"recall@5", "ndcg@5", "hit@5", "mrr@5", "map@5", "coverage@5"} <= set(whole)
    less = inside("eval", run, "--topk", "20", "--exclude", "train", "--json").result
    assert less["ndcg@20"] != whole["ndcg@20"]
    assert "recall@50" in inside("eval", run).out


def test_columns_that_no_side_names_are_left_out(table: Path, tmp_path: Path) -> None:
    """A log with further columns trains as it stands; a column that a side names is a feature, of any role."""
    with table.open() as rows, (tmp_path / "log.csv").open("w") as log:
        log.write("who,sku,when,rating,price,note\n")
        for place, row in enumerate(csv.DictReader(rows)):
            price = float(row["sku"]) / 7
            log.write(f"{row['who']},{row['sku']},{row['when']},{place % 5},{price},note {place}\n")
    pairs = ["train", "two_tower", f"data.from={tmp_path / 'log.csv'}", "data.user=who", "data.item=sku"]
    pairs += ["data.time=when", "train.epochs=1", "train.optimizer=adagrad", "--json"]
    for more, left_out, features, dense in (
        ((), "rating, price, note are", ["who", "sku"], []),
        (("model.item=sku,price", "model.user=who,rating"), "note is", ["who", "sku", "rating"], ["price"]),
    ):
        out = tmp_path / f"run{len(more)}"
        done = inside(*pairs, *more, "--out", out)
        assert done.status == 0, done.err
        assert f"{left_out} left out: model=two_tower takes who and sku" in done.err
        schema = json.loads(next((out / "data").glob("**/recjax.json")).read_text())["schema"]
        assert sorted(feature["name"] for feature in schema["features"]) == sorted(features)
        assert list(schema["dense"]) == dense
        assert inside("eval", out, "--topk", "5", "--json").result["users"] > 50
        assert inside("predict", out, "--topk", "2", "--out", tmp_path / f"{len(more)}.csv").status == 0


def test_a_softmax_over_all_items_is_learnt_on_any_mesh(command: list[Any], tmp_path: Path) -> None:
    losses = []
    for devices, plan in ((1, "data_parallel"), (3, "row_wise")):
        out = tmp_path / str(devices)
        words = ["model.loss=full_softmax", "model.loss.temperature=0.2", "train.epochs=2", f"plan={plan}"]
        done = inside(*command, *words, f"mesh.devices={devices}", "--out", out, "--json")
        assert done.status == 0, done.err
        assert done.result["eval"]["recall@20"] > 2 * done.result["popularity"]["recall@20"]
        losses.append([line["loss"] for line in lines_of(out, "train")])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


def test_a_loss_of_ones_own_trains_by_its_settings_on_any_mesh(table: Path, tmp_path: Path) -> None:
    """Whose values and gradients tests/models/test_batch_losses.py compares."""
    preset = Path(__file__).parents[1] / "models/hinge_preset.py"
    words = ["train", preset, f"data.from={table}", "data.user=who", "data.item=sku", "model.loss.margin=0.3"]
    words += ["train.epochs=2", "train.log_every=1", "compute_dtype=float64"]
    losses = []
    for devices in (1, 3):
        out = tmp_path / str(devices)
        assert inside(*words, f"mesh.devices={devices}", "--out", out).status == 0
        losses.append([line["loss"] for line in lines_of(out, "train")])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    result = inside("eval", tmp_path / "3", "--topk", "20", "--json").result
    assert result["recall@20"] > 1.5 * json.loads((tmp_path / "3/summary.json").read_text())["popularity"]["recall@20"]
    assert "model.loss.margin: 0.3 there" in inside(*words[:5], "--out", tmp_path / "3").err


MISTAKES = [
    (["train", "two_tower", "data.from={table}", "data.user=who"], "name the columns of both"),
    (["train", "two_tower", "data.from={table}", "data.user=who", "data.item=skew"], "has no column 'skew'"),
    (
        ["train", "two_tower", "data.from={table}", "data.user=who", "data.item=sku", "data.columns=when:dense"],
        "of neither side",
    ),
    (["train", "two_tower", "data.from={table}"], "Name their columns: data.user=COLUMN data.item=COLUMN"),
    (
        ["train", "two_tower", "data.from={gaps}", "data.user=who", "data.item=sku"],
        "row 5: column 'who' has no value, so the row is no pair of a user and an item. Leave out such rows: "
        "'data.where=who!='",
    ),
    (
        ["train", "two_tower", "data.from={gaps}", "data.user=who", "data.item=sku", "data.where=who!="],
        "row 3: column 'sku' has no value",
    ),
    (
        ["train", "two_tower", "data.from={table}", "data.user=who", "data.item=sku", "model.item=sku,genre"],
        "has no column 'genre'",
    ),
    (
        ["train", "two_tower", "data.from={wide}", "data.user=a", "data.item=one", "model.item=one,note"],
        "data.columns=auto,note:id",
    ),
    (["train", "two_tower", "data.from={wide}", "data.user=a", "data.item=one", "model.item=d,one"], "the first, d"),
    (
        [
            "train",
            "two_tower",
            "data.from={wide}",
            "data.user=a",
            "data.item=one",
            "model.item=one,b",
            "model.loss=bpr",
        ],
        "model.loss.negatives=0 of another loss",
    ),
    (
        ["train", "two_tower", "data.from={wide}", "data.user=a", "data.item=one", "model.item=one,b"]
        + ["model.loss.negatives=2"],
        "model.loss.negatives=2 draws items by their number, and model.item has b",
    ),
    (
        ["train", "two_tower", "data.from={wide}", "data.user=a", "data.item=one", "model.item=one,b"]
        + ["model.loss=full_softmax"],
        "model.loss=full_softmax takes all items by their number, and model.item has b",
    ),
    (["{train}", "model.loss=full_softmax", "mesh.devices=2", "plan=column_wise"], "sku is placed column_wise"),
    (["{train}", "model.loss=full_softmax", "plan=data_parallel_sparse"], "sku is placed data_parallel_sparse"),
    (["{train}", "model.loss=full_softmax", "tier.device_bytes=4KB", "plan=row_wise"], "tier.device_bytes"),
    (
        ["{train}", "model.loss=full_softmax", "mesh.devices=2", "mesh.replicas=2", "plan=row_wise"],
        "mesh.replicas=2 has the rows of sku once in each group",
    ),
    (["{train}", "model.loss=full_softmax", "model.loss.negatives=3"], "negatives"),
    (["train", "two_tower", "data.from={table}", "data.label=sku:number"], "nothing says which feature is the user"),
    (["train", "table", "data.from={ones}", "data.label=one"], "recjax train two_tower data.from=FILE"),
    (["{train}", "train.accumulate=2"], "train.accumulate=2 works on a batch in parts"),
    (["{train}", "mesh.devices=2", "mesh.replicas=2", "train.replica_sync=never"], "replica group tables of its own"),
    (["{train}", "model.loss.temperature=0"], "temperature is 0"),
    (["{train}", "embedding.tables.sku.ids=dynamic"], "must know all of them"),
    (["{train}", "model.loss.in_batch=false"], "there are no candidates"),
    (["{train}", "train.choose_by=logloss"], "'logloss' is not measured"),
    (["{train}", "model.item=sku,sku"], "both name|twice"),
    (["eval", "{run}", "--top", "20"], "--topk 20"),
    (["eval", "{run}", "--topk", "20", "--by", "sku"], "--by"),
    (["eval", "{run}", "--topk", "0"], "topk is 0"),
    (["eval", "{run}", "--topk", "20", "--exclude", "tests"], "'tests' is no split"),
    (["predict", "{run}", "--out", "{folder}/c.csv"], "give --input FILE"),
    (["predict", "{run}", "--topk", "0", "--out", "{folder}/c.csv"], "--topk 0"),
    (["predict", "{run}", "--topk", "3", "--out", "{folder}/c.txt"], "names no file of scores"),
    (["predict", "{run}", "--topk", "3", "--out", "{folder}/c.csv", "--input", "{ones}"], "has no column 'who'"),
    (["predict", "{run}", "--topk", "3", "--out", "{folder}/c.csv", "--input", "{new}"], "no row for the id 'nobody'"),
]


@pytest.mark.parametrize(("arguments", "text"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_answered_in_a_paragraph(
    arguments: list[str], text: str, table: Path, command: list[Any], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "ones.csv").write_text("a,one\n" + "1,1\n2,1\n" * 20)
    (tmp_path / "new.csv").write_text("who\nnobody\n")
    (tmp_path / "gaps.csv").write_text("who,sku\n" + "a,x\nb,y\na,\nb,x\n,y\n" * 20)
    wide = [f"{row % 3},{row % 7},{row % 2},{row / 7},only {row}\n" for row in range(200)]
    (tmp_path / "wide.csv").write_text("a,one,b,d,note\n" + "".join(wide))
    places = {
        "table": table,
        "run": run,
        "folder": tmp_path,
        "ones": tmp_path / "ones.csv",
        "new": tmp_path / "new.csv",
        "gaps": tmp_path / "gaps.csv",
        "wide": tmp_path / "wide.csv",
    }
    words: list[Any] = []
    for argument in arguments:
        words += command if argument == "{train}" else [argument.format(**places)]
    if words[0] == "train":
        words += ["--out", tmp_path / "run"]
    done = inside(*words)
    assert done.status in (2, 3), done.err
    lines = [line for line in done.err.splitlines() if "error: " in line]
    assert len(lines) == 1 and any(part in done.err for part in text.split("|")), done.err


def test_a_model_that_scores_pairs_ranks_no_items(tmp_path: Path) -> None:
    made = inside("train", "synthetic", "train.steps=2", "data.train_rows=200", "--out", tmp_path / "run")
    assert made.status == 0, made.err
    done = inside("eval", tmp_path / "run", "--topk", "20")
    assert done.status == 2 and "train model=two_tower or mf" in done.err
