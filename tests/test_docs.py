"""README.md and the pages of docs/: short enough, every link leads somewhere, and their longer examples work."""

import ast
import contextlib
import importlib.util
import io
import pydoc
import re

import pytest
from support.commands import inside, lines_of
from support.pages import DOCS, GENERATED, ROOT, anchors, examples, marked, pages, prose, text

from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, check_plan
from recjax.embedding.spec import TableSpec

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]

PLAN = "guides/placement.md"


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_bytes()) <= 7500


def leads_somewhere(link, page):
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return link.startswith("http") or (target.exists() and (not anchor or anchor in anchors(target)))


def test_links_lead_somewhere():
    links = [(page, link) for page in pages() for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    assert [(str(page), link) for page, link in links if not leads_somewhere(link, page)] == []
    assert len({page for page, _ in links}) > 50 and not leads_somewhere("index.md#nowhere", DOCS / "index.md")


def test_what_code_says_of_a_page_is_there():
    """Error messages, docstrings and comments name pages as docs/FOLDER/PAGE.md."""
    named = set()
    for folder in ("recjax", "configs", "launch", "notebooks", "tests", "benchmarks", ".ci"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".sh", ".ipynb", ".toml", ".md", ".sbatch"):
                named.update(re.findall(r"\bdocs/[a-z_0-9/]+\.md", file.read_text()))
    assert named and {name for name in named if not (ROOT / name).exists()} == set()


def test_files_of_the_repository_that_a_page_names_are_there():
    files = r"`((?:recjax|tests|benchmarks|configs|launch|notebooks|kernels|docs)/[\w./-]*)`"
    named = [(page.name, name) for page in pages() for name in re.findall(files, prose(page))]
    assert named and [pair for pair in named if not (ROOT / pair[1]).exists()] == []


def test_names_of_the_glossary_are_those_of_the_code():
    names = re.findall(r"\| `(recjax(?:\.\w+)+)` \|$", text("reference/glossary.md"), re.M)
    assert len(names) > 40
    for module, _, name in (name.rpartition(".") for name in names):
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        defined = {node.name for node in tree.body if hasattr(node, "name")}
        assert name in defined | {getattr(target, "id", "") for target in targets}, f"{module}.{name}"


def test_every_page_is_in_the_table_of_contents():
    """By name or by a pattern, so that the site has it; index.md itself is where they start."""
    index = (DOCS / "index.md").read_text()
    listed = {line for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for line in block.splitlines()}
    for page in pages()[1:]:
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert name == "index" or {name, f"{page.parent.name}/*"} & listed, name


def test_the_plan_that_splits_a_table_is_one():
    """With the tables of its preset, movietweetings."""
    rows = {"user": 7689, "movie": 9354, "genres": 24, "year": 77}
    tables = tuple(TableSpec(name, rows[name], 32, Sgd()) for name in rows)
    check_plan(Plan.from_json(marked(PLAN, "split-plan")), tables)


@pytest.mark.full
def test_the_module_of_ones_own_keeps_the_contract(tmp_path):
    """The two examples of a model, one file after the other; the second on two and on three devices."""
    code = marked("guides/own_model.md", "own-model") + marked("guides/own_model.md", "own-module")
    (tmp_path / "pair.py").write_text(code)
    small = ("data.validation_rows=300", "data.test_rows=300", "train.batch_size=512", "compute_dtype=float64")
    for devices in (2, 3):
        out = tmp_path / str(devices)
        done = inside(
            "train", tmp_path / "pair.py", *small, f"mesh.devices={devices}", "train.log_every=1", "--out", out
        )
        assert done.status == 0, done.err
    two, three = (lines_of(tmp_path / name, "train") for name in "23")
    assert [line["loss"] for line in three] == pytest.approx([line["loss"] for line in two], rel=1e-9)
    assert two[-1]["loss"] < two[0]["loss"] and {"label_0.loss", "label_1.loss"} < two[0].keys()


@pytest.mark.full
def test_the_loop_of_ones_own_learns(capsys):
    """As it is printed; the best AUC that its data allow is known."""
    block = marked("guides/own_loop.md", "own-loop")
    assert len(block.strip().splitlines()) <= 28
    exec(compile(block, "own_loop.md", "exec"), {"__name__": "__main__"})
    *losses, auc = capsys.readouterr().out.split("\n")[:-1]
    assert [line.split()[0] for line in losses] == ["20", "40", "60"]
    assert float(losses[-1].split()[1]) < float(losses[0].split()[1]) and 0.6 < float(auc) < 1


@pytest.mark.full
def test_the_model_of_a_user_of_torchrec_trains(tmp_path, monkeypatch, capsys):
    """Its labels are drawn by chance."""
    monkeypatch.chdir(tmp_path)
    exec(compile(marked("guides/from_torchrec.md", "from-torchrec"), "from_torchrec.md", "exec"), {"__name__": "page"})
    assert 0.3 < float(capsys.readouterr().out.split()[-1]) < 0.7


def test_messages_that_the_page_on_troubleshooting_names_are_those_of_the_code():
    """Each piece between dots, in the first cells of its tables, is part of a text in the code."""
    texts = [
        node.value
        for file in sorted((ROOT / "recjax").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    rows = [line for line in (DOCS / "guides/troubleshooting.md").read_text().splitlines() if line.startswith("| ")]
    quoted = [message for row in rows for message in re.findall("`([^`]+)`", row.split(" | ")[0])]
    pieces = [piece.strip(" .()") for message in quoted for piece in message.split("...")]
    assert len(quoted) > 15 and [p for p in pieces if not any(p in text for text in texts)] == []


@pytest.mark.parametrize(
    ("page", "mark"),
    [
        ("routing", "routing-example"),
        ("row_order", "row-order-example"),
        ("hierarchical_exchange", "hierarchical-example"),
    ],
)
def test_the_example_prints_what_the_page_shows(page, mark):
    block, printed = examples(f"explanation/{page}.md", mark)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, page, "exec"), {"__name__": "page"})
    assert out.getvalue() == printed


def of_docs(name):
    """A module of the folder docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_of_other_projects_are_theirs_and_are_used():
    names = [name for _, of_project in of_docs("inventories").PROJECTS.values() for name in of_project]
    texts = "".join(page.read_text() for page in pages())
    assert [name for name in names if pydoc.locate(name) is None] == []
    assert [name for name in names if f"}}`{name}`" not in texts] == []


def test_pages_made_from_the_code_are_up_to_date():
    """`python docs/generate.py` writes them."""
    page = of_docs("generate").page
    assert [file.name for file in GENERATED if file.read_text() != page(file.stem)] == []


def test_lines_of_prose_are_at_most_120_columns():
    """Tables, code and what cannot be broken, such as links and pictures, may be longer."""
    long = [(page.name, line) for page in pages() for line in prose(page).splitlines() if len(line) > 120]
    assert [pair for pair in long if " " in pair[1].strip() and not re.match(r" *\||\[?!?\[", pair[1])] == []


def test_options_in_the_texts_of_the_command_line_reference_are_code():
    """Else the site shows a dash in place of their two."""
    page = of_docs("generate").cli()
    assert "resume the run in `--out`" in page
    assert re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)) == []
