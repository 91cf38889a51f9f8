"""Any order of edits, moves and runs: what runs is the code that the run was trained with, or nothing."""

import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import own_model
from support.code_of_run import claimed, load
from support.commands import contents

from recjax.config.presets import default_out
from recjax.errors import ConfigError
from recjax.train.run.folder import read_config

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]


class Researcher:
    """One who edits, moves, trains and evaluates, with a stand-in for the training."""

    def __init__(self, folder):
        self.base, self.out, self.place = folder, folder / "run", 0
        own_model.write(folder / "0")
        self.factor, self.sign, self.steps, self.bin = 1, "+", 2, None
        self.trained = None  # (factor, sign) of the run folder's weights
        self.recorded = None  # the place that its config.json names

    @property
    def code(self):
        return self.base / str(self.place)

    @property
    def file(self):
        return self.code / "mine.py"

    def replace(self, file, old, new):
        if self.bin is None and old != new:
            own_model.edit(self.code / file, old, new)

    def edit(self, to):
        self.replace("mine.py", f"FACTOR = {self.factor}.0", f"FACTOR = {to}.0")
        self.factor = to if self.bin is None else self.factor

    def edit_helper(self, to):
        sign = "+-"[to % 2]
        self.replace("head.py", f"{self.sign} bias", f"{sign} bias")
        self.sign = sign if self.bin is None else self.sign

    def comment(self, to):
        self.replace("mine.py", f"\nFACTOR = {self.factor}.0", f"\n# {to}\nFACTOR = {self.factor}.0")
        self.replace("head.py", "def logits", f"# {to}\n\ndef logits")

    def set(self, to):
        self.replace("mine.py", f"steps={self.steps}", f"steps={to + 2}")
        self.steps = to + 2 if self.bin is None else self.steps

    def move(self, to):
        if self.bin is None and to != self.place:
            os.rename(self.code, self.base / str(to))
            self.place = to

    def delete(self, _):
        if self.bin is None:
            self.bin = self.base / "bin"
            os.rename(self.code, self.bin)

    def restore(self, _):
        if self.bin is not None:
            os.rename(self.bin, self.code)
            self.bin = None

    def damage(self, _):
        copy = self.out / "source/head.py"
        if copy.exists():
            copy.write_text(copy.read_text().replace("bias\n", "bias * 5\n"))

    # What is looked at.

    def now(self):
        return None if self.bin is not None else (self.factor, self.sign)

    def behaviour(self, cls):
        """What a class's model does, by running it."""
        head = vars(sys.modules[cls.__module__])
        return int(head["FACTOR"]), "+" if head["logits"](np.ones((1, 1)), 1)[0] == 2 else "-"

    def train(self, _):
        if self.now() is None:
            with pytest.raises(ConfigError, match="there is no file"):
                load(self.file)
            return
        config = load(self.file)
        assert self.behaviour(type(config)) == self.now() and config.train.steps == self.steps
        if self.trained in (None, self.now()):
            claimed(config, self.out)
            self.trained, self.recorded = self.now(), self.place
            return
        changed = [name for name, i in (("mine.py", 0), ("head.py", 1)) if self.trained[i] != self.now()[i]]
        before = contents(self.out)
        with pytest.raises(ConfigError, match="holds a run of other code") as caught:
            claimed(config, self.out)
        intact = "bias * 5" not in (self.out / "source/head.py").read_text()
        assert not intact or f"code: {', '.join(changed)} changed" in str(caught.value)
        assert contents(self.out) == before

    def train_by_default(self, _):
        if self.now() is not None:
            config = load(self.file)
            out = claimed(config, self.base / default_out(config))
            assert self.behaviour(type(read_config(out, trust_code=True))) == self.now()

    def evaluate(self, to):
        trust = bool(to % 2)
        if self.trained is None:
            return
        original = self.trained if self.recorded == self.place and self.now() == self.trained else None
        intact = "bias * 5" not in (self.out / "source/head.py").read_text()
        if original or (trust and intact):
            assert self.behaviour(type(read_config(self.out, trust_code=trust))) == self.trained
            return
        with pytest.raises(ConfigError) as caught:
            read_config(self.out, trust_code=trust)
        if trust:
            assert "It is not run" in str(caught.value)
        elif self.recorded != self.place or self.now() is None:
            assert "no such file any more" in str(caught.value)
        else:
            assert "changed since" in str(caught.value) or "is now" in str(caught.value) or "was " in str(caught.value)


EVENTS = ("edit", "edit_helper", "comment", "set", "move", "delete", "restore", "damage")
LOOKS = ("train", "train_by_default", "evaluate")


@pytest.mark.full
@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(EVENTS + LOOKS * 2), st.integers(0, 3)), max_size=14))
def test_any_order_of_edits_and_runs(tmp_path_factory, events):
    researcher = Researcher(tmp_path_factory.mktemp("research"))
    for name, to in [("train", 0), *events, ("evaluate", 0), ("train", 0), ("evaluate", 1), ("evaluate", 0)]:
        getattr(researcher, name)(to)
