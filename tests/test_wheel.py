"""The built wheel in a clean environment: it installs with what it needs, and does the README's own-table commands."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

pytestmark = pytest.mark.full
TOP = Path(__file__).parents[1]


def run(*command, **more):
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **more)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_the_own_table_commands_of_the_readme(tmp_path):
    built = tmp_path / "built"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", built, TOP)
    (wheel,) = built.glob("recjax-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "clean")
    bin = tmp_path / "clean" / "bin"
    run(bin / "python", "-m", "pip", "install", "-q", "-c", TOP / "constraints.txt", wheel)
    rng = np.random.default_rng(0)
    user = rng.integers(0, 30, 2000)
    columns = {"user": [f"u{u}" for u in user], "tags": ["|".join(f"t{t}" for t in range(1 + u % 4)) for u in user]}
    labels = (rng.random(2000) < 0.2 + 0.6 * (user % 2)).astype(int)
    pyarrow.csv.write_csv(pa.table(columns | {"clicked": labels}), tmp_path / "clicks.csv")
    pyarrow.csv.write_csv(pa.table(columns).slice(0, 50), tmp_path / "new.csv")
    block = re.search(r"```bash\n(recjax train table .*?)```", (TOP / "README.md").read_text(), re.DOTALL)
    assert block is not None
    lines = block[1].strip().splitlines()
    assert [line.split()[1] for line in lines] == ["train", "predict"]
    environment = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(tmp_path), "RECJAX_CACHE": str(tmp_path / "cache")}
    trained, _ = (run("bash", "-c", line, cwd=tmp_path, env=environment) for line in lines)
    assert "recjax, test, step" in trained.stdout and "the first step was done after" in trained.stdout
    scores = (tmp_path / "scores.csv").read_text().splitlines()
    assert scores[0] == "row,logit,probability,user" and len(scores) == 51
    shown = run(bin / "recjax", "show", "movietweetings", cwd=tmp_path, env=environment)
    assert "data=movietweetings" in shown.stdout or "movietweetings" in shown.stdout, "presets come with it"
