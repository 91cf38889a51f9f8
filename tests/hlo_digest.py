"""Does a change leave the compiled programs as they were? Compares those of this checkout with those of a commit.

    python tests/hlo_digest.py --against main

Both train eight small configs for a step: every placement, replica groups that average, two hosts. What they compile is
compared as `support/hlo_canonical.py` writes it, and a difference is shown. A digest depends on the processor and the
version of JAX, so it is never kept. Takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from support.hlo_canonical import Renamed, canonical

# Paths of arguments and results in the older commit that are called otherwise now: (regular expression, new text).
RENAMED: Renamed = ((r"\.value\b", "['value']"),)

PROGRAMS = ("train_step", "predict", "body")  # the last one averages replica groups

SMALL = tuple(
    """
    data.rows=300,50,200 data.ids_per_bag=1,0,3 data.weighted=false,true,false data.dense=3 data.train_rows=256
    data.validation_rows=64 data.test_rows=64 embedding.dim=8 model.bottom=16,8 model.top=16,1 train.batch_size=64
    train.eval_batch_size=64 train.steps=1 mesh.devices=4
    """.split()
)
CONFIGS = {
    "row_wise": ("plan=row_wise", "train.accumulate=2"),
    "table_wise": ("plan=table_wise", "train.clip_norm=1", "embedding.tables.sparse_1.optimizer=adam"),
    "column_wise": ("plan=column_wise", "embedding.optimizer=adagrad", "train.dense=sharded"),
    "data_parallel": ("plan=data_parallel", "train.bucket_mib=0.001"),
    "table_row_wise": ("plan=table_row_wise", "mesh.hosts=2"),
    "grid": ("plan=grid", "mesh.hosts=2", "train.routing=device"),
    "replicas": ("plan=row_wise", "mesh.replicas=2", "train.replica_sync=average", "train.average_every=1"),
    "hosts": ("plan=row_wise", "mesh.hosts=2", "embedding.dtype=bfloat16", "compute_dtype=bfloat16"),
}

# In a process of the checkout: one command after the other; after each, what it has compiled gets a folder.
_RUN = """
import json, os, sys
from recjax.cli.main import main

folder, configs = sys.argv[1], json.loads(sys.argv[2])
for name, settings in configs.items():
    status = main(["train", "synthetic", *settings, "--out", f"{folder}/run_{name}"])
    if status:
        sys.exit(f"{name}: exit status {status}")
    os.mkdir(f"{folder}/{name}")
    for file in os.scandir(f"{folder}/dump"):
        os.rename(file.path, f"{folder}/{name}/{file.name}")
"""

Programs = dict[tuple[str, str], dict[str, list[str]]]  # (config, program) -> digest -> lines


def programs(checkout: Path, configs: dict[str, tuple[str, ...]], renamed: Renamed = ()) -> Programs:
    """Returns what a checkout compiles for some configs; a program may be compiled for several sizes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "dump").mkdir()
        kinds = "|".join(PROGRAMS)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "RECJAX_"))}
        environment |= {
            "PYTHONPATH": str(checkout),
            "JAX_PLATFORMS": "cpu",
            "NPROC": "16",  # XLA compiles for so many threads
            "JAX_DUMP_IR_TO": str(folder / "dump"),
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
            "XLA_FLAGS": f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text --xla_dump_large_constants "
            f"--xla_dump_hlo_module_re=jit_({kinds})$",
        }

        settings = json.dumps({name: (*SMALL, *own) for name, own in configs.items()})
        done = subprocess.run(
            [sys.executable, "-c", _RUN, temporary, settings],
            env=environment,
            cwd=temporary,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{checkout}:\n{done.stderr[-3000:]}")
        found: Programs = {}
        for name in configs:
            for kind in PROGRAMS:
                # Both are numbered as they were compiled.
                hlos = sorted((folder / name).glob(f"module_*.jit_{kind}.*after_optimizations.txt"))
                irs = sorted((folder / name).glob(f"jax_ir*_jit_{kind}_compile.mlir"))
                assert len(hlos) == len(irs), (name, kind, len(hlos), len(irs))
                for hlo, ir in zip(hlos, irs, strict=True):
                    lines = canonical(hlo.read_text(), _results(ir.read_text()), renamed)
                    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
                    found.setdefault((name, kind), {})[digest] = lines
        return found


def _results(ir: str) -> list[str]:
    """Paths of the results, in order, of a program as JAX hands it to the compiler."""
    (main,) = (line for line in ir.splitlines() if "func.func public @main" in line)
    return [path.replace("\\22", '"') for path in re.findall(r'jax\.result_info = "((?:[^"\\]|\\.)*)"', main)]


def compare(old: Programs, new: Programs) -> list[str]:
    """Returns a paragraph for each difference."""
    different = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, {}), new.get(key, {})
        if before.keys() == after.keys():
            continue
        gone = next((lines for digest, lines in before.items() if digest not in after), [])
        come = next((lines for digest, lines in after.items() if digest not in before), [])
        diff = list(difflib.unified_diff(gone, come, "before", "after", lineterm="", n=1))
        different.append("\n".join([f"{key[0]}, {key[1]}: differs", *diff[:40], f"... {len(diff)} lines in all"]))
    return different


def main() -> int:
    """Prints the digests, and with --against the differences; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS), choices=CONFIGS, help="some of them only")
    options = parser.parse_args()
    configs = {name: CONFIGS[name] for name in options.configs}
    top = Path(__file__).resolve().parent.parent
    new = programs(top, configs)
    for (config, kind), digests in new.items():
        print(f"{config:15} {kind:10} {' '.join(digest[:12] for digest in digests)}")
    if not options.against:
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        git = ["git", "-C", str(top), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", temporary, options.against], check=True)
        try:
            old = programs(Path(temporary), configs, RENAMED)
        finally:
            subprocess.run([*git, "remove", "--force", temporary], check=True)
    different = compare(old, new)
    print("\n\n".join(different) or f"the same as {options.against}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
