"""Configuration of the documentation: `python -m sphinx -W -n docs docs/_build/html` (extra `docs`)."""

import html
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import generate
import inventories
from sphinx.ext.napoleon import GoogleDocstring

import recjax

project = "recjax"
author = "the recjax authors"
copyright = f"{author}, Apache-2.0"
version = release = recjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
intersphinx_mapping = inventories.write(
    HERE / "reference" / "_generated" / "inventories"
)  # files: no network is needed
exclude_patterns = ["_build", "reference/_generated/*"]
root_doc = "index"

# Notebooks are committed without outputs and are executed by tests; DOCS_EXECUTE=1 executes them here, for publishing.
nb_execution_mode = "cache" if os.environ.get("DOCS_EXECUTE") else "off"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True  # else each state of a progress line is a block of its own
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]
suppress_warnings = ["toc.empty_glob"]  # patterns are for pages that are still to come

default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_use_rtype = False  # "Returns: TEXT: more" has no type either
autodoc_typehints = "none"  # docstrings give shapes and dtypes, which say more
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as in the code: the value of os.environ, say, is nobody's business
autosummary_generate = True

html_theme = "sphinx_book_theme"
html_title = "recjax"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "navbar_persistent": [],
}
html_static_path = ["_static"]
html_css_files = ["recjax.css"]

# Else the docstring of a property is read as "TYPE: text", whatever stands before its first colon.
GoogleDocstring._parse_attribute_docstring = lambda self: list(self._consume_to_end())  # type: ignore[method-assign]


def _prepare(app: object) -> None:
    """Writes what is generated: the reference from the code, and copies of the notebooks where Sphinx can see them."""
    generate.write(HERE / "reference")
    copies = HERE / "getting_started" / "notebooks"
    copies.mkdir(exist_ok=True)
    for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
        copy = copies / notebook.name
        if not copy.exists() or copy.read_bytes() != notebook.read_bytes():
            shutil.copyfile(notebook, copy)


def _link_copies(app: object, page: str, text: list[str]) -> None:
    """Leads links to notebooks, which are right where Markdown is read in the repository, to their copies."""
    text[0] = text[0].replace("](../../notebooks/", "](notebooks/") if page == "getting_started/notebooks" else text[0]


_BETWEEN = re.compile(r"(?<=\w[/._=:,|])(?=\w)|(?<=[a-z])(?=[A-Z])")
CARDS = ("reference/config",)  # pages whose tables are a list of cards on a narrow screen
WHOLE = 14  # characters: code in a cell of a table that is not longer stays in one line


def breakable(page: str) -> str:
    """Lets code in the cells of tables break after signs and between words, and nowhere else; short code not at all."""

    def word(found: re.Match[str]) -> str:
        if len(html.unescape(found[1])) <= WHOLE:
            return f'<span class="pre whole">{found[1]}</span>'
        return f'<span class="pre">{_BETWEEN.sub("<wbr>", found[1])}</span>'

    def cell(found: re.Match[str]) -> str:
        return re.sub(r'<span class="pre">(.*?)</span>', word, found[0])

    return re.sub(r"<td.*?</td>", cell, page, flags=re.DOTALL)


def labelled(page: str) -> str:
    """Gives each cell of a table the heading of its column, which narrow screens show in the cell: see recjax.css."""

    def table(found: re.Match[str]) -> str:
        heads = [re.sub(r"<.*?>", "", head) for head in re.findall(r"<th\b.*?>(.*?)</th>", found[0], re.DOTALL)]

        def row(cells: re.Match[str]) -> str:
            column = iter(heads)
            return re.sub(r"<td\b", lambda _: f'<td data-label="{next(column, "")}"', cells[0])

        return re.sub(r"<tr\b.*?</tr>", row, found[0], flags=re.DOTALL).replace(
            '<table class="', '<table class="cards '
        )

    return re.sub(r"<table\b.*?</table>", table, page, flags=re.DOTALL)


def _change_tables(app: object, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    if "body" in context:
        body = breakable(context["body"])
        context["body"] = labelled(body) if page in CARDS else body


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", _change_tables)
    app.connect("builder-inited", _prepare)
    app.connect("source-read", _link_copies)
