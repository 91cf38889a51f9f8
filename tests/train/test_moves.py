"""Whatever happens to a run between two commands, it ends with the numbers of an undisturbed one, or is refused."""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import paths as path_support
from support.commands import Done, prepare
from support.paths import measures, train

from recjax import main
from recjax.errors import RecjaxError
from recjax.train.checkpoint import manifest

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

STEPS = 3
NAMES = ("plain", "a[b]c", "back\\slash", " in and around ", "new\nline", "$HOME", "~", "-x", "Ü", "per%41cent", "a=b")


@dataclasses.dataclass
class World:
    """What a user has: a folder with a preset, data and a run, of relative paths."""

    root: Path
    preset: Path
    run: Path
    steps: int = 0  # of the last command
    data: str = "./data"
    settings: tuple[str, ...] = ()
    refusals: list[str] = dataclasses.field(default_factory=list)  # what a later command may say instead of going on

    def train(self, steps: int) -> Done:
        self.steps = max(steps, self.steps)
        return train(self.preset, self.data, self.steps, *self.settings, "--out", self.run)


class Killed(BaseException):
    """In the place of SIGKILL: nothing is tidied up."""


def train_on(world: World, name: str) -> None:
    done = world.train(world.steps + (world.steps < STEPS))
    assert done.status == 0 or said(done.err, world), done.err


def kill_in_a_save(world: World, name: str) -> None:
    def die(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed, RecjaxError):
        patch.setattr(manifest, "seal", die)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        world.train(STEPS)
    world.steps = STEPS


def leave_rests(world: World, name: str) -> None:
    if not (world.run / "config.json").exists():  # no killed run leaves a checkpoint without it
        return
    folder = world.run / "checkpoints" / ".unfinished-00000009-0123abcd" / "state"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.ocdbt").write_bytes(b"half")
    (world.run / ".config.json.unfinished-7").write_text("{")


def rename(world: World, name: str) -> None:
    target = world.root / "runs" / name
    if not target.exists() and world.run.exists():
        target.parent.mkdir(exist_ok=True)
        world.run.rename(target)
        world.run = target


def copy_elsewhere(world: World, name: str) -> None:
    target = world.root / "copies" / name
    if not target.exists() and world.run.exists():
        shutil.copytree(world.run, target)
        shutil.rmtree(world.run)
        world.run = target


def link(world: World, name: str) -> None:
    target = world.root / "links" / name
    if not os.path.lexists(target) and world.run.exists():
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(world.run)
        world.run = target / ".." / world.run.resolve().name  # the parent of where the link leads


def go_elsewhere(world: World, name: str) -> None:
    folder = world.root / "elsewhere" / name
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if not (world.run / "paths.json").exists():  # no command has seen the data yet
        world.refusals.append(
            r"no prepared data at .*/data: there is no such folder|the data of .* are not at .*/data\. "
        )


def move_data(world: World, name: str) -> None:
    target = world.root / "moved data" / name
    if (world.root / "data").exists() and not target.exists():
        target.parent.mkdir(exist_ok=True)
        (world.root / "data").rename(target)
        world.refusals.append(r"the data of .* are not at .*/data\. Give data\.path=DIR|no prepared data at .*/data")


def other_data(world: World, name: str) -> None:
    if (data := world.root / "data").exists():
        shutil.rmtree(data)
        prepare(data, lambda block: block.labels.fill(1))
        if world.run.exists():
            world.refusals.append("was trained on data with fingerprint [0-9a-f]+, but the data now have")


def other_settings(world: World, name: str) -> None:
    if any(world.run.glob("checkpoints/0*")):  # else nothing was saved, and they are those of a new run
        world.settings = ("seed=7",)
        world.refusals.append(r"holds a run of another config \(seed: 0 there, 7 here\)")


def damage(world: World, name: str) -> None:
    if files := sorted(p for p in world.run.glob("checkpoints/0*/state/**/d/*") if p.is_file()):
        content = bytearray(files[-1].read_bytes())
        content[len(content) // 2] ^= 1
        files[-1].write_bytes(content)
        world.refusals.append(r"none of the \d checkpoints in .* is intact: .* is altered: its sha256")


# To add one: a function of the world and of a name that it may use; where what it does may be refused, it says how.
EVENTS: tuple[Callable[[World, str], None], ...] = (
    train_on,
    kill_in_a_save,
    leave_rests,
    rename,
    copy_elsewhere,
    link,
    go_elsewhere,
    move_data,
    other_data,
    other_settings,
    damage,
)


def said(text: str, world: World) -> bool:
    """Whether a refusal names what has happened."""
    return any(re.search(words, text, re.DOTALL) for words in world.refusals)


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    with path_support.traced_once():
        yield


@pytest.fixture(scope="module")
def undisturbed(traced_once, preset, good, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    summary = train(preset, good, STEPS, "--out", out).result["eval"]
    return summary, measures(out, good, out / "scores.csv")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(NAMES)), min_size=1, max_size=5))
@example([(train_on, ""), (rename, "a[b]c"), (go_elsewhere, "~"), (train_on, "")])
@example([(train_on, ""), (kill_in_a_save, ""), (copy_elsewhere, "new\nline"), (leave_rests, "")])
@example([(train_on, ""), (train_on, ""), (damage, ""), (link, "-x")])
@example([(train_on, ""), (other_data, "")])
@example([(kill_in_a_save, ""), (other_settings, "")])
@example([(train_on, ""), (train_on, ""), (train_on, ""), (go_elsewhere, "plain"), (move_data, "Ü")])
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_ends_as_if_nothing_had_happened_or_is_refused(preset, good, undisturbed, tmp_path_factory, events):
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(good, root / "data")
    world = World(root, Path(shutil.copy(preset, root / "mine.py")), root / "run")
    before = Path.cwd()
    os.chdir(root)
    try:
        for event, name in events:
            event(world, name)
        done = world.train(STEPS)
        if done.status:
            assert said(done.err, world) and done.err.count("recjax: error: ") == 1, done.err
            assert "Traceback" not in done.err
        else:
            assert done.result["eval"] == undisturbed[0]
            assert measures(world.run, good, root / "scores.csv") == undisturbed[1]
        # However it came out: what evaluates, evaluates rightly.
        try:
            found = main.evaluate(world.run)
        except RecjaxError as error:
            assert said(str(error), world) or "is not a run folder" in str(error) or "no checkpoint yet" in str(error)
        else:
            assert found["step"] < STEPS or found["auc"] == undisturbed[0]["auc"]
    finally:
        os.chdir(before)
        shutil.rmtree(root)
