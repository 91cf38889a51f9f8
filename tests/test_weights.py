"""Weights of other libraries, against forward passes written here from those libraries' own definitions.

torch is not installed: `facebook_dlrm` and `torchrec` below are plain NumPy after dlrm_s_pytorch.py and torchrec's
models/dlrm.py, crossnet.py and mlp.py, with their names, orders of weights and of pairs.
"""

import math
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import damage
from support.commands import assert_refused, inside

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.errors import ConfigError
from recjax.interop.state_dicts import entries
from recjax.interop.weights import export_weights, import_weights
from recjax.main import train
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.train.run.open_run import open_run
from recjax.train.table_specs import dims, specs
from recjax.utils import lazy_arrays

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

Weights = dict[str, np.ndarray]
ROWS, D, K = (5000, 37, 300, 11), 8, 3
DATA = tuple(
    """
    data.rows=5000,37,300,11 data.ids_per_bag=1,3,0,2 data.weighted=false,true,true,false data.dense=3
    data.train_rows=400 data.validation_rows=50 data.test_rows=150 embedding.dim=8 mesh.devices=2 train.batch_size=100
    train.log_every=1
    """.split()
)
DOT = ("model.bottom=12-8", "model.top=16-6-1")
CAT = (*DOT, "model.interaction=cat")
DCN = ("model=dcnv2", "model.bottom=12-8", "model.cross_layers=2", "model.rank=5", "model.top=16-6-1")


def draw(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Weights large enough that a mistake shows: no bias is 0, no two columns are alike."""
    rng = np.random.default_rng(7)
    return {
        name: (rng.normal(size=shape) / math.sqrt(max(shape[-1], 1))).astype(np.float32)
        for name, shape in shapes.items()
    }


def facebook_shapes(interaction: str = "dot") -> dict[str, tuple[int, ...]]:
    top = {"dot": D + 10, "itself": D + 15, "cat": 5 * D}[interaction]
    shapes: dict[str, tuple[int, ...]] = {f"emb_l.{i}.weight": (rows, D) for i, rows in enumerate(ROWS)}
    for stack, widths in (("bot_l", (K, 12, D)), ("top_l", (top, 16, 6, 1))):
        for i, (n, m) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            shapes |= {f"{stack}.{2 * i}.weight": (m, n), f"{stack}.{2 * i}.bias": (m,)}  # every other one is a ReLU
    return shapes


def torchrec_shapes(dcn: bool = False, names: str = "sparse_{}") -> dict[str, tuple[int, ...]]:
    bags = "sparse_arch.embedding_bag_collection.embedding_bags.t_"
    shapes: dict[str, tuple[int, ...]] = {f"{bags}{names.format(i)}.weight": (rows, D) for i, rows in enumerate(ROWS)}
    layers = {"dense_arch.model._mlp.0._linear": (12, K), "dense_arch.model._mlp.1._linear": (D, 12)}
    N = 5 * D
    if dcn:
        for i in range(2):
            shapes |= {f"inter_arch.crossnet.W_kernels.{i}": (N, 5), f"inter_arch.crossnet.V_kernels.{i}": (5, N)}
            shapes |= {f"inter_arch.crossnet.bias.{i}": (N, 1)}
    layers |= {"over_arch.model.0._mlp.0._linear": (16, N if dcn else D + 10)}
    layers |= {"over_arch.model.0._mlp.1._linear": (6, 16), "over_arch.model.1": (1, 6)}
    for name, (m, n) in layers.items():
        shapes |= {f"{name}.weight": (m, n), f"{name}.bias": (m,)}
    return shapes


def embedding_bag(table: np.ndarray, batch: Batch, i: int) -> np.ndarray:
    """nn.EmbeddingBag(mode="sum") with per_sample_weights, [n, D] in float64."""
    bags = batch.bags[f"sparse_{i}"]
    lengths = np.full(batch.size, bags.ids.shape[1]) if bags.lengths is None else bags.lengths
    out = np.zeros((batch.size, D))
    weights = np.ones(bags.ids.size) if bags.weights is None else bags.weights.ravel()
    np.add.at(out, np.repeat(np.arange(batch.size), lengths), weights[:, None] * table[bags.ids.ravel()])
    return out


def facebook_dlrm(w: Weights, batch: Batch, interaction: str) -> np.ndarray:
    """DLRM_Net.sequential_forward: probabilities."""

    def mlp(x: np.ndarray, stack: str, sigmoid_layer: int) -> np.ndarray:
        for i in range(sum(name.startswith(stack) for name in w) // 2):
            x = x @ w[f"{stack}.{2 * i}.weight"].astype(np.float64).T + w[f"{stack}.{2 * i}.bias"]
            x = 1 / (1 + np.exp(-x)) if i == sigmoid_layer else np.maximum(x, 0)
        return x

    x = mlp(batch.dense.astype(np.float64), "bot_l", -1)
    ly = [embedding_bag(w[f"emb_l.{i}.weight"], batch, i) for i in range(len(ROWS))]
    if interaction == "cat":
        return mlp(np.concatenate([x, *ly], 1), "top_l", 2)[:, 0]
    T = np.concatenate([x, *ly], 1).reshape(batch.size, -1, D)
    Z = T @ T.transpose(0, 2, 1)
    offset = 1 if interaction == "itself" else 0
    li = [i for i in range(5) for j in range(i + offset)]
    lj = [j for i in range(5) for j in range(i + offset)]
    return mlp(np.concatenate([x, Z[:, li, lj]], 1), "top_l", 2)[:, 0]


def torchrec(w: Weights, batch: Batch, names: str = "sparse_{}") -> np.ndarray:
    """DLRM.forward and DLRM_DCN.forward: logits."""

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].astype(np.float64).T + w[f"{name}.bias"]

    x = batch.dense.astype(np.float64)
    for i in range(2):
        x = np.maximum(linear(x, f"dense_arch.model._mlp.{i}._linear"), 0)
    bags = "sparse_arch.embedding_bag_collection.embedding_bags.t_"
    sparse = [embedding_bag(w[f"{bags}{names.format(i)}.weight"], batch, i) for i in range(len(ROWS))]
    T = np.stack([x, *sparse], 1)
    if "inter_arch.crossnet.bias.0" in w:
        x_0 = x_l = T.reshape(batch.size, -1, 1)
        for i in range(2):
            W, V, bias = (
                w[f"inter_arch.crossnet.{n}.{i}"].astype(np.float64) for n in ("W_kernels", "V_kernels", "bias")
            )
            x_l = x_0 * (W @ (V @ x_l) + bias) + x_l
        y = x_l[:, :, 0]
    else:
        upper = np.triu_indices(5, k=1)  # torch.triu_indices(F + 1, F + 1, offset=1) has the same order
        y = np.concatenate([x, (T @ T.transpose(0, 2, 1))[:, *upper]], 1)
    for k in range(2):
        y = np.maximum(linear(y, f"over_arch.model.0._mlp.{k}._linear"), 0)
    return linear(y, "over_arch.model.1")[:, 0]


def settings(*more: str) -> RunConfig:
    return presets.load("synthetic", (*DATA, *more))


def save(path: Path, weights: Weights) -> Path:
    np.savez(path, allow_pickle=True, **weights)
    return path


def logits_of(run: Path, *overrides: str) -> np.ndarray:
    trainer, state, step = open_run(run, overrides, ("test",), None, print)
    assert step == 0
    return np.concatenate([logits for _, logits in trainer.predict(state, trainer.eval_inputs("test"))])


CASES = {
    "facebook-dot": (DOT, facebook_shapes()),
    "facebook-itself": ((*DOT, "model.interaction_itself=true"), facebook_shapes("itself")),
    "facebook-cat": (CAT, facebook_shapes("cat")),
    "torchrec-dlrm": (DOT, torchrec_shapes()),
    "torchrec-dcn": (DCN, torchrec_shapes(dcn=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_weights_give_the_same_logits_and_come_back_bit_for_bit(name, tmp_path):
    model, shapes = CASES[name]
    form, _, kind = name.partition("-")
    weights = draw(shapes)
    config = settings(*model)
    made = import_weights(save(tmp_path / "in.npz", weights), config, tmp_path / "run")
    assert made["format"] == form and made["arrays"] == len(weights)
    assert made["values"] == sum(w.size for w in weights.values())
    batch = config.data.open().read("test", 0)
    if form == "facebook":
        p = facebook_dlrm(weights, batch, kind)
        expected = np.log(p / (1 - p))
    else:
        expected = torchrec(weights, batch)
    assert expected.std() > 0.1
    meshes = [("mesh.devices=1", "plan=row_wise"), ("mesh.devices=3", "plan=table_wise"), ("mesh.devices=8",)]
    for mesh in meshes if name in ("facebook-dot", "torchrec-dcn") else meshes[1:2]:
        np.testing.assert_allclose(logits_of(tmp_path / "run", *mesh), expected, rtol=1e-5, atol=1e-5)
    export_weights(tmp_path / "run", form, tmp_path / "out.npz", ["mesh.devices=3"])
    with np.load(tmp_path / "out.npz") as back:
        assert set(back.files) == set(weights)
        for key, array in weights.items():
            assert back[key].dtype == array.dtype and back[key].tobytes() == array.tobytes(), key


def test_one_librarys_weights_leave_as_the_others(tmp_path):
    """The columns of the first top layer change places, so that TorchRec's own order gives the same logits."""
    weights, config = draw(facebook_shapes()), settings(*DOT)
    import_weights(save(tmp_path / "in.npz", weights), config, tmp_path / "run")
    export_weights(tmp_path / "run", "torchrec", tmp_path / "torchrec.npz")
    with np.load(tmp_path / "torchrec.npz") as found:
        theirs = {key: found[key] for key in found.files}
    first = "over_arch.model.0._mlp.0._linear.weight"
    assert (theirs[first] != weights["top_l.0.weight"]).any()
    batch = config.data.open().read("test", 0)
    p = facebook_dlrm(weights, batch, "dot")
    np.testing.assert_allclose(torchrec(theirs, batch), np.log(p / (1 - p)), rtol=1e-9, atol=1e-9)


def test_the_order_of_the_pairs_by_hand():
    """Upper: 01 02 03 04 12 13 14 23 24 34. Lower: 10 20 21 30 31 32 40 41 42 43. So TorchRec's third is our fourth."""
    config = settings(*DOT)
    tables, features = specs(config, config.data.open().schema)
    entry = next(e for e in entries("torchrec", config.model, 3, features, dims(tables, features)) if "over" in e.key)
    assert entry.name == "top.layers.0.kernel"
    kernel = np.arange(D + 10)[:, None]
    assert entry.out(kernel).tolist() == [[*range(D), *(D + k for k in (0, 1, 3, 6, 2, 4, 7, 5, 8, 9))]]
    assert entry.back(entry.out(kernel)).tolist() == kernel.tolist()


def test_wrappers_prefixes_and_criteos_table_names_are_understood(tmp_path):
    weights = draw(torchrec_shapes(names="cat_{}"))
    wrapped = {f"model.{key}": value for key, value in weights.items()}
    config = settings(*DOT)
    import_weights(save(tmp_path / "in.npz", wrapped), config, tmp_path / "run")
    expected = torchrec(weights, config.data.open().read("test", 0), "cat_{}")
    np.testing.assert_allclose(logits_of(tmp_path / "run"), expected, rtol=1e-5, atol=1e-5)


def test_training_goes_on_from_imported_weights(tmp_path):
    """By the command line; a run that has begun is not overwritten, and its later steps can be exported."""
    file, run = save(tmp_path / "in.npz", draw(facebook_shapes())), tmp_path / "run"
    done = inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", run, "--json")
    assert done.result["format"] == "facebook" and done.result["arrays"] == 14
    untouched = inside("eval", run, "--json").result
    config = settings(*DOT)
    p = facebook_dlrm(draw(facebook_shapes()), config.data.open().read("test", 0), "dot")
    labels = config.data.open().read("test", 0).labels
    assert untouched["logloss"] == pytest.approx(-np.log(np.where(labels == 1, p, 1 - p)).mean(), rel=1e-5)
    assert_refused(
        inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", run),
        2,
        "holds a run that has begun. Import into another --out",
    )
    trained = train(settings(*DOT, "train.steps=3"), run)
    assert trained["steps"] == 3
    done = inside("weights", "export", run, "--format", "facebook", "--out", tmp_path / "out.npz", "--json")
    assert done.result["step"] == 3
    with np.load(tmp_path / "out.npz") as out, np.load(file) as start:
        moved = {key: np.abs(out[key] - start[key]).max() for key in start.files}
    assert all(0 < change < 0.5 for change in moved.values()), moved
    done = inside("weights", "export", run, "--format", "facebook", "--out", tmp_path / "start.npz", "--step", 0)
    assert done.status == 0  # the checkpoint is still there: two stay
    with np.load(tmp_path / "start.npz") as out, np.load(file) as start:
        assert all((out[key] == start[key]).all() for key in start.files)


def test_the_host_never_holds_two_tables(tmp_path, monkeypatch):
    """NumPy tells tracemalloc of its arrays; those of the devices do not count."""
    rows, count = 60_000, 10
    table_bytes = rows * D * 4
    sizes = ("data.rows=" + ",".join([str(rows)] * count), "data.ids_per_bag=1", "data.weighted=false")
    config = settings(*DOT, *sizes)
    shapes = {name: shape for name, shape in facebook_shapes().items() if "emb" not in name}
    shapes |= {f"emb_l.{i}.weight": (rows, D) for i in range(count)}
    shapes |= {"top_l.0.weight": (16, D + (count + 1) * count // 2)}
    weights = draw(shapes)
    file = save(tmp_path / "in.npz", weights)
    import_weights(file, config, tmp_path / "once")  # so that what JAX and Orbax keep for good is there
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", table_bytes // 8)
    tracemalloc.start()
    try:
        import_weights(file, config, tmp_path / "run")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * table_bytes, peak / table_bytes
    export_weights(tmp_path / "run", "facebook", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as back:  # whose tables came in eight parts each
        assert all(back[key].tobytes() == array.tobytes() for key, array in weights.items())


def test_a_file_that_is_damaged_inside_is_refused_before_anything_is_written(tmp_path):
    file = save(tmp_path / "in.npz", draw(facebook_shapes()))
    content = bytearray(file.read_bytes())
    content[content.index(b"emb_l.3.weight.npy") + 200] ^= 1
    file.write_bytes(content)
    assert_refused(
        inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", tmp_path / "run"),
        2,
        "in.npz cannot be read as an .npz file: .*CRC",
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


# --- what is refused ---


def test_an_array_that_numpy_would_warn_of_is_refused_without_its_warning(tmp_path):
    file = save(tmp_path / "in.npz", changed(draw(facebook_shapes()), **{"bot_l.2.bias": None}))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("bot_l.2.bias.npy", damage.NPY_OF_PYTHON_2)
    done = inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", tmp_path / "run")
    assert_refused(done, 2, "in.npz cannot be read as an .npz file: .*Python 2")
    assert "Warning" not in done.err


def changed(weights: Weights, **changes: Any) -> Weights:
    found = weights | changes
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "patterns"),
    [
        ({"bot_l.2.bias": None}, ["in.npz: it is a facebook state dict, but of another model: it lacks bot_l.2.bias"]),
        ({"v_W_l.0": np.ones(3)}, ["it has beside what the model needs v_W_l.0", "Give the config"]),
        ({"emb_l.2.weight": None, "emb_l.4.weight": np.ones((2, 8))}, ["it lacks emb_l.2.weight; it has .*emb_l.4"]),
        (
            {"emb_l.1.weight": np.ones((36, 8), np.float32)},
            [r"emb_l.1.weight has shape \(36, 8\), but this model needs \(37, 8\)"],
        ),
        ({"top_l.0.weight": np.ones((15, 16), np.float32)}, [r"shape \(15, 16\), but this model needs \(16, 18\)"]),
        ({"top_l.4.bias": np.ones(1)}, ["top_l.4.bias is float64, which float32 cannot hold exactly"]),
        ({"bot_l.0.weight": None}, ["it is no state dict that recjax knows", "numpy.savez"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_state_dict_of_another_model(change, patterns, tmp_path):
    file = save(tmp_path / "in.npz", changed(draw(facebook_shapes()), **change))
    done = inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", tmp_path / "run")
    assert_refused(done, 2, *patterns)
    assert not (tmp_path / "run" / "config.json").exists()  # the folder stays free for the corrected command


@pytest.mark.parametrize(
    "content", [None, b"", b"PK\x03\x04 cut short", b"\x93NUMPY one array", b"\x80\x04K\x01."], ids=repr
)
def test_a_file_that_is_none(content, tmp_path):
    file = tmp_path / "in.npz"
    if content is not None:
        file.write_bytes(content)
    done = inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", tmp_path / "run")
    damaged = ("in.npz cannot be read as an .npz file", "numpy.savez")
    assert_refused(
        done, 2, *(("in.npz does not exist. Give the .npz of a state dict",) if content is None else damaged)
    )
    assert "allow_pickle" not in done.err  # as NumPy advises, which would execute what is in a pickle


def test_a_packed_array_of_another_shape_is_refused_before_it_is_unpacked(tmp_path):
    large = np.zeros((2**24,), np.float32)
    np.savez_compressed(tmp_path / "in.npz", **(draw(facebook_shapes()) | {"emb_l.1.weight": large}))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"emb_l.1.weight has shape \(16777216,\), but this model needs"):
            import_weights(tmp_path / "in.npz", settings(*DOT), tmp_path / "run")
        assert tracemalloc.get_traced_memory()[1] < large.nbytes / 2
    finally:
        tracemalloc.stop()


def test_nothing_in_a_file_is_executed(tmp_path):
    weights: Any = draw(facebook_shapes()) | {"bot_l.0.weight": np.array([print], dtype=object)}
    file = save(tmp_path / "in.npz", weights)
    done = inside("weights", "import", file, "synthetic", *DATA, *DOT, "--out", tmp_path / "run")
    assert_refused(done, 2, "cannot be read as an .npz file", "allow_pickle")


@pytest.mark.parametrize(
    ("form", "model", "pattern"),
    [
        ("caffe2", DOT, "unknown format 'caffe2' of weights; choose one of facebook, torchrec"),
        ("facebook", DCN, "no such model as model=dcnv2, only DLRM$"),
        ("facebook", (*DOT, "embedding.pooling=mean"), "bags are summed, and here that of 'sparse_1' is averaged"),
        ("facebook", ("model=deepfm",), "no such model as model=deepfm"),
        ("torchrec", ("model=wide_deep",), "no such model as model=wide_deep, only DLRM and DCN-v2"),
        ("facebook", (*DOT, "data.dense=0"), "every model has a bottom MLP, and this one has none"),
        ("torchrec", (*DCN, "data.dense=0"), "every model has a bottom MLP, and this one has none"),
        ("torchrec", CAT, "model.interaction=dot"),
        ("torchrec", (*DOT, "model.top=1"), "two layers or more"),
        ("torchrec", (*DCN, "model.rank=0"), "stacked, and model.rank 1 or more"),
        ("torchrec", (*DCN, "model.structure=parallel"), "stacked"),
        ("torchrec", (*DCN, "model.bottom=7"), "must end in the dimension that all embeddings have"),
    ],
)
def test_models_that_a_format_cannot_hold(form, model, pattern):
    config = settings(*model)
    schema = config.data.open().schema
    dense, (tables, features) = len(schema.dense), specs(config, schema)
    with pytest.raises(ConfigError, match=pattern.replace("$", r"\.$")):
        entries(form, config.model, dense, features, dims(tables, features))


def test_the_configs_that_are_meant():
    assert settings(*DOT).model == DLRMConfig((12, 8), (16, 6, 1))
    assert settings(*DCN).model == DCNv2Config((12, 8), 2, 5, (16, 6, 1))
