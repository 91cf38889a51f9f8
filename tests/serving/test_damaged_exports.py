"""An export that is damaged, mixed with another one, or was changed by hand: refused by name, in one paragraph."""

import copy
import importlib.util
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support import damage_at_random
from support.commands import assert_refused, inside
from support.exports import rows_of, untrained

from recjax.serving import loader
from recjax.serving.export import write

pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two exports of one run with all tables on disk, of steps 7 and 8, between which all numbers changed."""
    folder = tmp_path_factory.mktemp("exports")
    trainer, state = untrained()
    _, newer = untrained("seed=1")
    write(trainer, state, 7, folder / "old", platforms=["cpu"], disk=["all"], user=["sparse_1"])
    write(trainer, newer, 8, folder / "new", platforms=["cpu"], disk=["all"], user=["sparse_1"])
    return trainer, folder / "old", folder / "new"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An export whose tables are no records, of a model with two tasks."""
    folder = tmp_path_factory.mktemp("exports")
    trainer, state = untrained("model=mmoe", "model.batch_norm=true", "data.labels=binary,number")
    write(trainer, state, 3, folder / "plain", platforms=["cpu"])
    return folder / "plain"


@pytest.fixture
def export(made, tmp_path):
    """A copy of the older one, to damage."""
    return shutil.copytree(made[1], tmp_path / "export")


def refusal(folder, error=loader.DamagedError, **options):
    """What `load` says of an export that it must refuse, in one paragraph."""
    with pytest.raises(error) as raised:
        loader.load(folder, **options)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    return str(raised.value)


def seal(folder, manifest=None, sums=True):
    """Brings a manifest, that of the folder or another one, up to date, as whoever changed it would."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) if manifest is None else manifest
    for name, entry in manifest["files"].items() if sums else ():
        entry["bytes"] = (folder / name).stat().st_size
        with (folder / name).open("rb") as opened:
            entry["sha256"] = loader.hashlib.file_digest(opened, "sha256").hexdigest()
    manifest["sha256"] = loader.own_checksum(manifest)
    file.write_text(json.dumps(manifest))


# --- files of tables on disk ---


def test_tables_that_were_exchanged_are_refused(export):
    """Of any two whose files have one size, which is so of all here; also if the sums in the manifest say so."""
    files = sorted((export / "tables").iterdir())
    for one, other in zip(files, files[1:], strict=False):
        swap(one, other)
        assert re.search(rf"{one} holds rows of the table 'sparse_\d' instead of 'sparse_\d'", refusal(export))
        swap(one, other)
    swap(*files[:2])
    seal(export)
    assert f"{files[0]} holds rows of the table 'sparse_1' instead of 'sparse_0'" in refusal(export)


def swap(one, other):
    aside = one.with_name("aside")
    for source, target in ((one, aside), (other, one), (aside, other)):
        source.rename(target)


def test_a_copy_over_an_older_export_that_broke_off_is_refused(made, export):
    """File after file, in the order of their names and against it, but for the last one; then it is whole."""
    _, old, new = made
    names = [file.relative_to(new) for file in sorted(new.rglob("*")) if file.is_file()]
    changed = [name for name in names if (old / name).read_bytes() != (new / name).read_bytes()]
    assert {"manifest.json", "parameters.npz", "0000.records", "0003.records"} <= {name.name for name in changed}
    for order in (changed, changed[::-1]):
        for name in order[:-1]:
            shutil.copyfile(new / name, export / name)
            assert str(export) in refusal(export)
        shutil.copyfile(new / order[-1], export / order[-1])
        loader.load(export)
        shutil.copytree(old, export, dirs_exist_ok=True)
    for table in range(4):
        name = f"tables/{table:04}.records"
        shutil.copyfile(new / name, export / name)
        assert f"{export / name} belongs to another export. Copy the whole export once more." in refusal(export)
        shutil.copyfile(old / name, export / name)


def test_rows_that_a_copy_left_are_never_scored(made, tmp_path):
    """Of a copy in place that broke off within a file: its first rows are new, and all else is that of before."""
    trainer, old, new = made
    _, given = rows_of(trainer)
    truth = loader.load(new)(**given)
    export = shutil.copytree(new, tmp_path / "export")
    np.testing.assert_array_equal(loader.load(export)(**given), truth)
    whole, before = ((folder / "tables/0002.records").read_bytes() for folder in (new, old))
    assert len(whole) == len(before)
    for rows in (3, 20):
        end = 4096 + 64 * rows
        (export / "tables/0002.records").write_bytes(whole[:end] + before[end:])
        model = loader.load(export)
        with pytest.raises(loader.DamagedError, match=r"record \d+ of .*0002\.records is damaged, or of another file"):
            model(**given)


def test_the_same_content_is_the_same_export(made, tmp_path):
    """To the bit; and one of another step, though no number changed, is another one."""
    trainer, old, _ = made
    _, state = untrained()
    for step in (7, 8):
        write(trainer, state, step, tmp_path / str(step), platforms=["cpu"], disk=["all"], user=["sparse_1"])
    for file in old.rglob("*"):
        assert file.is_dir() or file.read_bytes() == (tmp_path / "7" / file.relative_to(old)).read_bytes(), file
    later = loader.read_manifest(tmp_path / "8")
    assert later["id"] != loader.read_manifest(old)["id"] and len(later["id"]) == 64
    shutil.copytree(tmp_path / "8/tables", tmp_path / "7/tables", dirs_exist_ok=True)
    assert "0000.records belongs to another export" in refusal(tmp_path / "7")


@pytest.mark.full
def test_damage_to_a_file_of_records_is_met_when_it_is_opened(export):
    """Its end is gone, or too much is there; it is empty, missing, a folder, a pipe; a bit of its head."""
    file, manifest = export / "tables/0001.records", export / "manifest.json"
    whole, said = file.read_bytes(), manifest.read_text()
    for content in (whole[:-1], whole[:-4096], whole[:4096], whole[:100], b"", whole + b"\0"):
        file.write_bytes(content)
        assert f"{file} is damaged: it has {len(content):,} bytes instead of {len(whole):,}" in refusal(export)
        seal(export)
        assert str(file) in refusal(export), "also if the manifest says so"
        manifest.write_text(said)
    rng = random.Random(0)
    head = len(whole[:4096].rstrip())
    for at in (*rng.sample(range(head), 40), *rng.sample(range(head, 4096), 5)):  # tests/tiers has every bit of it
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        assert str(file) in refusal(export)
    file.unlink()
    assert f"{file} is damaged: it cannot be read (No such file or directory)" in refusal(export)
    file.mkdir()
    assert f"{file} is damaged: it cannot be read (it is no file)" in refusal(export)
    file.rmdir()
    os.mkfifo(file)
    assert f"{file} is damaged: it cannot be read (it is no file)" in refusal(export)


def test_an_export_of_an_earlier_version_is_refused_by_name(export):
    manifest = json.loads((export / "manifest.json").read_text())
    del manifest["id"]
    seal(export, manifest)
    assert "manifest.json was written by an earlier version: its tables on disk have no id. Export it" in refusal(
        export
    )


# --- what a manifest says ---

# What nothing can be compared with: words on the model, and the names that are shown for what has a place.
FREE = re.compile(
    r"model\.(kind|step)|versions\b.*|program\.symbols\b.*|parameters\.\w+\[\d+\]|inputs\.dense\.columns\[\d+\]"
    r"|lookups\[\d+\]\.(name|pooling)|outputs\.(tasks\[\d+\]\.(name|loss|kind)|classes)\b.*"
    r"|files\['(loader|manifest_form|records|row_cache|transfers|on_disk|pooled)\.\w+'\]|outputs\.dtype"
)
DELETE = object()
VALUES: tuple[object, ...] = (
    *(DELETE, *damage_at_random.VALUES, 2**60, "x" * 70_000, [[]] * 9, {"x": "x"}, ["x"], [3]),
    *("float32", "int8", "sum", "tables/0000.npy", "b", "user"),
)


def places(value, where=""):
    """Every part of a JSON value: its path, and the object or list and the key that it stands at."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside_ in keys:
        plain_key = isinstance(key, str) and re.fullmatch(r"\w+", key)
        path = f"{where}.{key}".lstrip(".") if plain_key else f"{where}[{key!r}]"
        yield path, value, key
        yield from places(inside_, path)


def edits(manifest):
    """(path, value) of every change of one part to one of the values."""
    return [
        (path, new)
        for path, holder, key in places(manifest)
        for new in VALUES
        if path != "sha256" and (new is DELETE or not same(holder[key], new))
    ]


def same(one, other):
    return type(one) is type(other) and one == other


def edited(manifest, path, new):
    changed = copy.deepcopy(manifest)
    holder, key = next((holder, key) for at, holder, key in places(changed) if at == path)
    if new is DELETE:
        del holder[key]
    else:
        holder[key] = new
    return changed


def check_edits(folder, chosen, pooled_bytes):
    """Each edit of a manifest is refused by name, soon and in little memory, unless it is of what is free."""
    manifest = json.loads((folder / "manifest.json").read_text())
    refused = 0
    for path, new in chosen:
        seal(folder, edited(manifest, path, new), sums=False)
        began = time.perf_counter()
        tracemalloc.start()
        try:
            loader.load(folder, pooled_bytes=pooled_bytes)
        except loader.ExportError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000 and str(folder) in str(error), (path, new)
            refused += 1
        else:
            assert FREE.fullmatch(path), f"{path} was changed to {new!r:.80}, and nothing said"
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 2**26 and time.perf_counter() - began < 20, (path, new)
    return refused


@pytest.mark.full
@pytest.mark.parametrize(("kind", "pooled_bytes"), [("records", 0), ("records", 2**20), ("plain", 0)])
def test_many_edits_of_a_sealed_manifest(kind, pooled_bytes, export, plain, tmp_path):
    folder = export if kind == "records" else shutil.copytree(plain, tmp_path / "plain")
    every = edits(json.loads((folder / "manifest.json").read_text()))
    assert check_edits(folder, random.Random(1).sample(every, 800), pooled_bytes) > 600


def test_what_does_not_fit_together_is_named(export, plain, tmp_path):
    """Of a manifest in which every value by itself could be right."""
    for path, new, what in (
        ("tables.sparse_0.rows", 29, "dtype and shape of the table 'sparse_0' are not those of its rows"),
        ("tables.sparse_0.held", "int8", "dtype and shape of the table 'sparse_0' are not those of its rows"),
        ("tables.sparse_0.dim", 2**31, "dtype and shape of the table 'sparse_0' are not those of its rows"),
        ("tables.sparse_0.file", "tables/0001.records", "two tables have one file"),
        ("tables.sparse_0.file", "tables/0009.records", "files has no 'tables/0009.records'"),
        ("inputs.features[0].rows", 2**31, r"lookups[0] names a feature and a table with other rows"),
        (
            "inputs.features[0].ids_per_bag",
            None,
            "ids_per_bag of the feature 'sparse_0' is not that of its bag and ids",
        ),
        (
            "inputs.features[0].ids_per_bag",
            2**31,
            "ids_per_bag of the feature 'sparse_0' is not that of its bag and ids",
        ),
        ("inputs.features[1].ids_per_bag", 3, "ids_per_bag of the feature 'sparse_1' is not that of its bag and ids"),
        ("inputs.features[2].arrays.weights.shape[1]", 2**31, "has float32 [b, 3] as 'weights.sparse_2', and manifest"),
        ("inputs.features[0].weighted", True, "arrays of the feature 'sparse_0' are not those of its bag"),
        ("inputs.features[1].side", "item", "side of the feature 'sparse_1' is not that of its bags"),
        ("inputs.user", DELETE, "features of users, and the array that says whose each sample is"),
        ("inputs.features[0].name", "sparse_1", "one name"),
        ("inputs.dense.columns", ["x"], "inputs.dense has another shape than its columns"),
        (
            "inputs.dense.dtype",
            "uint8",
            "program.stablehlo has float32 [b, 3] as 'dense', and manifest.json says uint8",
        ),
        ("lookups[3].feature", "sparse_0", "nothing reads the feature 'sparse_3'"),
        ("lookups[0].feature", "sparse_9", "nothing reads the feature 'sparse_0'"),
        ("lookups[3]", DELETE, "nothing reads the table 'sparse_3' where it is"),
        ("outputs.shape", ["b", 2], "outputs has another shape than its tasks"),
        ("parameters.dense[0]", DELETE, "program.stablehlo takes other parameters than manifest.json says"),
        ("model.step", -1, "model.step is -1, not an integer from 0 to"),
        ("files['parameters.npz'].bytes", [9], "files['parameters.npz'].bytes is a list, not an integer from 0 to"),
        ("files['parameters.npz'].sha256", "x", "files['parameters.npz'].sha256 is 'x', not a SHA-256"),
        ("program.platforms", "cpu", "program.platforms is 'cpu', not a list"),
        ("sparse", 1, "it has the key 'sparse'"),
        ("lookups", DELETE, "it lacks the key 'lookups'"),
    ):
        manifest = json.loads((export / "manifest.json").read_text())
        seal(export, manifest | {path: new} if path == "sparse" else edited(manifest, path, new), sums=False)
        assert what in refusal(export), path
        seal(export, manifest, sums=False)
    loader.load(export)
    folder = shutil.copytree(plain, tmp_path / "plain")
    for path, new, what in (
        ("outputs.tasks[1].first", 0, "outputs of the task 'label_1' are not where they should be"),
        ("outputs.tasks[0].outputs", 2, "outputs of the task 'label_0' are not where they should be, or not as many"),
        ("tables.sparse_0.on_disk", True, "its tables on disk have no id"),
    ):
        manifest = json.loads((folder / "manifest.json").read_text())
        seal(folder, edited(manifest, path, new), sums=False)
        assert what in refusal(folder), path
        seal(folder, manifest, sums=False)


def test_texts_that_are_no_manifest(export):
    file = export / "manifest.json"
    whole = file.read_text()
    for text, what in (
        ("[" * 100_000, "nested more than 32 deep"),
        ('{"a":' * 100_000, "nested more than 32 deep"),
        ('{"x": "' + "[" * 100_000, "Unterminated string"),
        ('\\"' * 2_000_000, "Expecting value"),
        (whole.replace('"lookups"', '"tables"'), "the key 'tables' stands twice in one object"),
        ("", "Expecting value"),
        (whole[:-9], "cannot be read"),
        ("9" * 5000, "cannot be read"),
        ("[" * 16 + "]" * 16, "is not of the format"),
        ("null", "is not of the format"),
        (" " * (2**24 + 1), "has 16,777,217 bytes, and no manifest has more"),
    ):
        file.write_text(text)
        began = time.perf_counter()
        assert what in refusal(export, loader.ExportError) and time.perf_counter() - began < 10
    file.write_bytes(b"\xff" + whole.encode())
    assert "cannot be read: 'utf-8' codec" in refusal(export)
    file.write_text(whole.replace('"step": 7', '"step": "{[\\"[[[["'))  # brackets in a text are none
    assert "its checksum differs" in refusal(export)
    file.unlink()
    os.mkfifo(file)
    assert "manifest.json cannot be read: it is no file" in refusal(export)
    file.unlink()
    assert "manifest.json does not exist. Give a folder that `recjax export` wrote" in refusal(
        export, loader.ExportError
    )


def test_what_lies_outside_of_the_folder_is_refused(export, tmp_path):
    """By its name, or through a link, also of a folder; a link to what lies inside is taken."""
    file = export / "tables/0001.records"
    file.rename(export / "tables/kept")
    file.symlink_to("kept")
    loader.load(export)
    (export / "tables/kept").rename(tmp_path / "elsewhere")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert "manifest.json names tables/0001.records, outside of its folder. Do not use" in refusal(export)
    file.unlink()
    file.symlink_to("0001.records")
    assert f"{file} is damaged" in refusal(export)
    file.unlink()
    (tmp_path / "elsewhere").rename(file)
    loader.load(export)
    (export / "tables").rename(tmp_path / "tables")
    (export / "tables").symlink_to(tmp_path / "tables")
    assert "manifest.json names tables/0000.records, outside of its folder" in refusal(export)
    (export / "tables").unlink()
    (tmp_path / "tables").rename(export / "tables")
    (export / "manifest.json").rename(tmp_path / "manifest.json")
    (export / "manifest.json").symlink_to(tmp_path / "manifest.json")
    assert "outside of its folder" in refusal(export)


# --- files with right checksums whose content is wrong ---


def npy(shape, dtype="float32", fortran=False, data=None):
    """An .npy file whose header says this, of any size."""
    stream = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, about)
    return stream.getvalue() + (b"\0" * 480 if data is None else data)


@pytest.mark.full
def test_parameters_that_are_others_than_the_program_takes(export):
    file = export / "parameters.npz"
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    first = next(iter(members))

    def written(members, compression=zipfile.ZIP_STORED):
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return file.read_bytes()

    whole = written(members)
    bomb = b"\0" * 2**26
    for content in (
        b"",
        b"PK",
        whole[: len(whole) // 2],
        whole[:-30],
        npy((4,)),
        written({name: x for name, x in members.items() if name != first}),
        written(members | {"other.npy": npy((4,))}),
        written(members | {first: npy((2**50,))}),
        written(members | {first: npy((-1, 4))}),
        written(members | {first: npy((4,), "float64")}),
        written(members | {first: np.lib.format.magic(1, 0) + b"\xff\xff" + b"(" * 60_000}),
        written(members | {first: npy((4,))[:20]}),
        written(members | {first: b"x"}),
        written(members | {first: bomb}, zipfile.ZIP_DEFLATED),
    ):
        file.write_bytes(content)
        seal(export)
        tracemalloc.start()
        assert f"{file} is damaged: " in refusal(export)
        assert tracemalloc.get_traced_memory()[1] < 2**25
        tracemalloc.stop()
    rng = random.Random(0)
    for _ in range(30):
        file.write_bytes(damage_at_random.changed(whole, rng))
        seal(export)
        try:
            loader.load(export)
        except loader.DamagedError:
            continue
        assert file.read_bytes() != whole, "a change of a number, which nothing can tell"
    file.write_bytes(whole)
    seal(export)
    loader.load(export)


@pytest.mark.parametrize("verify", [True, False])
def test_tables_that_are_others_than_the_manifest_says(plain, tmp_path, verify):
    folder = shutil.copytree(plain, tmp_path / "plain")
    file = folder / "tables/0000.npy"
    whole = file.read_bytes()
    assert whole[-480:] == np.load(file).tobytes() and np.load(file).shape == (30, 4)
    for content in (
        b"",
        whole[:50],
        whole + b"\0",
        npy((31, 4)),
        npy((2**40, 2**20)),
        npy((30, 4), ">f4"),
        npy((30, 4), "int32"),
        npy((30, 4), "O"),
        npy((120,)),
        npy((-30, -4)),
        whole.replace(b"NUMPY\x01", b"NUMPY\x07"),
        b"PK\x03\x04" + whole,
    ):
        file.write_bytes(content)
        seal(folder)
        assert f"{file} is damaged: " in refusal(folder, verify=verify)
    file.write_bytes(whole)
    seal(folder)
    swap(file, folder / "tables/0001.npy")
    assert str(file) in refusal(folder, verify=verify)


def test_programs_that_are_none(export):
    file = export / "program.stablehlo"
    whole = file.read_bytes()
    for content in (b"", b"x" * 1000, whole[:-9], whole[: len(whole) // 2], (export / "loader.py").read_bytes()):
        file.write_bytes(content)
        seal(export)
        assert str(file) in refusal(export, loader.ExportError)


# --- the command line ---


def exchange_tables(export):
    """One damage for all commands; returns what the error has to name."""
    swap(export / "tables/0000.records", export / "tables/0001.records")
    return r"0000\.records holds rows of the table 'sparse_1'"


@pytest.mark.full
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("bench", "--serve", "--seconds", "1")])
def test_commands_refuse_damaged_exports_in_a_paragraph(export, command):
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if not importlib.util.find_spec(name)]:
        pytest.skip(f"the extra `serve` is not installed: no {missing[0]}")
    verb, *options = command
    named = exchange_tables(export)
    assert_refused(inside(verb, export, *options), 3, named)


@pytest.mark.full
def test_the_loader_by_itself_refuses_damaged_exports_in_a_paragraph(export):
    """As a script, in a copy that stands apart with the modules beside it; and without them."""
    apart = export.parent / "apart"
    apart.mkdir()
    for module in export.glob("*.py"):
        shutil.copy(module, apart)

    def run():
        command = [sys.executable, apart / "loader.py", export]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    assert json.loads(run().stdout)["outputs"]["shape"] == ["b"]
    exchange_tables(export)
    done = run()
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    (apart / "manifest_form.py").unlink()
    assert f"{Path(apart) / 'manifest_form.py'} does not exist. Copy it from an export" in run().stderr
