"""The built wheel in a clean environment: installing it, the README's own-table commands, and the notebooks.

These run as a hosted notebook would, by the line that they install with, and away from the source.
"""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    built = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", built, TOP)
    (wheel,) = built.glob("recjax-*.whl")
    return wheel


@pytest.fixture
def bin(tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "clean")
    return tmp_path / "clean" / "bin"


def install(bin, *packages):
    run(bin / "python", "-m", "pip", "install", "-q", "-c", TOP / "constraints.txt", *packages)


def test_the_own_table_commands_of_the_readme(tmp_path, wheel, bin):
    install(bin, wheel)
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


def test_the_notebooks(tmp_path, wheel, bin):
    """Installed are the extras and packages of their first cells, and what a hosted notebook brings itself."""
    notebooks = sorted((TOP / "notebooks").glob("*.ipynb"))
    first = [nbformat.read(path, as_version=4).cells[1].source for path in notebooks]
    lines = [re.search(r'%pip install -q "recjax(\[[a-z,]+\])? @ [^"]*"(.*)', text) for text in first]
    assert len(lines) == len(notebooks) >= 9 and all(lines)
    extras = "".join(line[1] or "" for line in lines).replace("][", ",")
    install(bin, f"{wheel}{extras}", *" ".join(line[2] for line in lines).split(), "ipykernel", "nbclient")
    program = (
        "import nbclient, nbformat, sys\nnbclient.NotebookClient(nbformat.read(sys.argv[1], 4), timeout=600).execute()"
    )
    environment = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(tmp_path), "RECJAX_CACHE": str(tmp_path / "cache")}
    for path in notebooks:
        (tmp_path / path.stem).mkdir()
        run(bin / "python", "-c", program, path, cwd=tmp_path / path.stem, env=environment)
