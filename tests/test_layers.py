"""Imports flow one way: from a package to layers below its own, in no circle of files; the package's root is small."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import house

import recjax

PACKAGE = Path(recjax.__file__).parent

# From the bottom to the top. Packages of one layer do not import each other.
LAYERS = (
    ("errors",),
    ("utils",),
    ("kernels",),
    ("gpu_kernels",),
    ("settings",),
    ("parallel",),
    ("data",),
    ("embedding",),
    ("tiers",),
    ("models",),
    ("config",),
    ("planning",),
    ("train",),
    ("serving", "interop", "sweep"),
    ("main",),
    ("__init__",),
    ("cli",),
    ("lab",),
    ("__main__",),
)
# The same within the lab.
LAB_LAYERS = (
    ("__init__",),
    ("variants",),
    ("formats",),
    ("simulate", "replay"),
    ("bench",),
    ("predict",),
    ("calibrate",),
    ("trace",),
    ("studies",),
    ("verbs",),
)

Edge = tuple[str, str]


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module below `root` by its dotted name, without the package's own: "train.step"."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str, tree: ast.Module) -> set[Edge]:
    """(importer, imported) of all imports of recjax's own modules, also of those within functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(name, alias.name) for alias in node.names if alias.name.partition(".")[0] == "recjax"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "recjax":
            found |= {(name, f"{node.module}.{alias.name}") for alias in node.names}
    return {(importer, imported.removeprefix("recjax.")) for importer, imported in found}


def upward(edges: set[Edge], layers: tuple[tuple[str, ...], ...] = LAYERS) -> list[str]:
    """The imports that do not lead to a lower layer."""
    layer = {name: number for number, names in enumerate(layers) for name in names}
    wrong = []
    for importer, imported in sorted(edges):
        above, below = importer.partition(".")[0], imported.partition(".")[0]
        below = below if below in layer else "__init__"
        if above != below and layer[below] >= layer[above]:
            wrong.append(f"{importer} imports {imported}")
    return wrong


def within_lab(edges: set[Edge]) -> set[Edge]:
    """The imports of the lab's modules by each other, by their names below the lab."""
    inside = [edge for edge in edges if all(name.startswith("lab.") for name in edge)]
    return {(importer.removeprefix("lab."), imported.removeprefix("lab.")) for importer, imported in inside}


def circles(edges: set[Edge], files: set[str]) -> list[set[str]]:
    """The largest sets of files that reach each other by imports; one file alone is none."""
    below: dict[str, set[str]] = {name: set() for name in files}
    for importer, imported in edges:
        file = imported if imported in files else imported.rpartition(".")[0]  # a module, or a name of one
        below[importer].add(file if file in files else "__init__")
    return house.circles(below)


FILES = {name for name, _ in modules(PACKAGE)}
EDGES = set(itertools.chain.from_iterable(imports(name, tree) for name, tree in modules(PACKAGE)))


def test_every_package_has_a_layer():
    assert {name.partition(".")[0] for name, _ in modules(PACKAGE)} == set(itertools.chain(*LAYERS))
    assert {name.partition(".")[0] for name, _ in modules(PACKAGE / "lab")} == set(itertools.chain(*LAB_LAYERS))


def test_imports_lead_downward():
    assert len(EDGES) > 500
    assert upward(EDGES) == []
    inside = within_lab(EDGES)
    assert len(inside) > 100
    assert upward(inside, LAB_LAYERS) == []


def test_the_trainer_names_the_lab_in_one_file_alone():
    named = {
        name
        for name, tree in modules(PACKAGE)
        if not name.startswith("lab")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("recjax.lab")
    }
    assert named == {"cli.lab"}


@pytest.mark.parametrize(
    "edge",
    [
        ("data.batch", "train.step.Inputs"),
        ("train.preflight", "lab.replay.microbenchmark.sweep"),
        ("utils.files", "settings"),
        ("embedding.plan", "fit"),
    ],
)
def test_an_import_that_leads_upward_or_sideways_is_found(edge: Edge):
    assert upward({*EDGES, edge}) == [f"{edge[0]} imports {edge[1]}"]


def test_files_import_each_other_in_no_circle():
    assert circles(EDGES, FILES) == []


def test_a_circle_of_files_is_found():
    assert {"data.batch", "data.source"} <= set().union(
        *circles({*EDGES, ("data.batch", "data.source.between")}, FILES)
    )
    assert {"__init__", "main"} in circles({*EDGES, ("main", "load")}, FILES)


def test_the_root_of_the_package_holds_five_modules_at_most():
    found = {path.stem for path in PACKAGE.glob("*.py")}
    assert found == {"__init__", "__main__", "errors", "kernels", "main"}


def test_contributing_names_the_layers():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    (chain,) = re.findall(r"`(errors →[^`]*)`", text)
    named = [tuple(layer.split(", ")) for layer in " ".join(chain.split()).split(" → ")]
    assert named == [names for names in LAYERS if not names[0].startswith("__")]
