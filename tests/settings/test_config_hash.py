"""What a config's hash covers: equal for equal configs, everywhere and in later versions."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys

import pytest
from support.configs import Adam, Before, Cross, Dot, Inner, Root, changed

from recjax import settings


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_hash_is_the_documented_one() -> None:
    """By hand from the definition: what differs from the defaults, sorted, no spaces, ASCII."""
    assert settings.config_hash(Root()) == sha("{}")
    assert settings.config_hash(Cross()) == sha('{"kind":"cross"}')
    assert settings.config_hash(Cross(layers=4)) == sha('{"kind":"cross","layers":4}')
    assert settings.config_hash(Root(model=Dot(dim=4))) == sha('{"model":{"dim":4}}')
    assert settings.config_hash(Root(model=Cross(dim=16))) == sha('{"model":{"dim":16,"kind":"cross"}}')
    assert settings.config_hash(Root(teacher=Dot(), note="ü")) == sha('{"note":"\\u00fc","teacher":{"kind":"dot"}}')


@dataclasses.dataclass(frozen=True)
class LaterInner:
    rate: float = 0.1
    decay: float = 0.0  # new


@dataclasses.dataclass(frozen=True)
class Later:
    must: int
    inner: LaterInner = LaterInner(rate=0.5)
    choice: Dot | LaterInner | None = None
    also: Dot | Cross = Dot(dim=99)  # new, as are all fields inside it
    more: tuple[int, ...] = (1,)  # new


OLD_AND_NEW = [
    (Before(1), Later(1)),
    (Before(2, Inner(0.1), Inner()), Later(2, LaterInner(0.1), LaterInner())),
    (Before(3, choice=Dot(dim=3)), Later(3, choice=Dot(dim=3))),
]


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_a_new_field_changes_neither_hashes_nor_what_old_files_mean(old: Before, new: Later) -> None:
    assert settings.config_hash(old) == settings.config_hash(new)
    assert settings.from_json(Later, settings.to_json(old)) == new
    assert settings.config_hash(new) != settings.config_hash(dataclasses.replace(new, more=(1, 2)))
    assert settings.config_hash(new) != settings.config_hash(dataclasses.replace(new, also=Dot()))


def test_hash_of_a_nested_config_without_a_kind_differs_from_that_of_none() -> None:
    hashes = {
        settings.config_hash(c) for c in (Before(1), Before(1, choice=Inner()), Before(1, Inner()), Before(1, Inner(1)))
    }
    assert len(hashes) == 4


def test_hash_ignores() -> None:
    one, other = Root(), changed("train.steps=5", "train.shuffle=false", "name=other")
    assert settings.config_hash(one) != settings.config_hash(other)
    assert settings.config_hash(one, ["train"]) != settings.config_hash(other, ["train"])
    assert settings.config_hash(one, ["train", "name"]) == settings.config_hash(other, ["train", "name"])
    assert settings.config_hash(one, ["train.steps", "name"]) != settings.config_hash(other, ["train.steps", "name"])
    # A prefix of the letters only is not a prefix of the key.
    assert settings.config_hash(one, ["tra", "nam"]) != settings.config_hash(other, ["tra", "nam"])
    # The same number, written as an integer and as negative zero.
    assert settings.config_hash(Adam(rate=1)) == settings.config_hash(Adam(rate=1.0))
    assert settings.config_hash(Adam(rate=-0.0)) == settings.config_hash(Adam(rate=0.0))


def test_hash_is_the_same_in_another_process() -> None:
    program = (
        "import dataclasses\n"
        "from recjax.settings.overrides import config_hash\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class C:\n  x: float = 0.1\n  s: str = ''\n"
        "print(config_hash(C(s='ü')))\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert hashes == {hashlib.sha256(b'{"s":"\\u00fc"}').hexdigest()[:12]}
