"""Search with pruning against random values: how good is the best trial, and how many steps did all of them train?

    python benchmarks/search.py --out DIR [--minutes M] [--trials 30] [--random 100]

Two studies of movietweetings over learning rates, embedding dimension and batch size, by validation AUC: so many
trials by TPE that gives trials up, and so many random ones without. 30 are to come within 0.0005 of the best of 100
random ones in fewer than half the steps. Each study is resumable: give the same command again, after --minutes or
after anything went wrong; a figure counts once both are complete. An hour or so on two quiet cores.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SEARCH = """preset = "movietweetings"
overrides = ["train.epochs=3", "train.eval_every=50", "train.patience=0", "mesh.devices=1"]
trials = {trials}
sampler = "{sampler}"
pruner = "{pruner}"
warmup = 80_000
seed = {seed}
sort = "validation.auc"

[search]
"embedding.optimizer.learning_rate" = {{low = 0.001, high = 1.0, log = true}}
"train.optimizer.learning_rate" = {{low = 0.001, high = 1.0, log = true}}
"embedding.dim" = [8, 16, 32]
"train.batch_size" = [256, 512, 1024]
"""


def study(folder: Path, name: str, trials: int, sampler: str, pruner: str, seed: int, deadline: float) -> None:
    """Goes on with a study until it is complete or the time is over; then it is stopped, with a checkpoint."""
    file = folder / f"{name}.toml"
    file.write_text(SEARCH.format(trials=trials, sampler=sampler, pruner=pruner, seed=seed))
    command = [sys.executable, "-m", "recjax", "tune", str(file), "--out", str(folder / name)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait()
        subprocess.run([*command, "--results"], stdout=subprocess.DEVNULL, check=True)


def found(folder: Path, name: str) -> dict[str, Any]:
    """Trials that have ended, the best validation AUC of any at any evaluation, and the steps of all."""
    trials = sorted((folder / name).glob("trial-*/metrics.jsonl"))
    ended, best, steps = 0, float("nan"), 0
    results = folder / name / "results.jsonl"
    if results.exists():
        ended = sum(json.loads(line)["status"] in ("done", "pruned") for line in results.read_text().splitlines())
    for file in trials:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps += max((line["step"] for line in lines if line["split"] == "train"), default=0)
        aucs = [line["auc"] for line in lines if line["split"] == "validation"]
        best = max([best, *aucs]) if best == best else max(aucs, default=best)
    return {"trials": ended, "best": best, "steps": steps}


def main() -> None:
    """Searches and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of both studies; give it again to go on")
    parser.add_argument("--minutes", type=float, default=600, help="that this call may take")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    study(options.out, "tpe", options.trials, "tpe", "quartile", options.seed, deadline)
    if time.monotonic() < deadline - 1:
        study(options.out, "random", options.random, "random", "none", options.seed, deadline)
    both = {name: found(options.out, name) for name in ("tpe", "random")}
    for name, of in both.items():
        print(f"{name:8} {of['trials']:4} trials ended  best validation AUC {of['best']:.5f}  {of['steps']:,} steps")
    complete = both["tpe"]["trials"] >= options.trials and both["random"]["trials"] >= options.random
    if complete:
        apart, share = both["random"]["best"] - both["tpe"]["best"], both["tpe"]["steps"] / both["random"]["steps"]
        print(f"the best of the search is {apart:.5f} below that of random values, in {share:.2f} of the steps")
    else:
        print("not complete: give the same command again to go on")


if __name__ == "__main__":
    main()
