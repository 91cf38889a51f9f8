"""`recjax predict`: scores in the order of the input, equal to those of the evaluation, from the run folder alone."""

import csv
import gzip
import json
import math
import shutil

import numpy as np
import pytest
from support.commands import SMALL, assert_refused, contents, inside, prepare
from support.shop import ROWS, Reader, prepare_shop, rows

import recjax
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.prepare.chunk import Column
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.errors import DataError
from recjax.serving.predict import predict
from recjax.train.run.open_run import open_run

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

# 700 rows: two batches of 256, and a rest.
TRAIN = ("seed=1", "mesh.devices=2", "train.epochs=1", "train.batch_size=64", "train.eval_batch_size=256")


def write(path, made):
    path.write_text("".join(json.dumps({**row, "note": "not a column"}) + "\n" for row in made), encoding="utf-8")
    return path


def scores(path):
    """(rows, logits, probabilities) of a file of scores."""
    if path.suffix == ".csv":
        with path.open() as file:
            table = list(csv.DictReader(file))
    else:
        table = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(list(line) == ["row", "logit", "probability"] for line in table)
    return tuple(np.array([float(line[name]) for line in table]) for name in ("row", "logit", "probability"))


def train(preset, data, run, *more):
    return inside("train", preset, "data=prepared", f"data.path={data}", *TRAIN, "--out", run, *more)


@pytest.fixture(scope="module")
def shop(preset, tmp_path_factory):
    """Prepared data and a run on them; then the data are moved away."""
    folder = tmp_path_factory.mktemp("shop")
    prepare_shop(folder / "data")
    done = train(preset, folder / "data", folder / "run", "train.eval_every=3", "--json")
    (folder / "data").rename(folder / "elsewhere")
    return folder, done.result


def trained_on(folder):
    return f"data.path={folder / 'elsewhere'}"


def test_raw_rows_have_the_scores_of_the_prepared_ones(shop, tmp_path):
    folder, summary = shop
    file = write(tmp_path / "rows.jsonl", rows())
    result = inside("predict", folder / "run", "--input", file, "--out", tmp_path / "scores.csv", "--json").result
    number, logits, probabilities = scores(tmp_path / "scores.csv")
    assert number.tolist() == list(range(1, ROWS + 1))
    assert result == {
        "step": summary["eval_step"],  # the checkpoint that validation chose
        "input": str(file),
        "out": str(tmp_path / "scores.csv"),
        "rows": ROWS,
        "skipped": 0,
        "mean_probability": pytest.approx(probabilities.mean(), rel=1e-6),
    }
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-logits)), rtol=1e-6)
    trainer, state, _ = open_run(folder / "run", [trained_on(folder)], (), summary["eval_step"], print)
    for split, part in (("train", slice(0, 500)), ("validation", slice(500, 600)), ("test", slice(600, 700))):
        truth = np.concatenate([logits for _, logits in trainer.predict(state, trainer.eval_inputs(split))])
        np.testing.assert_allclose(logits[part], truth, rtol=1e-5, atol=1e-6)
        out = tmp_path / f"{split}.jsonl"
        inside("predict", folder / "run", "--input", folder / "elsewhere", "--split", split, "--out", out)
        np.testing.assert_allclose(scores(out)[1], truth, rtol=1e-5, atol=1e-6)
        if split == "train":  # in the same batches
            assert (scores(out)[1].astype(np.float32) == truth).all(), "nine digits hold a float32"
    assert len(np.unique(logits)) > ROWS / 2


def test_any_mesh_step_and_python(shop, tmp_path):
    folder, summary = shop
    file = write(tmp_path / "rows.jsonl", rows())
    with gzip.open(tmp_path / "zipped.jsonl.gz", "wb") as zipped:
        zipped.write(file.read_bytes())
    inside("predict", folder / "run", "--input", file, "--out", tmp_path / "two.csv")
    other = ("mesh.devices=3", "train.eval_batch_size=100")
    inside("predict", folder / "run", "--input", tmp_path / "zipped.jsonl.gz", "--out", tmp_path / "three.csv", *other)
    np.testing.assert_allclose(scores(tmp_path / "two.csv")[1], scores(tmp_path / "three.csv")[1], rtol=0, atol=1e-5)
    last = recjax.predict(folder / "run", file, tmp_path / "last.csv", step=summary["steps"])
    assert last["step"] == summary["steps"] != summary["eval_step"]
    assert (scores(tmp_path / "last.csv")[1] != scores(tmp_path / "two.csv")[1]).any()


def test_plans_that_depend_on_data_do_without_them(shop, tmp_path):
    """The run folder has no rows to count: of jagged bags, for owners that pool, and for hot rows."""
    folder, _ = shop
    file = write(tmp_path / "rows.jsonl", rows())
    found = []
    for number, how in enumerate(
        (["plan=row_wise"], ["plan=table_wise"], ["plan=balanced"], ["plan=row_wise", "embedding.hot.rows=auto"])
    ):
        out = tmp_path / f"{number}.csv"
        done = inside("predict", folder / "run", "--input", file, "--out", out, *how)
        assert done.status == 0, done.err
        found.append(scores(out)[1])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-5)


def test_values_that_training_never_saw(shop, tmp_path):
    """A new user is every other new user, and a new tag a tag that is too rare."""
    folder, _ = shop
    row = rows()[0]
    file = write(tmp_path / "rows.jsonl", [row | {"user": user} for user in (-(10**15), 10**18)])
    (tmp_path / "scores.csv").symlink_to("there.csv")
    predict(folder / "run", file, tmp_path / "scores.csv", [])
    assert (tmp_path / "scores.csv").is_symlink() and (tmp_path / "there.csv").is_file()
    _, logits, _ = scores(tmp_path / "scores.csv")
    assert logits[0] == logits[1]


def test_a_damaged_best_checkpoint(shop, tmp_path):
    folder, summary = shop
    run = shutil.copytree(folder / "run", tmp_path / "run")
    (run / "checkpoints" / f"{summary['eval_step']:08}" / "manifest.json").unlink()
    file = write(tmp_path / "rows.jsonl", rows())
    done = inside("predict", run, "--input", file, "--out", tmp_path / "scores.csv", "--json")
    assert done.result["step"] == summary["steps"]
    assert f"The newest, of step {summary['steps']}, is used" in done.err


BAD = [
    ("{", r"rows\.jsonl:3: not valid JSON"),
    ("[1]", r"rows\.jsonl:3: '\[1\]' is no JSON object"),
    (
        '{"user": 1, "cty": "B"}',
        r"rows\.jsonl:3: the key 'city' is missing; the row has user, cty\. Rename 'cty', or add 'city', with null",
    ),
    ({"user": "7"}, r"rows\.jsonl:3: 'user' is \"7\", not an integer of 64 bits\. Correct the value, or give null"),
    ({"user": True}, r"'user' is true, not an integer"),
    ({"user": 6.5}, r"'user' is 6\.5, not an integer"),
    ({"user": 2**63}, r"'user' is 9223372036854775808, not an integer of 64 bits"),
    ({"city": 4}, r"rows\.jsonl:3: 'city' is 4, not text \(Unicode.*\)\. Correct .*, or give null where it is missing"),
    ({"city": "a\0"}, r"'city' is \"a\\u0000\", not text"),
    ({"city": "\ud800"}, r"rows\.jsonl:3: half of a surrogate pair, .*\"city\": \"\\ud800\""),
    ({"tags": "t1"}, r"rows\.jsonl:3: 'tags' is \"t1\", not a list of values"),
    ({"tags": [4]}, r"'tags' is 4, not text"),
    ({"age": "4"}, r"rows\.jsonl:3: 'age' is \"4\", not a number"),
    ({"age": math.nan}, r"'age' is NaN, not a number"),
    ({"age": 1e39}, r"rows\.jsonl:3: 'age' is 1e\+39, not a number of float32"),
]


@pytest.mark.parametrize(("change", "pattern"), BAD, ids=[str(change) for change, _ in BAD])
def test_a_malformed_row_is_named_and_nothing_is_written(shop, tmp_path, change, pattern):
    folder, _ = shop
    made = rows()[:4]
    file = write(tmp_path / "rows.jsonl", made)
    lines = file.read_text().splitlines()
    lines[2] = change if isinstance(change, str) else json.dumps(made[2] | change)
    file.write_text("\n".join(lines))
    old = "row,logit,probability\n1,0,0.5\n"
    (tmp_path / "scores.csv").write_text(old)
    done = inside("predict", folder / "run", "--input", file, "--out", tmp_path / "scores.csv")
    assert_refused(done, 3, pattern)
    assert (tmp_path / "scores.csv").read_text() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "scores.csv"]


def test_numbers_that_are_too_large_cost_their_rows_alone(preset, tmp_path):
    """One that float32 does not hold, one whose transform it does not hold, and one that the model squares."""
    rng = np.random.default_rng(0)
    table = {"id": [f"i{at % 7}" for at in range(500)], "price": rng.normal(0, 1e-3, 500), "y": np.arange(500) % 2}
    recjax.prepare(table, "y", tmp_path / "data", columns="id:id,price:dense")
    assert train(preset, tmp_path / "data", tmp_path / "run", "model=dcnv2").status == 0
    made = [{"id": f"i{at}", "price": 0.001} for at in range(9)]
    large = [row | {"price": {2: 1e39, 4: 3e38, 7: -1e30}.get(at, 0.001)} for at, row in enumerate(made)]
    for name, each in (("plain", made), ("large", large)):
        predict(tmp_path / "run", write(tmp_path / "rows.jsonl", each), tmp_path / f"{name}.csv", ["on_error=skip"])
    numbers, logits, _ = scores(tmp_path / "large.csv")
    assert numbers.tolist() == [1, 2, 4, 6, 7, 9]
    np.testing.assert_allclose(logits, scores(tmp_path / "plain.csv")[1][[0, 1, 3, 5, 6, 8]], rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match="left out 1 row.s. of .*None is left to score"):
        predict(tmp_path / "run", write(tmp_path / "rows.jsonl", large[7:8]), tmp_path / "none.csv", ["on_error=skip"])
    for at, words in (
        (2, "row 3: column 'price' is '1e.39', not a number of float32"),
        (4, "row 5: dense column 'price' becomes inf as the model takes it"),
        (7, "row 8: dense column 'price' becomes -[0-9.]+e.3[0-9] .* no finite score"),
    ):
        file = write(tmp_path / "rows.jsonl", made[:at] + [large[at]])
        done = inside("predict", tmp_path / "run", "--input", file, "--out", tmp_path / "one.csv")
        assert_refused(done, 3, rf"rows\.jsonl:{at + 1}: {words}.*Correct the value\. Or leave such rows out")


def test_mistakes(shop, preset, good, tmp_path):
    folder, _ = shop
    file, out = write(tmp_path / "rows.jsonl", rows()[:4]), tmp_path / "scores.csv"
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(file.read_bytes())[:-9])
    (tmp_path / "folder.csv").mkdir()
    for input, given, status, pattern in (
        (file, tmp_path / "scores.txt", 2, r"ends in \.csv, \.jsonl or \.parquet"),
        (file, tmp_path / "folder.csv", 2, r"folder\.csv names no file of scores"),
        (file, file, 2, r"--out \S+rows\.jsonl is the input itself"),
        (file, tmp_path / "nowhere" / "scores.csv", 1, r"cannot write \S+scores\.csv: No such file or directory"),
        (tmp_path / "nothing.jsonl", out, 3, r"nothing\.jsonl does not exist"),
        (tmp_path / "empty.jsonl", out, 3, r"empty\.jsonl is empty"),
        (tmp_path / "cut.jsonl.gz", out, 3, r"cut\.jsonl\.gz is no complete gzip file"),
        (write(tmp_path / "rows.txt", rows()[:4]), out, 2, r"as JSON Lines only.* user, city, tags, age, price"),
        (good, out, 3, "have other columns than those that the run was trained on"),
        (tmp_path / "folder.csv", out, 3, "no prepared data"),
    ):
        assert_refused(inside("predict", folder / "run", "--input", input, "--out", given), status, pattern)
        assert not out.exists()
    assert inside("train", preset, *SMALL, "--out", tmp_path / "run").status == 0
    done = inside("predict", tmp_path / "run", "--input", file, "--out", out)
    assert_refused(done, 2, r"the data of this run \(synthetic\) do not come from files")


def test_prepared_data_with_other_vocabularies_are_refused(shop, preset, tmp_path):
    folder, _ = shop

    class Other(Reader):
        def chunks(self, start):
            for chunk in super().chunks(start):
                user = chunk.columns["user"]
                chunk.columns["user"] = Column(user.keys + 1)  # as many rows, of other users
                yield chunk

    before, other = (
        source.about["vocabularies"]["user"]["sha256"][:15]
        for source in (open_prepared(folder / "elsewhere"), prepare_shop(tmp_path / "other", Other))
    )
    refusal = (
        "have other vocabularies than those that the run was trained on",
        f'user.sha256: "{before}... there, "{other}',
        "their ids stand for other values",
    )
    done = inside("predict", folder / "run", "--input", tmp_path / "other", "--out", tmp_path / "scores.csv")
    assert_refused(done, 3, *refusal)
    # Nor is the run evaluated or resumed on them, though their ids, and so their fingerprints, are the same.
    assert_refused(inside("eval", folder / "run", f"data.path={tmp_path / 'other'}"), 3, *refusal)
    kept = contents(folder / "run")
    done = train(preset, tmp_path / "other", folder / "run", "train.eval_every=3")
    assert_refused(done, 3, *refusal)
    assert contents(folder / "run") == kept


def test_data_without_vocabularies(preset, tmp_path):
    """Blocks of one's own code: they can be scored, but raw rows cannot be encoded."""
    data = prepare(tmp_path / "data")
    assert train(preset, data, tmp_path / "run").status == 0
    done = inside("predict", tmp_path / "run", "--input", data, "--out", tmp_path / "scores.jsonl", "--json")
    assert done.result["rows"] == 300 == len(scores(tmp_path / "scores.jsonl")[0])
    file = write(tmp_path / "rows.jsonl", rows()[:4])
    done = inside("predict", tmp_path / "run", "--input", file, "--out", tmp_path / "scores.csv")
    assert_refused(done, 3, "do not say how raw rows become ids", "write them with .*write_prepared", "as the input")
    other = tmp_path / "other"
    schema = Schema(("d0", "d1"), (Feature("x", 10), Feature("z", 20, None)))
    tags = Bags(np.zeros(0, int), np.zeros(2, int))
    block = Batch(np.zeros((2, 2)), {"x": [1, 2], "z": tags}, np.zeros(2), None)
    write_prepared(other, "own", schema, {"test": block}, {})
    done = inside("predict", tmp_path / "run", "--input", other, "--out", tmp_path / "scores.csv")
    refusal = assert_refused(done, 3, "have other columns", "Encode the rows as you encoded those of training")
    assert "raw rows as a file" not in refusal


def test_what_the_run_kept_is_verified(shop, tmp_path):
    folder, _ = shop
    run = shutil.copytree(folder / "run", tmp_path / "run")
    values = next((run / "data").rglob("values.npy"))
    content = bytearray(values.read_bytes())
    content[-1] ^= 1
    values.write_bytes(content)
    done = inside("predict", run, "--input", write(tmp_path / "rows.jsonl", rows()), "--out", tmp_path / "scores.csv")
    assert_refused(done, 3, r"what the run kept of its data is damaged: .*values\.npy")
    assert not (folder / "run" / "data" / "blocks").exists()


def test_slices_are_named_by_value_and_unknown_values_form_no_group(shop):
    folder, _ = shop
    result = inside(
        "eval", folder / "run", trained_on(folder), "--by", "city", "--by", "tags", "--group", "user", "--json"
    ).result
    test = rows()[600:]
    cities = {row["value"]: row["samples"] for row in result["by"]["city"]}
    assert cities["missing"] == sum(row["city"] is None for row in test)
    assert cities["Zürich 3"] == sum(row["city"] == "Zürich 3" for row in test)
    tags = {row["value"]: row["samples"] for row in result["by"]["tags"]}
    assert tags["t2"] == sum("t2" in row["tags"] for row in test)
    assert tags["no value"] == sum(not row["tags"] for row in test)
    known = [row["user"] for row in rows()[:500]]
    strangers = sum(known.count(row["user"]) < 2 for row in test)
    assert result["grouped"]["shared_share"] == pytest.approx(strangers / 100) and strangers > 3


def table(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file]


def test_columns_of_the_input_beside_the_scores(shop, tmp_path):
    """As they are given, whether the model knows them or not."""
    folder, _ = shop
    made = [row | {"request": f'"{i}", é'} for i, row in enumerate(rows()[:300])]
    made[7].pop("request")
    made[8]["user"] = float(made[8]["user"])
    file = write(tmp_path / "rows.jsonl", made)
    names = ["user", "request", "city", "tags", "price"]
    inside("predict", folder / "run", "--input", file, "--out", tmp_path / "plain.csv")
    for out in (tmp_path / "scores.jsonl", tmp_path / "scores.csv"):
        done = inside("predict", folder / "run", "--input", file, "--out", out, "--columns", ",".join(names))
        assert done.status == 0, done.err
        found = table(out)
        assert list(found[0]) == ["row", "logit", "probability", *names]
        assert [float(row["logit"]) for row in found] == scores(tmp_path / "plain.csv")[1].tolist()
        for ours, theirs in zip(found, made, strict=True):
            wanted = {name: theirs.get(name) for name in names}
            if out.suffix == ".csv":
                wanted |= {"tags": json.dumps(theirs["tags"]), "user": json.dumps(theirs["user"])}
                wanted |= {name: str(value) if value is not None else "" for name, value in wanted.items()}
            assert {name: ours[name] for name in names} == wanted
    recjax.predict(folder / "run", file, tmp_path / "all.jsonl", columns="all")
    wanted = "row logit probability user city tags age price request note"
    assert list(table(tmp_path / "all.jsonl")[9]) == wanted.split()


def test_columns_of_prepared_data(shop, tmp_path):
    """By value, where the data tell; those of one's own code as they are."""
    folder, _ = shop
    test = rows()[600:]
    recjax.predict(folder / "run", folder / "elsewhere", tmp_path / "scores.jsonl", columns=["city", "tags"])
    known = {tag for row in rows()[:500] for tag in row["tags"]}
    for ours, theirs in zip(table(tmp_path / "scores.jsonl"), test, strict=True):
        assert ours["city"] in (theirs["city"] or "missing", "unknown")
        assert ours["tags"] == [tag if tag in known else "unknown" for tag in theirs["tags"]]
    assert ours["row"] == 100
    done = inside(
        "predict", folder / "run", "--input", folder / "elsewhere", "--out", tmp_path / "new.csv", "--columns", "cty"
    )
    assert_refused(done, 3, "have no column 'cty' to carry. They have user, city, tags, age, price")


def test_malformed_rows_are_left_out_if_asked(shop, tmp_path):
    folder, _ = shop
    made = rows()[:400]
    file = write(tmp_path / "rows.jsonl", made)
    inside("predict", folder / "run", "--input", file, "--out", tmp_path / "whole.csv")
    lines = file.read_text().splitlines()
    for at in (0, 5, 299, 300, 399):
        lines[at] = lines[at].replace('"user"', '"usr"')
    file.write_text("\n".join(lines) + "\n")
    done = inside(
        "predict", folder / "run", "--input", file, "--out", tmp_path / "scores.csv", "on_error=skip", "--json"
    )
    assert (done.result["rows"], done.result["skipped"]) == (395, 5)
    (note,) = [line for line in done.err.splitlines() if line.startswith("on_error=skip left out 5 row(s) of ")]
    assert "line 1: the key 'user' is missing" in note and "line 6: " in note and "line 300: " in note
    assert note.endswith("; and 2 more")
    kept = [n for n in range(1, 401) if n - 1 not in (0, 5, 299, 300, 399)]
    assert scores(tmp_path / "scores.csv")[0].tolist() == kept
    whole = scores(tmp_path / "whole.csv")[1][np.array(kept) - 1]
    np.testing.assert_allclose(scores(tmp_path / "scores.csv")[1], whole, rtol=1e-5, atol=1e-6)
    file.write_text("{}\n{}\n")
    done = inside("predict", folder / "run", "--input", file, "--out", tmp_path / "scores.csv", "on_error=skip")
    assert_refused(done, 3, r"left out 2 row\(s\) of .*None is left to score")
    assert len(scores(tmp_path / "scores.csv")[0]) == 395
    done = inside("predict", folder / "run", "--input", file, "--out", tmp_path / "scores.csv", "on_error=skp")
    assert_refused(done, 2, "expected on_error=stop or on_error=skip")


def test_only_files_of_scores_are_replaced_unasked(shop, tmp_path):
    folder, _ = shop
    file = write(tmp_path / "rows.jsonl", rows()[:4])
    command = ("predict", folder / "run", "--input", file, "--out")
    for name, content in (("mine.csv", "row,name\n1,a\n"), ("mine.jsonl", '{"row": 1}\n')):
        out = tmp_path / name
        out.write_text(content)
        assert_refused(inside(*command, out), 2, "is no file of scores, so it is not replaced unasked", "--overwrite")
        assert out.read_text() == content
        for options in (["--overwrite"], ["--columns", "user"], []):
            assert inside(*command, out, *options).status == 0
            assert len(table(out)) == 4
    (tmp_path / "empty.csv").touch()
    assert inside(*command, tmp_path / "empty.csv").status == 0
    for columns, pattern in (("row", "'row' would stand in the scores twice"), ("user,user", "'user' would stand")):
        assert_refused(inside(*command, tmp_path / "new.csv", "--columns", columns), 2, pattern)
    done = inside(*command, tmp_path / "new.csv", "--columns", "usr")
    assert_refused(done, 3, r"no row from line 1 to 4 has the key 'usr', .*carried\. The first of them has user, city")
