"""The Criteo presets: the published shapes and recipes, and that each trains on a small file."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.commands import assert_refused, inside
from support.criteo import random_rows, text

from recjax.config import presets
from recjax.config.train import Constant, DenseAdagrad, DenseSgd, Polynomial
from recjax.data.datasets.criteo import Criteo1TB, CriteoKaggle
from recjax.data.prepare.ids import Frequency
from recjax.embedding.optim import Adagrad, Sgd

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs]

# D, optimizer of tables and of the dense part, batch, schedule; the dense part's parameters by hand:
# sum over layers of (inputs + 1) * outputs.
BOTTOM_128 = 14 * 512 + 513 * 256 + 257 * 128
TOP_1024 = 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "dlrm_criteo_kaggle": (
        16,
        Sgd(0.1),
        DenseSgd(0.1),
        128,
        Constant(),
        14 * 512 + 513 * 256 + 257 * 64 + 65 * 16 + (16 + 351 + 1) * 512 + 513 * 256 + 257,
    ),
    "dlrm_criteo_terabyte": (
        64,
        Sgd(0.1),
        DenseSgd(0.1),
        2048,
        Constant(),
        14 * 512 + 513 * 256 + 257 * 64 + (64 + 351 + 1) * 512 + 513 * 512 + 513 * 256 + 257,
    ),
    "dlrm_mlperf": (
        128,
        Sgd(18.0),
        DenseSgd(18.0),
        32_768,
        Polynomial(8000, 70_000, 30_000, power=2.0, end=0.0),
        BOTTOM_128 + (128 + 351 + 1) * 1024 + TOP_1024,
    ),
    "dcnv2_mlperf": (
        128,
        Adagrad(0.004, eps=1e-8, initial_accumulator=0.0),
        DenseAdagrad(0.004, eps=1e-8, initial_accumulator=0.0),
        65_536,
        Constant(),
        BOTTOM_128 + 3 * (2 * 3456 * 512 + 3456) + 3457 * 1024 + TOP_1024,
    ),
}
ALL = (*PUBLISHED, "dcnv2_criteo_kaggle")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_recipes(name):
    dim, tables, dense, batch_size, schedule, parameters = PUBLISHED[name]
    config = presets.load(name)
    assert (config.embedding.dim, config.embedding.optimizer) == (dim, tables)
    assert (config.train.optimizer, config.train.batch_size, config.train.schedule) == (dense, batch_size, schedule)
    dims = {f"C{i}": dim for i in range(1, 27)}
    model = nnx.eval_shape(lambda: config.model.build(13, dims, dtype=jnp.float32, seed=0))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters
    assert config.for_rows(4_195_197_692) is config
    assert config.for_rows(100_000).train.batch_size == 128


def test_their_data():
    assert presets.load("dlrm_criteo_kaggle").data == CriteoKaggle()
    assert presets.load("dcnv2_criteo_kaggle").data == CriteoKaggle()
    terabyte = Criteo1TB(subsample_negatives=0.875, ids=Frequency(10, modulo=10_000_000))
    assert presets.load("dlrm_criteo_terabyte").data == terabyte
    for name in ("dlrm_mlperf", "dcnv2_mlperf"):
        assert presets.load(name).data == Criteo1TB(ids=Frequency(1, modulo=40_000_000))


@pytest.mark.parametrize("name", ALL)
def test_without_data_the_error_has_the_command_that_prepares_them(name):
    done = inside("train", name)
    text = assert_refused(done, 3, "needs prepared data, and data.path names none")
    command = next(part for part in text.replace("\n", " ").split(": ") if part.startswith("recjax data prepare"))
    docstring = presets.preset_files.load_preset_module(presets.preset_files.find_preset(name))[1]
    (documented,) = [line for line in docstring.splitlines() if "recjax data prepare" in line]
    assert {w for w in command.split() if "=" in w} >= {
        w.replace("_000", "000") for w in documented.split() if "=" in w
    } - {"ids.min_count=10"}


def test_the_documented_plan_is_of_mlperfs_tables():
    docstring = presets.preset_files.load_preset_module(presets.preset_files.find_preset("dcnv2_mlperf"))[1]
    command = docstring.partition("    recjax plan")[2].partition("\n\n")[0]
    described = inside("plan", *command.split(), "--json").result
    tables = described["tables"].values()
    assert sum(t["rows"] for t in tables) == 204_184_588 and {t["dim"] for t in tables} == {128}
    assert sum(t["ids_per_step"] for t in tables) == 214 * 65_536
    slots = 2  # Adagrad keeps one number for each weight
    assert 97.3 < sum(described["bytes_per_device"]) / slots / 2**30 < 97.5


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Name of a preset -> prepared data of its options, from one small file."""
    folder = tmp_path_factory.mktemp("criteo")
    for name in ("train.txt", "day_0", "day_1"):
        (folder / name).write_bytes(text(random_rows(1400)))
    made: dict[str, str] = {}

    def prepare(name: str) -> str:
        data = presets.load(name).data
        assert isinstance(data, CriteoKaggle | Criteo1TB) and isinstance(data.ids, Frequency)
        options = [f"ids.min_count={data.ids.min_count}", f"ids.modulo={data.ids.modulo}"]
        if isinstance(data, Criteo1TB):
            options += ["days=0,1", f"subsample_negatives={data.subsample_negatives}"]
        key = " ".join([data.kind, *options])
        if key not in made:
            made[key] = str(folder / str(len(made)))
            done = inside("data", "prepare", data.kind, "--from", folder, "--out", made[key], *options)
            assert done.status == 0, done.err
        return made[key]

    return prepare


# Each model and each dataset is in one of those that are not wide.
FEW = ("dlrm_criteo_kaggle", "dcnv2_mlperf")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.wide) for name in ALL])
def test_they_train(name, prepared, tmp_path):
    """With narrow layers, for the widths are counted above. AUC says nothing here: the labels are random."""
    more = ["data.days=0,1"] if "kaggle" not in name else []
    more += ["model.rank=4"] if "dcnv2" in name else []
    more += [f"model.bottom=8-{presets.load(name).embedding.dim}", "model.top=8-1", "mesh.devices=1"]
    done = inside(
        "train",
        name,
        f"data.path={prepared(name)}",
        *more,
        "small.steps=20",
        "train.steps=3",
        "train.eval_batch_size=256",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert done.result["steps"] == 3
    assert "small.below_rows" in done.err
    assert 0.3 < done.result["eval"]["logloss"] < 2
