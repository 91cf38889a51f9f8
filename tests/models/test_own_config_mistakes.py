"""A config of one's own model that no run could use is refused with what it lacks, wherever it is named."""

import pytest
from support.commands import inside

PRESET = """
import dataclasses
from typing import ClassVar
from recjax.config.run import RunConfig

@dataclasses.dataclass(frozen=True)
class MyModel:
    kind: ClassVar[str] = "mine"
    width: int = 8

    def build(self, dense, dims, *, dtype, seed):
        raise ValueError("never called")

@dataclasses.dataclass(frozen=True)
class MyRun(RunConfig):
    model: MyModel = MyModel()

config = MyRun()
"""
DECORATOR = "@dataclasses.dataclass(frozen=True)\nclass MyModel"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('    kind: ClassVar[str] = "mine"\n', "", 'has no kind, .*kind: ClassVar[str] = "mine"'),
        ('"mine"', '"dlrm"', "MyModel.kind is 'dlrm', which is a model of recjax's own"),
        ("def build", "def biuld", "has no method build(self, dense, dims, *, dtype, seed)"),
        ("def build", "def biuld", "Did you mean biuld?"),
        (DECORATOR, "class MyModel", "is no dataclass. Put @dataclasses.dataclass(frozen=True) above it"),
    ],
)
@pytest.mark.parametrize("verb", ["show", "train"])
def test_what_it_lacks_is_said(tmp_path, before, after, words, verb):
    assert before in PRESET
    file = tmp_path / "mine.py"
    file.write_text(PRESET.replace(before, after))
    done = inside(verb, file)
    assert done.status == 2 and "Traceback" not in done.err
    assert "mine.py" in done.err
    for part in words.split(", .*"):
        assert part in done.err


def test_the_good_one_is_taken(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PRESET)
    assert inside("show", file).status == 0
