"""The pages of the documentation as tests read them: README.md and docs/, their links, headings and code blocks."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = tuple(DOCS / "reference" / f"{name}.md" for name in ("cli", "config", "presets"))  # by docs/generate.py


def pages() -> list[Path]:
    """README.md and all pages of docs/, those that are made from something else left out."""
    built = (DOCS / "_build", DOCS / "getting_started" / "notebooks", DOCS / "reference" / "_generated", *GENERATED)
    return [
        ROOT / "README.md",
        *(page for page in sorted(DOCS.rglob("*.md")) if not any(page.is_relative_to(folder) for folder in built)),
    ]


def text(name: str) -> str:
    """The text of one page of docs/, such as "guides/own_model.md"."""
    return (DOCS / name).read_text()


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What a link may name in a page after `#`, as GitHub and MyST make it of a heading."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def marked(name: str, mark: str) -> str:
    """The code block of a page between the comments `<!-- mark -->` and `<!-- /mark -->`."""
    (block,) = re.findall(rf"<!-- {mark} -->\n```\w+\n(.*?)```\n<!-- /{mark} -->", text(name), re.S)
    return str(block)


def examples(name: str, mark: str) -> tuple[str, str]:
    """A block of Python of a page and the text block after it, between such comments."""
    found = re.findall(
        rf"<!-- {mark} -->\n```python\n(.*?)```\n\n```text\n(.*?)```\n<!-- /{mark} -->", text(name), re.S
    )
    ((block, printed),) = found
    return block, printed


def code(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def shell_lines(page: Path) -> list[list[str]]:
    """The commands of a page as words, without comments: of `bash` blocks, and after `$ ` in blocks of output.

    Those that are joined by `&&` come one by one. A program of an environment (`.venv/bin/recjax`) is named without its
    folder.
    """
    lines = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        words = ["&&"]
        shell = block.replace("\\\n", " ").splitlines()
        if language != "bash":
            shell = [line[2:] for line in shell if line.startswith("$ ")]
        for line in shell:
            words += [*shlex.split(line, comments=True), "&&"]
        for more, part in itertools.groupby(words, key=lambda word: word != "&&"):
            if more:
                program, *arguments = part
                lines.append([re.sub(r"^[\w.]+/bin/", "", program), *arguments])
    return lines


def inline_commands(page: Path) -> list[list[str]]:
    """The commands `recjax ...` within the sentences of a page, as words, without mere names of verbs and options."""
    commands = re.findall(r"`(recjax [^`]+)`", prose(page).replace("\n", " "))
    part = r"\.\.\.|\[|--help|^recjax (eval|export|predict|train|plan|bench|serve) --|bench .*--serve"
    return [shlex.split(c) for c in commands if re.search(r"=| --", c) and not re.search(part, c)]
