"""Test AUC of exported models by the encoding of their tables' rows, and the bytes of these: a row of a table for each.

    python benchmarks/export_quality.py [PRESET a.b=value ...] [--seeds 0 1 2]

Each seed is trained once; every export is scored by its own loader, on the rows of the test split.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np

import recjax
from recjax.cli.main import main as command
from recjax.data.batch import Batch
from recjax.data.source import concatenate
from recjax.serving import loader
from recjax.train.metrics.auc import auc

ENCODINGS: tuple[Literal["none", "bfloat16", "int8", "int4"], ...] = ("none", "bfloat16", "int8", "int4")


def scores(folder: Path, batch: Batch) -> tuple[np.ndarray, int]:
    """Logits of an export, and the bytes of its tables."""
    model = loader.load(folder)
    given: dict[str, dict[str, np.ndarray]] = {"ids": {}, "lengths": {}, "weights": {}}
    for feature in model.signature["inputs"]["features"]:
        bags = batch.bags[feature["name"]]
        arrays = {"ids": bags.ids, "lengths": bags.lengths, "weights": bags.weights}
        fixed = (batch.size, -1) if feature["bag"] == "fixed" else (-1,)
        for kind in feature["arrays"]:
            given[kind][feature["name"]] = np.asarray(arrays[kind]).reshape(fixed if kind != "lengths" else (-1,))
    files = {entry["file"] for entry in model.manifest["tables"].values()}
    return model(**given, dense=batch.dense), sum((folder / file).stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="movietweetings")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    source = recjax.load(options.preset, options.overrides).data.open()
    test = concatenate([source.read("test", index) for index in range(len(source.row_counts("test")))])
    found: dict[str, list[float]] = {name: [] for name in ENCODINGS}
    sizes: dict[str, int] = dict.fromkeys(ENCODINGS, 0)
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            run = Path(folder) / f"run_{seed}"
            if command(["train", options.preset, f"seed={seed}", *options.overrides, "--out", str(run)]):
                sys.exit(f"{options.preset} seed={seed} failed")
            for encoding in ENCODINGS:
                out = Path(folder) / f"{encoding}_{seed}"
                recjax.export(run, out, quantize=encoding)
                logits, sizes[encoding] = scores(out, test)
                found[encoding].append(auc(test.labels, logits))
    print(f"| rows | {' | '.join(f'seed {seed}' for seed in options.seeds)} | mean | bytes of the tables |")
    for name, each in found.items():
        cells = [f"{of:.6f}" for of in (*each, statistics.mean(each))]
        print(f"| {name} | {' | '.join(cells)} | {sizes[name]:,} |", flush=True)


if __name__ == "__main__":
    main()
