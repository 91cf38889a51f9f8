"""Weights say which values the rows of their tables stand for, and meet no data in which they stand for others."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.commands import assert_refused, inside

from recjax.interop.weights import export_weights, import_weights

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

D, USERS, KINDS = 8, 200, 4
SHAPES = {
    "emb_l.0.weight": (USERS + 1, D),
    "emb_l.1.weight": (KINDS + 1, D),
    **{"bot_l.0.weight": (12, 1), "bot_l.0.bias": (12,), "bot_l.2.weight": (D, 12), "bot_l.2.bias": (D,)},
    **{"top_l.0.weight": (16, D + 3), "top_l.0.bias": (16,), "top_l.2.weight": (1, 16), "top_l.2.bias": (1,)},
}
FIRST, SECOND = ("emb_l.0.weight", "emb_l.1.weight")


def clicks(path: Path, first_user: int, longest: str = "b") -> Path:
    """Users first to first + 199, each thrice, some more often; `longest` is a kind of the rows that only test."""
    users = [*range(first_user, first_user + USERS)] * 3 + [first_user + i % 7 for i in range(100)]
    kinds = "abcd"
    lines = [f"u{user},{kinds[user % KINDS]},{0.5 + user % 9},{user % 2},train" for user in users]
    lines += [f"u{first_user},{longest},1.5,0,test"] * 4
    path.write_text("\n".join(["user,kind,price,clicked,fold", *lines]) + "\n")
    return path


def arguments(file: Path, *more: str) -> list[str]:
    columns = "data.columns=user:id,kind:id,price:dense"
    table = (f"data.from={file}", "data.label=clicked", columns, "data.split=column", "data.split_column=fold")
    model = (
        "model=dlrm",
        "model.bottom=12-8",
        "model.top=16-1",
        "embedding.dim=8",
        "mesh.devices=1",
        "train.batch_size=100",
    )
    return ["table", *table, *model, *more]


def config_of(*words: str):
    from recjax.config import presets

    return presets.load(words[0], words[1:])


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """Weights of a run on users 0 to 199, as recjax exports them."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    weights = {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
    np.savez(tmp_path / "foreign.npz", **weights)
    config = config_of(*arguments(clicks(tmp_path / "a.csv", 0)))
    import_weights(tmp_path / "foreign.npz", config, tmp_path / "run")
    export_weights(tmp_path / "run", "facebook", tmp_path / "out.npz")
    return tmp_path / "out.npz"


def test_weights_of_other_users_are_refused(exported, tmp_path):
    other = arguments(clicks(tmp_path / "b.csv", 100))
    done = inside("weights", "import", exported, *other, "--out", tmp_path / "refused")
    assert_refused(
        done,
        2,
        "out.npz: the rows of emb_l.0.weight stand for the values of another vocabulary",
        r"\(hash [0-9a-f]{12}\) than those of feature 'user' in these data \(hash [0-9a-f]{12}\)",
        "Give the data that the weights were trained on",
    )
    assert not (tmp_path / "refused" / "config.json").exists()
    whole = arguments(clicks(tmp_path / "b.csv", 100), "data.ids=hash", f"data.ids.rows={USERS + 1},{KINDS + 1}")
    assert_refused(inside("weights", "import", exported, *whole, "--out", tmp_path / "refused"), 2, "another vocab")


def test_weights_of_the_same_values_are_taken_without_a_word(exported, tmp_path):
    """Of other rows with these users too, where text is stored wider: a hash of the values, not of the file."""
    same = arguments(clicks(tmp_path / "c.csv", 0, longest="a kind of many letters"))
    done = inside("weights", "import", exported, *same, "--out", tmp_path / "same")
    assert done.status == 0, done.err
    assert "taken as" not in done.err
    with np.load(exported) as theirs, np.load(tmp_path / "foreign.npz") as foreign:
        assert set(theirs.files) == set(foreign.files)  # other readers see the weights alone
        for key in foreign.files:
            assert theirs[key].tobytes() == foreign[key].tobytes()


def test_a_file_that_does_not_tell_is_taken_with_a_line(exported, tmp_path):
    """Of another library, of NumPy that saved it again, or of an older recjax."""
    other = arguments(clicks(tmp_path / "b.csv", 100))
    done = inside("weights", "import", tmp_path / "foreign.npz", *other, "--out", tmp_path / "taken")
    assert done.status == 0, done.err
    said = "the file does not say which values the rows of 2 table(s) stand for (user, kind): their order is taken"
    assert done.err.count(said) == 1


def test_where_the_hashes_stand(exported):
    """As the guide says: the comment of the archive's entry of each table."""
    with zipfile.ZipFile(exported) as file:
        comments = {info.filename: info.comment.decode() for info in file.infolist() if info.comment}
    assert set(comments) == {f"{FIRST}.npy", f"{SECOND}.npy"}
    for comment in comments.values():
        assert comment.startswith("recjax rows sha256:") and len(comment) == len("recjax rows sha256:") + 64
