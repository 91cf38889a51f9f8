"""Wrote run.tar.xz and run.json, with recjax of commit edccaf0 on JAX 0.10.2: data, a plan, a run, and its numbers.

Later versions read them (tests/test_golden_run.py), so they stay as they are. The data are made up: see shop.py of that
commit's tests. In an empty folder: `JAX_PLATFORMS=cpu PYTHONPATH=COMMIT:COMMIT/tests python make_run.py`.
"""

import json
import shutil
import subprocess
from pathlib import Path

import jax
from support.commands import inside, lines_of
from support.shop import prepare_shop, rows

# In float64, so that the numbers of another mesh, another version of JAX and another machine agree closely.
SETTINGS = (
    "data=prepared",
    "data.path=data",
    "compute_dtype=float64",
    "model.bottom=8,4",
    "model.top=8,1",
    "embedding.dim=4",
    "embedding.optimizer.learning_rate=0.05",
    "embedding.tables.city.optimizer=adam",
    "embedding.tables.tags.optimizer=adagrad",
    "mesh.devices=2",
    "train.batch_size=64",
    "train.eval_every=3",
    "train.checkpoint_every=3",
    "train.log_every=1",
)
PLAN = ("plan=row_wise", "embedding.tables.city.placement=data_parallel", "embedding.tables.tags.placement=column_wise")
TRAIN = ("train", "synthetic", *SETTINGS, "plan=plan.json")

jax.config.update("jax_num_cpu_devices", 2)
prepare_shop(Path("data"))
assert inside("plan", "synthetic", *SETTINGS, *PLAN, "--save", "plan.json").status == 0
summary = inside(*TRAIN, "train.steps=6", "--out", "run", "--json").result
Path("run/curves.png").unlink()
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()[-100:]), encoding="utf-8")
subprocess.run(
    "tar --sort=name --owner=0 --group=0 --mtime=2026-01-01 -cJf run.tar.xz data plan.json rows.jsonl run".split(),
    check=True,
)

assert inside("predict", "run", "--input", "rows.jsonl", "--out", "scores.jsonl").status == 0
logits = [json.loads(line)["logit"] for line in Path("scores.jsonl").read_text().splitlines()]
shutil.copytree("run", "longer")
longer = inside(*TRAIN, "train.steps=10", "--out", "longer", "--json").result
losses = [line["loss"] for line in lines_of(Path("longer"), "train")]
expected = {"command": TRAIN, "eval": summary["eval"], "eval_step": summary["eval_step"], "logits": logits}
expected |= {"longer": {"losses": losses, "eval": longer["eval"], "eval_step": longer["eval_step"]}}
Path("run.json").write_text(json.dumps(expected) + "\n")
