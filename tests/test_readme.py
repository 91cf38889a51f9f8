"""The README's contents name every section, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
from support.commands import inside, lines_of

from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, check_plan
from recjax.embedding.spec import TableSpec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return "#" + re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_the_contents_name_every_section_in_its_order():
    headings = re.findall(r"^## (.+)$", README, re.M)
    contents = README[README.index("**Contents.**") : README.index(f"## {headings[0]}")].partition("\n\n")[0]
    assert re.findall(r"\[([^\]]+)\]\((#[^)]+)\)", contents.replace("\n", " ")) == [(h, anchor(h)) for h in headings]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_links_lead_somewhere(link):
    if link.startswith("#"):
        assert link in [anchor(heading) for heading in re.findall(r"^#+ (.+)$", README, re.M)]
    elif not link.startswith("http"):
        assert (ROOT / link).exists()


def test_the_plan_that_splits_a_table_is_one():
    """With the tables of its preset, movietweetings."""
    (block,) = re.findall(r"<!-- split-plan -->\n```json\n(.*?)```\n<!-- /split-plan -->", README, re.S)
    rows = {"user": 7689, "movie": 9354, "genres": 24, "year": 77}
    check_plan(Plan.from_json(block), tuple(TableSpec(name, rows[name], 32, Sgd()) for name in rows))


@pytest.mark.full
def test_the_module_of_ones_own_keeps_the_contract(tmp_path):
    """The two examples of a model, one file after the other; the second on two and on three devices."""
    first = re.findall(r"```python\n(from __future__ import annotations\n.*?)```", README, re.S)[0]
    (second,) = re.findall(r"<!-- own-module -->\n```python\n(.*?)```\n<!-- /own-module -->", README, re.S)
    (tmp_path / "pair.py").write_text(first + second)
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
    (block,) = re.findall(r"<!-- own-loop -->\n```python\n(.*?)```\n<!-- /own-loop -->", README, re.S)
    assert len(block.strip().splitlines()) <= 28
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    *losses, auc = capsys.readouterr().out.split("\n")[:-1]
    assert [line.split()[0] for line in losses] == ["20", "40", "60"]
    assert float(losses[-1].split()[1]) < float(losses[0].split()[1]) and 0.6 < float(auc) < 1
