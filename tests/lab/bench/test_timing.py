"""Rounds of steps: the same training as `recjax train`, and its statistics."""

import itertools
import subprocess
import sys
import time

import jax
import pytest

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.lab.bench.machine_load import Others
from recjax.lab.bench.timing import Ours, spread
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.train.build import build_trainer

jax.devices()  # all that conftest.py asks for, before a config asks for fewer

CONFIG = RunConfig(
    data=ZipfStream(rows=(100, 30), distinct_blocks=4, dense=3),
    model=DLRMConfig(bottom=(8, 4), top=(8, 1)),
    embedding=EmbeddingConfig(dim=4),
    train=TrainConfig(batch_size=256),
    mesh=MeshConfig(devices=2, platform="cpu"),
)


def test_rounds_go_on_where_the_last_one_ended_and_repeat_no_batch() -> None:
    trainer = build_trainer(CONFIG)
    ours, state = Ours(trainer), trainer.init_state()
    state, first = ours.round(state, steps=3, untimed=2)
    state, second = ours.round(state, steps=2, untimed=1)
    assert int(state.step) == 6 + 4  # each round ends with a step that is not timed
    assert first.seconds > 0 and second.seconds > 0

    state, losses = trainer.init_state(), []
    for inputs in itertools.islice(trainer.train_inputs(), 9):
        state, metrics = trainer.train_step(state, inputs)
        losses.append(float(metrics["loss"]))
    assert [*first.losses, *second.losses] == losses[:5] + losses[6:9]


def test_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "rounds": [4, 1, 3, 2, 5]}


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_work_of_others_is_seen_and_ours_is_not() -> None:
    program = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        theirs, ours = Others([]), Others([child.pid])
        time.sleep(1)
        with_child, without = theirs.share(), ours.share()
        child.kill()
    waited_for = theirs.share()
    assert with_child is not None and without is not None and waited_for is not None
    assert with_child > max(without, waited_for)
