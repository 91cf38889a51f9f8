"""The notebooks: committed without outputs, the same frame around each, and they run."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLACE = "__OWNER__/recjax"  # what docs/development/publish.md says to replace; no account on GitHub can have this name


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_quickstart",
        "02_sharded_lookup",
        "03_look_into_tables",
        "04_export_and_serve",
        "05_own_table",
        "06_compare_models",
        "07_own_module",
        "08_several_tasks",
        "09_retrain",
        "10_histories",
        "11_candidates",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert [cell.source for cell in code(notebook) if cell.outputs or cell.execution_count is not None] == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"} and notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_badge_install_plot_and_assert(path):
    notebook = read(path)
    first, install, *rest = (cell.source for cell in notebook.cells)
    assert first.startswith("# ")
    assert f"colab.research.google.com/github/{PLACE}/blob/main/notebooks/{path.name}" in first
    assert re.search(
        rf'if "google.colab" in sys.modules:\n    %pip install .*git\+https://github.com/{PLACE}"', install
    )
    assert "pip" not in "".join(rest)
    assert "plt.show()" in "".join(rest) and "assert" in rest[-1]
    places = re.findall(r"github(?:\.com)?/([^/]+/[^/\"]+)", first + install)
    assert len(places) == 2 and set(places) == {PLACE}
    assert PLACE in (ROOT / "docs/development/publish.md").read_text()


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    """In an empty folder, by a kernel of this Python and of this checkout; less than 60 s when nothing else runs."""
    from nbclient import NotebookClient

    monkeypatch.delenv("NPROC")  # recjax sets it itself
    notebook = read(path)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert "done: " in outputs[-1].text
