"""`recjax export`: what it writes runs without recjax, equals the dense oracle and `recjax predict`, or is refused."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import own_model
from support.commands import SMALL, assert_refused, inside
from support.exports import ROWS, TASKS, by_oracle, decoded, exported, rows_of, truth_of, untrained
from support.shop import Reader, prepare_shop

import recjax
from recjax.data.batch import Bags
from recjax.data.prepare.encoder import open_encoder
from recjax.errors import ConfigError
from recjax.serving import loader
from recjax.serving.export import write
from recjax.train.build import build_trainer
from recjax.train.run.open_run import open_run

pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]
WITH_ONNX = importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxruntime")
HISTORY = Path(__file__).parents[1] / "models/history_preset.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    trainer, state = untrained()
    out = tmp_path_factory.mktemp("export") / "made"
    write(trainer, state, 7, out)
    return trainer, state, out


def test_equals_the_oracle(made):
    trainer, state, out = made
    batch, given = rows_of(trainer)
    truth = truth_of(trainer, state, batch, out)
    np.testing.assert_allclose(loader.load(out)(**given), truth, rtol=1e-5, atol=1e-6)
    assert len(np.unique(truth)) > 40


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantize", "overrides"),
    [
        ("none", TASKS),
        ("bfloat16", ()),
        pytest.param("int8", (), marks=pytest.mark.wide),
        ("int4", ("embedding.dim=5", "model.interaction=cat")),
        pytest.param("none", ("model=deepfm",), marks=pytest.mark.wide),
        ("none", ("model=dcnv2",)),
        ("none", ("embedding.dtype=bfloat16", "model=wide_deep")),
    ],
)
def test_models_and_encodings(tmp_path, quantize, overrides):
    trainer, state = untrained(*overrides)
    write(trainer, state, 0, tmp_path / "made", quantize)
    batch, given = rows_of(trainer)
    model = loader.load(tmp_path / "made")
    tables = {name: decoded(tmp_path / "made", entry) for name, entry in model.manifest["tables"].items()}
    found = model(**given)
    np.testing.assert_allclose(found, by_oracle(trainer, state, batch, tables), rtol=1e-5, atol=1e-5)
    (predicted,) = [x for _, x in trainer.predict(state, trainer.eval_inputs("test"))]
    if quantize == "none":
        np.testing.assert_allclose(found, predicted, rtol=1e-5, atol=1e-5)
    else:
        write(trainer, state, 0, tmp_path / "exact")
        exact = loader.load(tmp_path / "exact").manifest["tables"]
        for name, entry in exact.items():
            rows = decoded(tmp_path / "exact", entry)
            levels = np.ptp(rows, axis=1, keepdims=True) / {"int8": 509, "int4": 29.9}.get(quantize, 1)
            bound = abs(rows) / 256 if quantize == "bfloat16" else levels
            assert (abs(rows - tables[name]) <= bound).all() and (rows != tables[name]).any()
    if overrides == TASKS:
        assert model.signature["outputs"]["shape"] == ["b", 2]
        assert [task["kind"] for task in model.signature["outputs"]["tasks"]] == ["binary", "number"]


@pytest.mark.full
@pytest.mark.parametrize("bag", [3, 0])
def test_rows_of_bags_one_by_one(tmp_path, bag):
    """A model of one's own, whose features share a table; bags of one size, and of any."""
    sequences = (f"data.ids_per_bag=1,{bag},1", "data.weighted=false,true,false", "mesh.devices=1")
    trainer = build_trainer(recjax.load(HISTORY, [*ROWS, *sequences]))
    state = trainer.init_state()
    write(trainer, state, 0, tmp_path / "made")
    (predicted,) = [x for _, x in trainer.predict(state, trainer.eval_inputs("test"))]
    found = loader.load(tmp_path / "made")(**rows_of(trainer)[1])
    np.testing.assert_allclose(found, predicted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_features_of_users_are_looked_up_once(tmp_path):
    """Fixed, jagged and weighted bags of three users, whose samples come in any order; and none at all."""
    trainer, state = untrained("embedding.pooling=mean")
    one, jagged, fixed, plain = (feature.name for feature in trainer.source.schema.features)
    batch, given = rows_of(trainer)
    model = exported(trainer, state, tmp_path / "made", user=[one, jagged, fixed])
    assert [f["side"] for f in model.signature["inputs"]["features"]] == ["user", "user", "user", "item"]
    np.testing.assert_allclose(model(**given), truth_of(trainer, state, batch, tmp_path / "made"), rtol=1e-5)
    user = np.random.default_rng(0).integers(0, 3, 50)
    of_users = {one: given["ids"][one][:3], fixed: given["ids"][fixed][:3]}
    length = given["lengths"][jagged][:3]
    of_users[jagged] = given["ids"][jagged][: length.sum()]
    weights = {jagged: given["weights"][jagged][: length.sum()], fixed: given["weights"][fixed][:3]}
    found = model(
        {**of_users, plain: given["ids"][plain]},
        {jagged: length, plain: given["lengths"][plain]},
        weights,
        given["dense"],
        user,
    )
    starts = np.cumsum(length) - length
    each = np.concatenate([np.arange(starts[u], starts[u] + length[u]) for u in user])
    bags = batch.bags | {
        one: Bags(of_users[one][user]),
        fixed: Bags(of_users[fixed][user], None, weights[fixed][user]),
        jagged: Bags(of_users[jagged][each], length[user], weights[jagged][each]),
    }
    truth = truth_of(trainer, state, dataclasses.replace(batch, bags=bags), tmp_path / "made")
    np.testing.assert_allclose(found, truth, rtol=1e-5)
    for wrong in (user[:9], user - 1, user * 1.0):
        with pytest.raises(loader.InputError, match="user must be 50 integers from 0"):
            model(**given, user=wrong)
    with pytest.raises(loader.InputError, match=rf"ids of '{one}' have shape \[3, 1\].*give integers \[4, 1\]"):
        model({**of_users, plain: given["ids"][plain]}, {}, {}, given["dense"], user + 1)
    with pytest.raises(ConfigError, match="no feature 'sparse_9'. Did you mean sparse_3"):
        write(trainer, state, 0, tmp_path / "other", user=["sparse_9"])


def test_damage_is_refused_by_name(made, tmp_path):
    out = shutil.copytree(made[2], tmp_path / "made")
    files = sorted(path for path in out.rglob("*") if path.is_file())
    assert {"manifest.json", "program.stablehlo", "parameters.npz", "loader.py", "0003.npy"} <= {f.name for f in files}
    for file in files:
        whole = file.read_bytes()
        middle = whole.index(b"rows") if file.name == "manifest.json" else len(whole) // 2
        for damaged in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:-9], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(loader.ExportError, match=re.escape(str(file))):
                loader.load(out)
        file.write_bytes(whole)
    loader.load(out)


def test_a_program_that_calls_its_process_is_refused(made, tmp_path):
    """Also with right checksums, as whoever made it would write them."""
    out = shutil.copytree(made[2], tmp_path / "made")
    calling = jax.jit(lambda x: jax.ffi.ffi_call("anything", jax.ShapeDtypeStruct(x.shape, x.dtype))(x))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("anything")]
    exported = jax.export.export(calling, disabled_checks=unchecked)(jax.ShapeDtypeStruct((2,), np.float32))
    program = out / "program.stablehlo"
    program.write_bytes(exported.serialize())
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"]["program.stablehlo"] = _entry(program)
    manifest["sha256"] = loader.own_checksum(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(loader.ExportError, match=r"program\.stablehlo calls @anything, which is not part of it"):
        loader.load(out)
    manifest["files"]["../outside"] = manifest["files"]["program.stablehlo"]
    manifest["sha256"] = loader.own_checksum(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(loader.ExportError, match=r"names \.\./outside, outside of its folder"):
        loader.load(out)


def _entry(file):
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def changed(given, kind, name, value):
    return given | {
        kind: {k: v for k, v in given[kind].items() if k != name} | ({} if value is None else {name: value})
    }


def test_mistakes_in_samples(made):
    trainer, _, out = made
    _, given = rows_of(trainer)
    one, jagged, fixed, plain = (feature.name for feature in trainer.source.schema.features)
    model = loader.load(out, verify=False)
    high, short = given["ids"][one].copy(), given["lengths"][jagged].copy()
    high[4], short[0] = 30, short[0] + 1
    late = given["ids"][plain].copy()
    late[-1] = -1
    last = int(np.flatnonzero(given["lengths"][plain])[-1])
    nan = given["weights"][fixed].copy()
    nan[0, 0] = np.nan
    for bad, pattern in [
        (changed(given, "ids", one, high), rf"id 30 of '{one}' in row 4 is out of range: .* rows 0 to 29"),
        (changed(given, "ids", plain, late), rf"id -1 of '{plain}' in row {last} is out of range"),
        (changed(given, "ids", one, high[:9]), rf"ids of '{one}' have shape \[9, 1\].*give integers \[50, 1\]"),
        (changed(given, "ids", one, high * 1.0), rf"ids of '{one}' have shape .*float64; give integers"),
        (changed(given, "ids", one, None), rf"feature '{one}' has no ids: add ids\['{one}'\]"),
        (changed(given, "ids", "usr", high), r"ids are given for 'usr', but the model takes ids of"),
        (changed(given, "lengths", jagged, short), rf"lengths of '{jagged}' .* give 50 integers, none negative"),
        (changed(given, "lengths", one, short), rf"lengths are given for '{one}', but the model takes lengths of"),
        (changed(given, "weights", fixed, nan), rf"weights of '{fixed}' must be finite"),
        (changed(given, "weights", jagged, None), rf"feature '{jagged}' has no weights"),
        (given | {"dense": given["dense"][:, :2]}, r"dense has shape \[50, 2\].* numbers \[samples, 3\]"),
        (given | {"dense": given["dense"] * np.nan}, r"dense column '\w+' is nan in row 0"),
        (given | {"dense": given["dense"][:0]}, r"there is no sample"),
        (given | {"dense": None}, r"dense has shape \[0\]"),
    ]:
        with pytest.raises(loader.InputError, match=pattern) as raised:
            model(**bad)
        assert "\n" not in str(raised.value)


def test_refusals_of_the_verb(tmp_path, monkeypatch):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").touch()
    refuse = [
        (("--out", tmp_path / "used"), r"--out .*used exists and is not an empty folder"),
        (("--out", tmp_path / "new", "--platforms", "cpu,rocm"), r"--platforms cpu,rocm: give one or more of"),
        (("--out", tmp_path / "new"), r"run is not a run folder"),
    ]
    for arguments, pattern in refuse:
        assert_refused(inside("export", tmp_path / "run", *arguments), 2, pattern)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = inside("export", tmp_path / "run", "--out", tmp_path / "new")
    assert_refused(refused, 2, r"needs the package flatbuffers.*Install the extra `export`")
    assert not (tmp_path / "new").exists() and (tmp_path / "used" / "mine").exists()


def test_mistakes_in_python(tmp_path):
    for wrong, words in (
        ({"quantize": "int2"}, "quantize is 'int2'; choose one of none, bfloat16, int8, int4"),
        ({"format": "tf"}, "format is 'tf'; choose one of stablehlo, onnx"),
        ({"platforms": "rocm"}, "--platforms rocm: give one or more of"),
        ({}, "is not a run folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            recjax.export(tmp_path / "run", tmp_path / "out", **wrong)
    with pytest.raises(ConfigError, match="needs the path of a folder as run, not"):
        recjax.export(recjax, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_leave(tmp_path):
    trainer, state = untrained()
    double = dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, compute_dtype="float64"))
    with pytest.raises(ConfigError, match="computes in float64"):
        write(double, state, 0, tmp_path / "made")
    trainer = build_trainer(recjax.load(HISTORY, [*ROWS, "mesh.devices=1"]))
    with pytest.raises(ConfigError, match=r"--user: feature 'sparse_1' is jagged and not pooled"):
        write(trainer, trainer.init_state(), 0, tmp_path / "made", user=["sparse_1"])
    file = own_model.write(tmp_path / "own")
    own_model.edit(file, "joined = jnp", "assert len(dense_BxK); joined = jnp")
    trainer = build_trainer(recjax.load(file))
    with pytest.raises(ConfigError, match=r"any number of samples: .*mine\.py:\d+: .*x\.shape\[0\] instead of"):
        write(trainer, trainer.init_state(), 0, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


APART = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[4].split(","):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import numpy as np
from loader import load

model, batches = load(sys.argv[1]), {}
for key, array in np.load(sys.argv[2]).items():
    number, kind, name = key.split("|")
    given = batches.setdefault(int(number), {"ids": {}, "lengths": {}, "weights": {}})
    if kind == "dense":
        given["dense"] = array
    else:
        given[kind][name] = array
np.save(sys.argv[3], np.concatenate([model(**batches[number]) for number in sorted(batches)]))
assert not [name for name in sys.modules if name.partition(".")[0] in sys.argv[4].split(",")]
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        pytest.param("movietweetings", ("train.steps=20",), marks=pytest.mark.wide),
        ("synthetic_multihot", (*ROWS, "train.batch_size=32", "mesh.devices=2")),
        (
            "synthetic_tasks",
            (*ROWS, "train.optimizer=adagrad", "train.batch_size=32", "model.batch_norm=true", "model.dropout=0.2"),
        ),
    ],
)
def test_a_run_without_recjax_gives_what_predict_gives(tmp_path, preset, overrides):
    run, out = tmp_path / "run", tmp_path / "exported"
    assert inside("train", preset, "mesh.devices=1", *overrides, "--out", run).status == 0
    disk = ("--disk", "all") if preset == "synthetic_multihot" else ()
    result = inside("export", run, "--out", out, "--json", *disk).result
    assert (out / "records.py").exists() == bool(disk) and result["on_disk"] == (result["tables"] if disk else 0)
    manifest = json.loads((out / "manifest.json").read_text())
    assert result["bytes"] == sum(entry["bytes"] for entry in manifest["files"].values())
    trainer, state, step = open_run(run, (), (), None, print)
    assert manifest["model"]["step"] == result["step"] == step
    truth, arrays = [], {}
    for number, (batch, outputs) in enumerate(trainer.predict(state, trainer.eval_inputs("test"))):
        truth.append(outputs)
        arrays[f"{number}|dense|"] = batch.dense
        for name, bags in batch.bags.items():
            kinds = {kind: getattr(bags, kind) for kind in ("ids", "lengths", "weights")}
            arrays |= {f"{number}|{kind}|{name}": x for kind, x in kinds.items() if x is not None}
    np.savez(tmp_path / "rows.npz", **arrays)
    for format, without in (("stablehlo", "recjax,flax,tensorstore"), ("onnx", "recjax,flax,tensorstore,jax,jaxlib")):
        if format == "onnx":
            if not WITH_ONNX or preset != "synthetic_tasks":  # tests/serving/test_onnx.py has the other models
                continue
            out = tmp_path / "onnx"
            made = recjax.export(run, out, format="onnx", user=[], mesh={"devices": 1})
            assert made["format"] == "onnx" and made["platforms"] == ["cpu"]
        package = Path(importlib.util.find_spec("flatbuffers").origin).parents[1]
        command = [sys.executable, "-c", APART, out, tmp_path / "rows.npz", tmp_path / "found.npy", without]
        environment = os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=300)
        found = np.load(tmp_path / "found.npy")
        np.testing.assert_allclose(found, np.concatenate(truth), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_vocabularies_go_along(tmp_path, preset):
    """From raw rows to scores by the export alone; and a folder that is in use is refused."""
    prepare_shop(tmp_path / "data")
    data = ("data=prepared", f"data.path={tmp_path / 'data'}", "train.eval_batch_size=256", *SMALL)
    assert inside("train", preset, *data, "--out", tmp_path / "run").status == 0
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "out").mkdir()
    assert inside("export", tmp_path / "run", "--out", tmp_path / "out").status == 0
    (chunk,) = Reader().chunks(0)
    batch = open_encoder(tmp_path / "out" / "data").encode(chunk)
    ids, lengths = ({name: getattr(bags, kind) for name, bags in batch.bags.items()} for kind in ("ids", "lengths"))
    lengths = {name: array for name, array in lengths.items() if array is not None}
    found = loader.load(tmp_path / "out")(ids, lengths, {}, batch.dense)
    inside("predict", tmp_path / "run", "--input", tmp_path / "elsewhere", "--out", tmp_path / "scores.jsonl")
    truth = [json.loads(line)["logit"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(found[-100:], truth, rtol=1e-5, atol=1e-6)  # the test split
    assert_refused(inside("export", tmp_path / "run", "--out", tmp_path / "out"), 2, "not an empty folder")
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.full
@pytest.mark.parametrize(("quantize", "disk"), [("none", "all"), ("int8", "sparse_2"), ("bfloat16", "sparse_0")])
def test_tables_on_disk_give_the_same_bits(tmp_path, quantize, disk):
    """Whatever the cache holds, of bags of all kinds; and a damaged row is named, and spoils no other."""
    trainer, state = untrained("model=deepfm", "embedding.pooling=mean")
    _, given = rows_of(trainer)
    truth = exported(trainer, state, tmp_path / "memory", quantize, user=["sparse_1"])(**given)
    write(trainer, state, 0, tmp_path / "disk", quantize, user=["sparse_1"], disk=[disk])
    on_disk = {n: e for n, e in loader.read_manifest(tmp_path / "disk")["tables"].items() if e["on_disk"]}
    assert len(on_disk) == (8 if disk == "all" else 2), "with first-order weights, which the same feature reads"
    for cache_bytes in (1, 400, 2**20):
        model = loader.load(tmp_path / "disk", cache_bytes=cache_bytes)
        for _ in range(2):
            np.testing.assert_array_equal(model(**given), truth)
        hits = sum(model.stores.hits.values())
        assert (hits == 0) == (cache_bytes == 1)
    name = "sparse_0" if disk == "all" else disk
    entry = on_disk[name]
    row = int(given["ids"][name].ravel()[7])
    file = tmp_path / "disk" / entry["file"]
    damaged = bytearray(file.read_bytes())
    damaged[4096 + 64 * row + 3] ^= 1
    file.write_bytes(damaged)
    model = loader.load(tmp_path / "disk")
    with pytest.raises(Exception, match=rf"record {row} of .*{entry['file']} is damaged"):
        model(**given)
    whole = [at for at in range(50) if row not in given["ids"][name][at]] if name != "sparse_1" else []
    assert whole
    apart = {k: given["ids"][k][whole[:1]] for k in given["ids"] if given["lengths"].get(k) is None}
    one = {k: int(given["lengths"][k][whole[0]]) for k in given["lengths"]}
    starts = {k: int(given["lengths"][k][: whole[0]].sum()) for k in given["lengths"]}
    ids = apart | {k: given["ids"][k][starts[k] : starts[k] + one[k]] for k in one}
    weights = {k: x[starts[k] : starts[k] + one[k]] if k in one else x[whole[:1]] for k, x in given["weights"].items()}
    found = model(ids, {k: np.array([n]) for k, n in one.items()}, weights, given["dense"][whole[:1]])
    np.testing.assert_allclose(found, truth[whole[:1]], rtol=1e-5)
