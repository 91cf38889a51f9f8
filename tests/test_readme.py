"""The README's contents name every section, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

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
