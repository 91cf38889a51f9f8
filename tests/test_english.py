"""Docstrings open with a verb or a noun phrase, as an index of an API shows them, without words of another register."""

import ast
import re
from pathlib import Path

from support.pages import DOCS, ROOT, pages, prose

# Openings that are no sentence alone: "What an optimizer keeps", "Whether it runs", "Of all samples", "As `fetch`".
OPENINGS = re.compile(r"(What|How|Whether|Of|Those|That|Where|When|Which|Who|Why|If|As|So)\b")
# Word -> the one to write. A place may be behind a thing, but not a time.
WORDS = {r"\banew\b": "again", r"\bfor ever\b": "forever", r"(?<!hide )(?<!hides )\bbehind\b(?! an? | one )": "after"}

FILES = [*sorted((ROOT / "recjax").rglob("*.py")), *sorted((ROOT / "configs").glob("*.py"))]


def docstrings(file: Path) -> list[tuple[int, str]]:
    """Line and text of every docstring of a file."""
    tree = ast.parse(file.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]


def texts(file: Path) -> list[tuple[int, str]]:
    """Line and text of every string of a file: docstrings, and what users read."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return [(n.lineno, n.value) for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def found(text: str) -> list[str]:
    return [f"write {instead!r} for {word}" for word, instead in WORDS.items() if re.search(word, text, re.I)]


def test_docstrings_open_with_a_verb_or_a_noun():
    wrong = [
        (file.name, n, text.split("\n")[0]) for file in FILES for n, text in docstrings(file) if OPENINGS.match(text)
    ]
    assert wrong == []


def test_strings_of_the_code_have_no_word_of_the_list():
    assert [(file.name, n, why) for file in FILES for n, text in texts(file) for why in found(text)] == []


def test_pages_and_launch_scripts_have_no_word_of_the_list():
    texts = {page.name: prose(page) for page in pages() if page.parent != DOCS / "development"}
    texts |= {file.name: file.read_text() for file in (ROOT / "launch").rglob("*") if file.is_file()}
    assert [(name, why) for name, text in texts.items() for why in found(text)] == []


def test_the_rules_catch_what_they_are_for():
    assert all(OPENINGS.match(text) for text in ("What it is.", "Of all samples.", "Whether it runs.", "As `fetch`."))
    assert not any(OPENINGS.match(text) for text in ("Whatever.", "Returns whether it runs.", "Ofttimes."))
    assert len(found("It stands behind it, and starts anew, for ever.")) == 3
    assert found("Nothing to hide behind, nodes behind one switch.") == []
