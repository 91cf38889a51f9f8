"""Models on ml-100k, beside those of torch-rechub on the same rows, ids and splits.

    pip download --no-deps recbole==1.2.1
    python benchmarks/movielens_100k.py recbole-1.2.1-py3-none-any.whl [--seeds 3] [--peer-python PATH]

RecBole's wheel has the 100,000 ratings with the users' and items' columns; nothing of it is kept. A rating of 4 or more
is label 1; 80/10/10 by chance (seed 2026). Prints the test AUC of each seed and their mean, of the epoch that
validation chose. The peer runs in a Python that has torch and torch-rechub==0.9.0, in batches as large.
"""

import argparse
import csv
import dataclasses
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pyarrow as pa
from flax import nnx

import recjax
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdam, TrainConfig
from recjax.data.datasets.own_table import Table
from recjax.data.source import SPLITS, concatenate
from recjax.data.storage.blocks import open_prepared
from recjax.embedding.optim import Adam
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.deepfm import DeepFMConfig
from recjax.models.dlrm import DLRMConfig
from recjax.models.layers import FirstOrder, embedded
from recjax.models.wide_deep import WideDeepConfig
from recjax.parallel.mesh import MeshConfig

FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
IDS = ("user_id", "item_id", "age", "gender", "occupation", "zip_code", "release_year")


@dataclasses.dataclass(frozen=True)
class LogisticConfig:
    """Logistic regression: the first-order weights alone."""

    kind: ClassVar[str] = "logistic"
    first_order: ClassVar[bool] = True
    width: int = 0  # no setting of its own

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> "Logistic":
        """Makes the module."""
        return Logistic(dense, tuple(embedded(dims)), dtype)


class Logistic(nnx.Module):
    """logit = sum of the weights of all ids."""

    def __init__(self, dense: int, names: tuple[str, ...], dtype: Any) -> None:
        self.linear = FirstOrder(dense, names, dtype=dtype)

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b]."""
        return self.linear(dense_BxK, pooled)


@dataclasses.dataclass(frozen=True, repr=False)
class LogisticRun(RunConfig):
    """A run of it."""

    model: LogisticConfig = LogisticConfig()  # type: ignore[assignment]


MODELS: dict[str, Any] = {
    "logistic regression": None,
    "DLRM": DLRMConfig(bottom=(16,), top=(64, 32, 1)),
    "DCN-v2": DCNv2Config(bottom=(), rank=0, top=(64, 32, 1), structure="parallel"),
    "DeepFM": DeepFMConfig(deep=(64, 32, 1)),
    "Wide & Deep": WideDeepConfig(deep=(64, 32, 1)),
}


def read(wheel: Path) -> pa.Table:
    """The ratings with the columns of their users and items, and the split of each."""
    tables = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in ("inter", "user", "item"):
            text = archive.read(f"{FOLDER}.{name}").decode()
            rows = list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))
            tables[name] = [{key.partition(":")[0]: value for key, value in row.items()} for row in rows]
    users = {row["user_id"]: row for row in tables["user"]}
    items = {row["item_id"]: row for row in tables["item"]}
    joined = [row | users[row["user_id"]] | items[row["item_id"]] for row in tables["inter"]]
    columns: dict[str, Any] = {name: [row[name] for row in joined] for name in IDS}
    columns["class"] = [row["class"].split(" ") for row in joined]
    columns["rating"] = [float(row["rating"]) for row in joined]
    drawn = np.random.default_rng(2026).random(len(joined))
    columns["split"] = np.array(SPLITS)[np.searchsorted([0.8, 0.9], drawn, "right")].tolist()
    return pa.table(columns)


def config_of(name: str, data: Path, seed: int, rate: float) -> RunConfig:
    """The config of a model."""
    parts: dict[str, Any] = {
        "seed": seed,
        "data": Table(path=str(data)),
        "embedding": EmbeddingConfig(dim=16, pooling="mean", init_scale=0.01, optimizer=Adam(learning_rate=rate)),
        "train": TrainConfig(batch_size=2048, epochs=30, optimizer=DenseAdam(rate), patience=4),
        "mesh": MeshConfig(devices=1, platform="cpu"),
    }
    if MODELS[name] is None:
        return LogisticRun(**parts)
    return RunConfig(model=MODELS[name], **parts)


def export(data: Path, out: Path) -> None:
    """Writes ids, bags (filled up with 0) and labels of each split for the peer."""
    source = open_prepared(data)
    arrays: dict[str, np.ndarray] = {"rows": np.array([feature.rows for feature in source.schema.features])}
    for split in SPLITS:
        batch = concatenate([source.read(split, i) for i in range(len(source.row_counts(split)))])
        for feature in source.schema.features:
            bags = batch.bags[feature.name]
            if bags.lengths is None:
                arrays[f"{split}.{feature.name}"] = bags.ids[:, 0]
                continue
            padded = np.zeros((batch.size, 6), np.int64)
            padded[np.arange(6) < bags.lengths[:, None]] = bags.ids.ravel()
            arrays[f"{split}.{feature.name}"] = padded
        arrays[f"{split}.labels"] = batch.labels
    arrays["names"] = np.array([feature.name for feature in source.schema.features])
    np.savez(out, **arrays)  # type: ignore[arg-type]


PEER = """
import json, sys
import numpy as np, torch
from torch_rechub.basic.features import SequenceFeature, SparseFeature
from torch_rechub.models.ranking import DCNv2, DeepFM, WideDeep
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator
arrays, seeds, rate = np.load(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
def split(name):
    return {str(f): arrays[f"{name}.{f}"] for f in arrays["names"]}, arrays[f"{name}.labels"]
features = [
    (SequenceFeature(str(f), int(n), embed_dim=16, pooling="mean", padding_idx=0) if arrays[f"train.{f}"].ndim == 2
     else SparseFeature(str(f), int(n), embed_dim=16))
    for f, n in zip(arrays["names"], arrays["rows"])]
mlp = {"dims": [64, 32], "dropout": 0.0, "activation": "relu"}
makers = {
    "DCN-v2": lambda: DCNv2(features, 3, mlp, use_low_rank_mixture=False),
    "DeepFM": lambda: DeepFM(features, features, mlp),
    "Wide & Deep": lambda: WideDeep(features, features, mlp),
}
class Loader:
    # The same batches as a DataLoader's, without reading row by row.
    def __init__(self, x, y, shuffle): self.x, self.y, self.shuffle = x, y, shuffle
    def __len__(self): return -(-len(self.y) // 2048)
    def __iter__(self):
        order = torch.randperm(len(self.y)).numpy() if self.shuffle else np.arange(len(self.y))
        for at in range(0, len(order), 2048):
            rows = order[at : at + 2048]
            yield ({k: torch.as_tensor(v[rows].astype(np.int64)) for k, v in self.x.items()},
                   torch.as_tensor(self.y[rows]))
found = {}
for name, make in makers.items():
    for seed in range(seeds):
        torch.manual_seed(seed)
        trainer = CTRTrainer(make(), optimizer_params={"lr": rate, "weight_decay": 0.0}, n_epoch=30,
                             earlystop_patience=4, device="cpu", model_path="/tmp")
        train, validation, test = (Loader(*split(s), s == "train") for s in ("train", "validation", "test"))
        trainer.fit(train, validation)
        values = [trainer.evaluate(trainer.model, each) for each in (validation, test)]
        found.setdefault(name, []).append(values)
print("RESULT " + json.dumps(found))
"""


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of recbole 1.2.1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1e-3, 3e-3],
        help="learning rates, of which validation chooses one for each model",
    )
    parser.add_argument("--peer-python", help="a Python with torch and torch-rechub 0.9.0 (default: no peer)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        columns = ",".join([*(f"{name}:id" for name in IDS), "class:jagged"])
        data = folder / "data"
        made = recjax.prepare(read(options.wheel), "rating", data, threshold=4.0, columns=columns, split_column="split")
        print(made["rows"], flush=True)
        found: dict[str, dict[float, list[list[float]]]] = {}
        for name in MODELS:
            for rate in options.rates:
                for seed in range(options.seeds):
                    out = folder / f"{name}-{rate}-{seed}"
                    summary = recjax.fit(config_of(name, data, seed, rate), out)
                    lines = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
                    best = max(line["auc"] for line in lines if line["split"] == "validation")
                    found.setdefault(f"recjax, {name}", {}).setdefault(rate, []).append([best, summary["eval"]["auc"]])
                    print(name, rate, seed, best, summary["eval"]["auc"], file=sys.stderr, flush=True)
        if options.peer_python:
            export(data, folder / "peer.npz")
            for rate in options.rates:
                command = [options.peer_python, "-c", PEER, str(folder / "peer.npz"), str(options.seeds), str(rate)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                for name, values in json.loads(line.removeprefix("RESULT ")).items():
                    found.setdefault(f"torch-rechub, {name}", {})[rate] = values
    for name, by_rate in found.items():
        rate = max(by_rate, key=lambda rate: float(np.mean([validation for validation, _ in by_rate[rate]])))
        tests = [test for _, test in by_rate[rate]]
        print(f"{name:28} {np.mean(tests):.4f}   {', '.join(f'{test:.4f}' for test in tests)}   rate {rate}")


if __name__ == "__main__":
    main()
