"""`recjax bench`: what it prints, and that a peer computes the very same thing."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import commands

from recjax import kernels
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.lab.bench.peer import Peer
from recjax.lab.bench.report import to_text
from recjax.lab.bench.timing import Ours
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.train.build import build_trainer

pytestmark = pytest.mark.light_compile(as_text=True)

jax.devices()  # all that conftest.py asks for, before a config asks for fewer

CONFIG = RunConfig(
    data=ZipfStream(rows=(1000, 300, 7), ids_per_bag=(1, 5, 2), distinct_blocks=4, dense=3),
    model=DLRMConfig(bottom=(16, 8), top=(16, 1)),
    embedding=EmbeddingConfig(dim=8, optimizer=RowWiseAdagrad(0.05)),
    train=TrainConfig(batch_size=256, optimizer=DenseAdagrad(0.05)),
    mesh=MeshConfig(devices=1, platform="cpu"),
)
DCN = dataclasses.replace(CONFIG, model=DCNv2Config(bottom=(16, 8), cross_layers=2, rank=4, top=(16, 1)))

PRESET = """
from recjax.data.synthetic.stream import ZipfStream
from recjax.parallel.mesh import MeshConfig
from recjax.models.dlrm import DLRMConfig
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import TrainConfig

config = RunConfig(
    data=ZipfStream(rows=(1000, 300), ids_per_bag=(1, 5), distinct_blocks=4, dense=3),
    model=DLRMConfig(bottom=(16, 8), top=(16, 1)),
    embedding=EmbeddingConfig(dim=8),
    train=TrainConfig(batch_size=256),
    mesh=MeshConfig(devices=2, platform="cpu"),
    plan="row_wise",
)
"""

# A peer that answers in time, and wrongly.
LIAR = """#!/bin/sh
echo '{"about": {}}'
while read -r line; do echo '{"seconds": 1.0, "losses": [0.7, 0.7, 0.7, 0.7, 0.7]}'; done
"""


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "speed.py"
    path.write_text(PRESET)
    return path


@pytest.mark.full
def test_one_command_measures_the_step_and_its_parts(preset: Path, tmp_path: Path) -> None:
    with kernels.switched_off():  # whose products are not counted
        done = commands.inside("bench", preset, "--rounds", 2, "--steps", 3, "--profile", tmp_path / "traces", "--json")
    result = done.result
    assert list(result["speed"]) == ["recjax float32"]
    speed = result["speed"]["recjax float32"]
    assert len(speed["rounds"]) == 2 and 0 < speed["q1"] <= speed["median"] <= speed["q3"]
    assert result["setup"]["rows"] == 1300 and result["setup"]["devices"] == 2

    step = result["steps"]["float32"]
    assert step["step_ms"] == pytest.approx(256 / speed["median"] * 1e3)
    assert step["compilations"] >= 1
    profile = step["profile"]
    assert {"gather", "pool", "dense_forward", "dense_backward", "sparse_update", "idle"} <= profile["device_ms"].keys()
    assert profile["host_ms"]["place"] > 0 and profile["host_ms"]["route"] > 0
    assert sum(op["ms"] for op in profile["ops"]) <= sum(profile["device_ms"].values())
    exchanges = {w["phase"]: w for w in step["wire"] if w["kind"] == "all-to-all"}
    assert exchanges.keys() == {"id_exchange", "row_exchange", "grad_exchange"}
    for exchange in exchanges.values():
        assert 0 < exchange["useful_bytes"] <= exchange["padded_bytes"]
    # bottom 3-16-8, top (8 + 3)-16-1, three pairs of 8: forward once, backward twice, but for the input's gradient; the
    # interaction's gradient is a single product.
    b = 256 // 2
    layers = 2 * b * np.array([3 * 16, 16 * 8, 11 * 16, 16 * 1])
    interaction = 2 * b * 3 * 3 * 8
    assert step["matmul"]["flops"] == 3 * layers.sum() - layers[0] + 2 * interaction
    assert result["machine"]["copy_bytes_per_s"] > 0
    assert list((tmp_path / "traces" / "float32").rglob("*.xplane.pb"))

    text = to_text(result)  # without --json
    assert ", routing by the host" in text
    assert "recjax float32" in text and "dense_backward" in text and "row_exchange (all-to-all)" in text
    assert "hosts" not in text
    rows = next(w for w in step["wire"] if w["phase"] == "row_exchange")
    rows |= {"between": "hosts", "across_useful_bytes": 5000.0, "across_padded_bytes": 6000.0}
    lines = to_text(result).splitlines()
    assert any(line.startswith("row_exchange (all-to-all across hosts)") for line in lines)
    (total,) = (line for line in lines if line.startswith("all that leaves the host"))
    assert total.split()[-3:] == ["5,000", "6,000", "1.200"]


def test_what_cannot_be_compared_is_refused(preset: Path) -> None:
    for change, says in (
        ("embedding.optimizer=sgd", "row-wise Adagrad"),
        ("train.optimizer=adam", "dense part"),
        ("model=deepfm", "model=dlrm"),
        ("train.clip_norm=1", "clipping"),
        ("embedding.pooling=mean", "summed"),
    ):
        failed = commands.inside("bench", preset, "--against", "torch", change)
        assert failed.status == 2 and says in failed.err, change
    assert commands.inside("bench", preset, "--rounds", 0).status == 2


def test_a_missing_peer_says_what_to_install(preset: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"  # an interpreter without any package
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "import torch"\n')
    bare.chmod(0o755)
    failed = commands.inside("bench", preset, "--against", "torchrec", "--peer-python", bare)
    assert failed.status == 2 and ".[peers]" in failed.err and "--peer-python" in failed.err


def test_a_peer_that_computes_something_else_is_no_peer(preset: Path, tmp_path: Path) -> None:
    liar = tmp_path / "liar"
    liar.write_text(LIAR)
    liar.chmod(0o755)
    failed = commands.inside("bench", preset, "--against", "torch", "--peer-python", liar)
    assert failed.status == 1 and "do not compute the same" in failed.err


# RECJAX_PEER_PYTHON may name an interpreter that has the extra [peers], where this one has not.
PYTHON = os.environ.get("RECJAX_PEER_PYTHON", sys.executable)


def has(package: str) -> bool:
    return not subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True, check=False).returncode


@pytest.mark.parametrize("kind", ["torch", "torchrec"])
@pytest.mark.parametrize("config", [CONFIG, DCN], ids=["dlrm", "dcnv2"])
def test_the_peer_computes_the_same(kind: str, config: Any) -> None:
    if not has("fbgemm_gpu" if kind == "torchrec" else "torch"):
        pytest.skip("the extra [peers] is not installed")
    trainer = build_trainer(config)
    ours, state = Ours(trainer), trainer.init_state()
    with Peer(kind, trainer, state, PYTHON) as peer:
        state, mine = ours.round(state, 18, untimed=2)
        theirs = peer.round("float32", 18, untimed=2)
        assert theirs.losses == pytest.approx(mine.losses, rel=2e-5)
        assert mine.losses[0] != pytest.approx(mine.losses[16], rel=1e-3)  # the batch is the same, the weights are not
        assert np.isfinite(peer.round("bfloat16", 3, untimed=1).losses).all()  # and goes on
