"""`train.products`: who computes the products of a run's dense layers, what a run keeps of that, what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx
from support.commands import SMALL, assert_refused, inside, lines_of, write_preset
from support.products import times, write_table

import recjax
from recjax import kernels
from recjax.errors import ConfigError
from recjax.models.dense import LayerShape, onednn_there
from recjax.models.layers import Linear
from recjax.train.build import build_trainer
from recjax.train.products import layer_shapes, set_products

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

BY_TABLE = "by table: 8 of 12 by kernels, the others by XLA"  # four layers, of different sizes
MIXED = times(into_input={"kernels": 20.0, "xla": 10.0})
SYNTHETIC = ("synthetic", "mesh.devices=2", "data.train_rows=4096", "train.batch_size=99", "train.accumulate=4")


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return write_preset(tmp_path_factory.mktemp("preset"))


def losses(run):
    return [line["loss"] for line in lines_of(run, "train")]


def test_the_sizes_of_layers_are_those_of_a_part_of_a_devices_samples():
    trainer = build_trainer(recjax.load(*SYNTHETIC, "compute_dtype=bfloat16"), weights=False)
    found = layer_shapes(trainer.model, trainer.config, 2)
    assert {shape.rows for shape in found} == {13}  # 99 samples over two devices are 50 at most, in four parts 13
    assert found[-1].columns == 1 and found[-1].dtype == "float32" and found[0].dtype == "bfloat16"  # logits


@pytest.mark.parametrize("choice", ["auto", "xla", "table"])
def test_layers_are_told_who_computes_their_products(choice, tmp_path):
    asked = write_table(tmp_path / "table.json", MIXED) if choice == "table" else choice
    trainer = build_trainer(recjax.load(*SYNTHETIC, f"train.products={asked}"), weights=False)
    told = {module.products for _, module in nnx.iter_graph(trainer.model) if isinstance(module, Linear)}
    assert told == {trainer.products}
    shape = LayerShape(13, 64, 32, "float32")
    expected = {"auto": None, "xla": ("xla", "xla", "xla"), "table": ("kernels", "xla", "kernels")}[choice]
    ways = None if trainer.products is None else trainer.products.of(shape)
    assert expected == (None if ways is None else (ways.forward, ways.into_input, ways.into_kernel))


@pytest.mark.full
def test_every_choice_gives_the_numbers_of_float64(preset, tmp_path):
    """Losses of six steps, against a run in float64, whose products are always XLA's."""
    shortly = ("train.steps=6", "mesh.devices=2")
    inside("train", preset, *shortly, "compute_dtype=float64", "--out", tmp_path / "truth")
    truth = losses(tmp_path / "truth")
    assert len(truth) == 6
    choices = ["auto", "xla", str(write_table(tmp_path / "table.json", MIXED))]
    choices += ["kernels"] * kernels.installed() + ["onednn"] * onednn_there()
    for number, choice in enumerate(choices):
        run = tmp_path / str(number)
        found = inside("train", preset, *shortly, f"train.products={choice}", "--out", run, "--json").result
        assert losses(run) == pytest.approx(truth, rel=1e-5), choice
        usual = "kernels" if kernels.installed() else "XLA"
        words = {"auto": usual, "kernels": usual, "xla": "XLA", "onednn": "oneDNN"}.get(choice, BY_TABLE)
        assert found["products"] == words


@pytest.mark.full
def test_a_run_goes_on_with_what_it_chose_whatever_has_become_of_the_table(preset, tmp_path):
    table, run = write_table(tmp_path / "table.json", MIXED), tmp_path / "run"
    asked = ("mesh.devices=2", "train.checkpoint_every=2", f"train.products={table}")
    whole = inside("train", preset, *asked, "train.steps=6", "--out", tmp_path / "whole", "--json").result
    assert inside("train", preset, *asked, "train.steps=2", "--out", run, "--json").result["products"] == BY_TABLE
    kept = (run / "products.json").read_text()
    write_table(table, times(default={"kernels": 20.0, "xla": 10.0}))  # from now on it would choose XLA
    resumed = inside("train", preset, *asked, "train.steps=4", "--out", run, "--json").result
    assert resumed["products"] == BY_TABLE and resumed["steps"] == 4
    table.unlink()
    resumed = inside("train", preset, *asked, "train.steps=6", "--out", run, "--json").result
    assert (run / "products.json").read_text() == kept
    assert losses(run) == losses(tmp_path / "whole")  # to the bit
    assert resumed["eval"] == whole["eval"]
    assert inside("eval", run, "--json").result["logloss"] == whole["eval"]["logloss"]
    # Whoever asks for something else gets that.
    other = inside("train", preset, *asked[:2], "train.products=xla", "train.steps=8", "--out", run, "--json").result
    assert other["products"] == "XLA"


@pytest.mark.full
def test_a_run_of_another_machine_goes_on_with_a_remark_and_a_damaged_choice_is_refused(preset, tmp_path):
    run = tmp_path / "run"
    asked = (*SMALL[1:], f"train.products={write_table(tmp_path / 'table.json', MIXED)}", "--out", run)
    inside("train", preset, "train.steps=2", *asked)
    kept = run / "products.json"
    chosen = json.loads(kept.read_text())
    chosen["machine"]["cpu"] = "another"
    kept.write_text(json.dumps(chosen | {"onednn": True}))
    done = inside("train", preset, "train.steps=3", *asked)
    assert done.status == 0, done.err
    assert "was chosen on another machine (cpu: another there, " in done.err
    for damaged in ("{", json.dumps(chosen | {"layers": [{}]})):
        kept.write_text(damaged)
        assert_refused(inside("train", preset, "train.steps=4", *asked), 2, r"products\.json")


def test_a_table_of_another_machine_is_refused(preset, tmp_path):
    table = write_table(tmp_path / "table.json", MIXED, cpu="another", jax="9.9")
    done = inside("train", preset, *SMALL, f"train.products={table}", "--out", tmp_path / "run")
    assert_refused(done, 2, r"was measured on another machine \(cpu: another there, .*; jax: 9.9 there, .* here\)")
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["train.products=kernls"], "train.products is none of auto, kernels, xla, onednn, but a file"),
        (["train.products=kernels", "compute_dtype=float64"], "train.products=kernels, but the kernels are"),
        pytest.param(
            ["train.products=onednn"],
            "does not call oneDNN for a product",
            marks=pytest.mark.skipif(onednn_there(), reason="this JAX has it"),
        ),
        pytest.param(
            ["train.products=kernels"],
            r"the kernels are not installed, or off\. Install them",
            marks=pytest.mark.skipif(kernels.installed(), reason="they are installed"),
        ),
    ],
)
def test_what_is_not_to_be_had_is_refused(settings, why, preset, tmp_path):
    assert_refused(inside("train", preset, *SMALL, *settings, "--out", tmp_path / "run"), 2, why)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_multiply_as_they_always_do(platform, tmp_path):
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    for choice in ("auto", "xla"):
        assert set_products(nnx.Module(), recjax.load(*SYNTHETIC, f"train.products={choice}"), mesh) is None
    for choice in ("kernels", "onednn", write_table(tmp_path / "table.json", MIXED)):
        with pytest.raises(
            ConfigError, match=f"={choice} is for CPUs, and the mesh is of {platform} devices. Leave it"
        ):
            set_products(nnx.Module(), recjax.load(*SYNTHETIC, f"train.products={choice}"), mesh)


def test_a_table_lacks_a_dtype(preset, tmp_path):
    table = write_table(tmp_path / "table.json", MIXED)
    asked = ("compute_dtype=bfloat16", f"train.products={table}", "--out", tmp_path / "run")
    assert_refused(inside("train", preset, *SMALL, *asked), 2, "has no times of bfloat16 layers. Measure them")


@pytest.mark.full
def test_one_command_measures_a_table_that_the_next_one_takes(preset, tmp_path):
    table = tmp_path / "table.json"
    given = ("--products", table, "--rounds", "1")
    first = inside("bench", preset, "mesh.devices=2", *given, "--json").result
    assert len(first["layers"]) == 4 and first["products"].startswith("by table")
    for layer in first["layers"]:
        assert layer["rows"] == 32
        who = {"xla", *(["kernels"] * kernels.installed()), *(["onednn"] * onednn_there())}
        assert all(of.keys() == who and min(of.values()) > 0 for of in layer["us"].values())
    text = inside("bench", preset, "mesh.devices=1", *given).out  # adds layers of 64 rows
    assert "64 x 3 x 16 float32" in text and "into_kernel" in text and f"train.products={table}" in text
    assert len(json.loads(table.read_text())["layers"]) == 8
    found = inside("train", preset, *SMALL, f"train.products={table}", "--out", tmp_path / "run", "--json").result
    assert found["products"].startswith("by table")
    other = json.loads(table.read_text())
    other["machine"]["cpu"] = "another"
    table.write_text(json.dumps(other))
    assert_refused(inside("bench", preset, "mesh.devices=2", *given), 2, "holds times of another machine")
    assert_refused(
        inside("bench", preset, "compute_dtype=float64", "--products", tmp_path / "64.json"), 2, "there is nothing to"
    )
