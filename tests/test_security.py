"""Data are never code, names cannot leave their folder, and credentials stay out of what is kept or shown."""

import ast
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import shop
from support.commands import assert_refused, inside

import recjax
from recjax import settings
from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.vocabulary import Vocabulary
from recjax.errors import ConfigError, DataError
from recjax.utils.text import holds_secret, masked

PACKAGE = Path(recjax.__file__).parent
CODE = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "yaml", "joblib"}


def can_run(node, in_bench):
    """Whether a node imports what unpickles, evaluates text, or leaves NumPy free to unpickle."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in MODULES
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in CODE
    if in_bench or getattr(node.func, "attr", "") != "load" or ast.unparse(node.func) not in ("np.load", "numpy.load"):
        return False
    return not any(word.arg == "allow_pickle" and ast.unparse(word.value) == "False" for word in node.keywords)


def reads_the_environment(node):
    """Whether a function has a default of a variable's value."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None]
    return any("environ" in ast.unparse(default) for default in defaults)


@pytest.fixture(scope="module")
def places():
    """Where the package's source breaks the rules: what can run, and defaults that hold the environment."""
    run, environment = [], []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if can_run(node, file.parent.name == "bench"):
                run.append(f"{file}:{node.lineno}")
            if reads_the_environment(node):
                environment.append(f"{file}:{node.lineno}")
    return run, environment


def test_nothing_that_is_read_can_run(places):
    """By reading the source: no pickle, no eval, and NumPy told so wherever it could unpickle."""
    assert places[0] == []


def test_no_default_holds_the_environment(places):
    """`help` and the pages of the API print the values of defaults, and variables hold credentials."""
    assert places[1] == []


def test_the_rules_catch_what_they_are_for():
    wrong = ("import pickle", "from yaml import load", "import json, dill.settings", "eval(x)", "np.load(x)")
    right = ("import json", "np.load(x, allow_pickle=False)", "re.compile(x)", "model.eval()")
    for texts, expected in ((wrong, True), (right, False)):
        assert [any(can_run(n, False) for n in ast.walk(ast.parse(t))) for t in texts] == [expected] * len(texts)
    assert reads_the_environment(ast.parse("def f(*, home=os.environ['HOME']): pass").body[0])


class Evil:
    """Leaves a mark if it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (self.mark.touch, ())


def test_pickles_in_the_place_of_arrays_do_not_run(tmp_path):
    mark = tmp_path / "was-here"
    pickle.loads(pickle.dumps(Evil(mark)))
    mark.unlink()  # so the trap works
    objects = io.BytesIO()
    np.save(objects, np.array([Evil(mark)], object), allow_pickle=True)
    for data in (pickle.dumps(Evil(mark)), objects.getvalue()):
        (tmp_path / "values.npy").write_bytes(data)
        np.save(tmp_path / "rows.npy", np.array([1], np.int32))
        with pytest.raises(ValueError):
            Vocabulary.load(tmp_path, 1)
    made = shop.prepare_shop(tmp_path / "made")
    (made.path / "vocabulary/0/values.npy").write_bytes(objects.getvalue())
    with pytest.raises(DataError, match="values.npy"):
        open_encoder(made.path)
    (tmp_path / "x.npz").write_bytes(pickle.dumps(Evil(mark)))
    done = inside("weights", "import", tmp_path / "x.npz", "movietweetings", "--out", tmp_path / "run")
    assert_refused(done, 2, "x.npz cannot be read as an .npz file")
    assert not mark.exists()


def test_an_array_cannot_ask_for_memory(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }"
    head = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"
    (tmp_path / "values.npy").write_bytes(head)
    np.save(tmp_path / "rows.npy", np.array([1], np.int32))
    with pytest.raises(ValueError):
        Vocabulary.load(tmp_path, 1)


@pytest.mark.parametrize("rows", [[0, 1], [1, 3], [-1, 2]])
def test_vocabularies_cannot_point_outside_the_table(tmp_path, rows):
    np.save(tmp_path / "values.npy", np.array([5, 7]))
    np.save(tmp_path / "rows.npy", np.array(rows, np.int32))
    with pytest.raises(ValueError, match="are not 1 to 2"):
        Vocabulary.load(tmp_path, 1)


@pytest.mark.parametrize("where", ["absolute", "relative"])
def test_a_run_folder_cannot_bring_code(tmp_path, where, monkeypatch):
    """`config.json` names the code of a preset of one's own; that must not lie in what somebody sent."""
    (tmp_path / "run").mkdir()
    code = tmp_path / "run" / "evil.py"
    code.write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\n")
    plain = json.loads(settings.to_json(presets.load("movietweetings")))
    monkeypatch.chdir(tmp_path)
    name = str(code) if where == "absolute" else "run/evil.py"
    (tmp_path / "run" / "config.json").write_text(json.dumps({"class": f"{name}:Config", **plain}))
    assert_refused(inside("eval", tmp_path / "run"), 2, "must not bring its own code")
    assert not (tmp_path / "was_here").exists()


SECRETS = [
    "https://user:hunter2@host/x",
    "gs://hunter2@bucket/x",
    "s3://bucket/x?X-Amz-Signature=hunter2",
    "https://h/x?a=1&sig=hunter2&b=2",
    "az://c/x?sv=1&SharedKey=hunter2",
    "gs://bucket/x?access_token=hunter2",
]


@pytest.mark.parametrize("url", SECRETS)
def test_credentials_in_a_path_are_refused_and_not_repeated(tmp_path, url):
    for arguments in (
        ("show", "movietweetings", f"data.path={url}"),
        ("train", "movietweetings", f"data.path={url}", "--out", tmp_path / "run"),
        ("show", "movietweetings", f"plan={url}"),
        ("show", url),
        ("data", "info", url),
        ("data", "prepare", "movietweetings", "--from", url, "--out", tmp_path / "out"),
        ("data", "prepare", "movietweetings", "--from", "x", "--out", url),
    ):
        done = inside(*arguments)
        assert done.status in (2, 3)
        assert "hunter2" not in done.out + done.err
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"hunter2" not in file.read_bytes()


def test_a_config_file_cannot_hold_one_either():
    plain = json.loads(settings.to_json(presets.load("movietweetings")))
    plain["data"]["path"] = SECRETS[0]
    with pytest.raises(ConfigError) as caught:
        settings.from_json(RunConfig, json.dumps(plain))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["gs://bucket/dir", "/home/a@b/x?y", "s3://bucket/a=b", "train.steps=3", "https://host/x?page=2", "a@b"]
)
def test_what_is_no_credential_stays(text):
    assert masked(text) == text and not holds_secret(text)


@given(st.text("abcXYZ019._~-", min_size=4), st.sampled_from(["{0}:{1}@", "{1}@"]))
def test_whatever_stands_before_the_host_is_masked(secret, form):
    url = f"see https://{form.format('user', secret + '!')}host/path now"
    assert masked(url) == "see https://***@host/path now" and holds_secret(url)
