"""Which code makes up a model of one's own, and what of it counts."""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.config.code_identity import Source, difference, gather

CODE = '''"""A preset."""

import dataclasses

SCALE = 2.0  # of the logits


def scaled(x, *, by=SCALE):
    """Scales."""
    return f"{x * by:>{10}}"


class Model:
    """A model."""

    def __call__(self, config, x):
        return scaled(x) if config.steps else x


config = dataclasses.replace(Base(), steps=3)

if __name__ == "__main__":
    recjax.fit(config)
'''


def of(text, **others):
    files = {"mine.py": text.encode(), **{f"{name}.py": code.encode() for name, code in others.items()}}
    return Source("mine.py", files).hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # of the logits", "  # of all logits"),
        ('"""A preset."""\n', ""),
        ('    """A model."""\n\n', ""),
        ("Scales.", "Scales by a factor."),
        ("scaled(x) if config.steps else x", "(scaled( x )\n            if config.steps else x)"),
        ('f"{x * by:>{10}}"', "f'{x*by:>{10}}'"),
        ("steps=3)", "steps=4)"),
        ("config = ", "config: Base = "),
        ("recjax.fit(config)", "recjax.fit(config, 'runs/x')\n    draw()"),
        ("2.0", "2.00"),
        ("\n", "\r\n"),
    ],
)
def test_what_does_not_count(old, new):
    assert old in CODE
    assert of(CODE.replace(old, new)) == of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("SCALE = 2.0", "SCALE = 2"),
        ("config = ", "base = 1\nconfig = "),
        ("x * by", "x + by"),
        (":>{10}", ":<{10}"),
        (":>{10}", ":>{11}"),
        ("*, by", "by"),
        ("class Model:", "class Model(Base):"),
        ("class Model:", "@jit\nclass Model:"),
        ("import dataclasses", "import dataclasses as dataclasses"),
        ("else x", "else None"),
        ("else x", "else -x"),
    ],
)
def test_what_counts(old, new):
    assert old in CODE
    assert of(CODE.replace(old, new)) != of(CODE)


def test_a_name_that_other_code_reads_counts():
    """The value of `config` is compared as a config, unless the code itself looks at it."""
    for reader in ("def f():\n    return config.steps\n", "class A:\n    x = config.steps\n", "x = [config]\n"):
        assert of(f"config = 1\n{reader}") != of(f"config = 2\n{reader}")
    for other in ("def f(config):\n    return config.steps\n", "x = a.config\n", "config = config + 1\n"):
        assert of(f"config = 1\n{other}") == of(f"config = 2\n{other}")
    guard = 'if __name__ == "__main__":\n    SCALE = {}\n'
    assert of(guard.format(1) + "def f():\n    return SCALE\n") != of(guard.format(2) + "def f():\n    return SCALE\n")
    assert of(guard.format(1) + "else:\n    f()\n") != of(guard.format(2) + "else:\n    f()\n")


def test_helpers_count_in_full_and_by_name():
    assert of(CODE, a="config = 1\n") != of(CODE, a="config = 2\n")
    assert of(CODE, a="x = 1\n") != of(CODE, b="x = 1\n")
    assert of(CODE, a="x = 1 # one\n") == of(CODE, a="x = 1\n")
    assert Source("mine.py", {"mine.py": b"x = 1"}).hash == Source("yours.py", {"yours.py": b"x = 1"}).hash


def test_the_hash_is_the_same_in_every_version():
    """Of Python and of recjax, or finished runs would be refused after an update."""
    assert of(CODE) == "7086611528cc8ec6", sys.version


@given(st.integers(0, 2**32 - 1))
def test_blank_lines_and_comments_anywhere_between_statements(seed):
    chance, lines = random.Random(seed), []
    for line in CODE.splitlines():
        if chance.random() < 0.3:
            lines.append(chance.choice(["", "# a comment", "      # another"]))
        lines.append(line + chance.choice(["", "  ", "  # more"]) * (line[-1:] not in ("", '"')))
    assert of("\n".join(lines)) == of(CODE)


@pytest.mark.parametrize(
    "code",
    [b"def f(:\n", b"\0", b"\xff\xfe\xfa", b"# coding: nonsense\n", b"x = (" * 300, b"return 1\n", b"x = '\\d'\n", b""],
)
def test_any_bytes_have_a_hash(code):
    assert Source("m.py", {"m.py": code}).hash != Source("m.py", {"m.py": code + b"\ny = 2\n"}).hash


def test_a_long_expression():
    terms = " + ".join(["x"] * 900)
    assert of(f"y = {terms}") != of(f"y = {terms} + x")
    assert of(f"y = 0x{'f' * 9000}") != of(f"y = 0x{'e' * 9000}")


FILES = {
    "mine.py": "import jax, random, os.path, lone, pack.inner as i\nfrom pack2 import thing\ndef f(): import lazy\n",
    "lone.py": "from pack.deep.leaf import *\ntry:\n    import missing\nexcept ImportError:\n    pass\n",
    "random.py": "",
    "jax.py": "",
    "thing.py": "",
    "never.py": "",
    "missing.txt": "",
    "lazy.py": "import mine\n",
    "pack/__init__.py": "from . import sibling\nfrom .deep import *\n",
    "pack/inner.py": "from .. import beyond\nfrom ... import above\n",
    "pack/sibling.py": "",
    "pack/never.py": "",
    "beyond.py": "",
    "pack/deep/a.py": "",
    "pack/deep/leaf.py": "",
    "pack2/thing.py": "",
    "pack2/never.py": "",
    "pack2.py/x.txt": "",
}


def test_files_are_found_by_their_imports(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = {name for name in FILES if name.endswith(".py")}
    expected -= {"random.py", "jax.py", "thing.py", "never.py", "pack/never.py", "pack2/never.py"}
    source = gather(tmp_path, "mine.py")
    assert source.files.keys() == expected
    assert source.files["lone.py"] == FILES["lone.py"].encode()
    assert gather(tmp_path, "pack/inner.py", alone=True).files.keys() == {
        "pack/__init__.py",
        "pack/inner.py",
        "pack/sibling.py",
        "pack/deep/a.py",
        "pack/deep/leaf.py",
    }


def test_the_difference_is_cut_and_steers_no_terminal():
    then = Source("mine.py", {"mine.py": b"x = 1\n", "same.py": b"a = 1 # one\n", "gone.py": b"y = 1\n"})
    now = Source("other.py", {"other.py": b"x = '\x1b[31m'\n", "same.py": b"a = 1\n"})
    assert difference(then, now, "then", "now").splitlines() == [
        "--- then/mine.py",
        "+++ now/other.py",
        "@@ -1 +1 @@",
        "-x = 1",
        "+x = '?[31m'",
        "--- then/gone.py",
        "+++ now/gone.py",
        "@@ -1 +0,0 @@",
        "-y = 1",
    ]
    long = Source("mine.py", {"mine.py": b"".join(b"x = %d%s\n" % (i, b"0" * 300) for i in range(90))})
    lines = difference(then, long, "then", "now").splitlines()
    assert len(lines) == 25 and max(map(len, lines)) < 170 and lines[-1].startswith("... and 7")
