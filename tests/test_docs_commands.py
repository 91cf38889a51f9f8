"""Commands and Python of README.md and docs/: every line is accepted, and what takes seconds is run as it is printed.

What would take longer gets the settings of `SHORTER` and is run too. `NOT_RUN` names the rest, with the reason.
"""

import json
import re
import shlex
import shutil

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from support.commands import inside
from support.criteo import random_rows, text
from support.pages import ROOT, code, inline_commands, pages, shell_lines

import recjax
from recjax.cli.lab import join_words
from recjax.cli.parser import make_parser

# That they run is claimed, and no number of theirs.
pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

# Words that a page leaves open.
FILL = {
    "PRESET": "synthetic",
    "mesh.devices=N": "mesh.devices=4",
    "model=KIND": "model=dcnv2",
    "embedding.exchange.kind=KIND": "embedding.exchange.kind=rows",
    "tier.disk=/scratch": "tier.disk=scratch",
}
# Begin of a command -> what makes it shorter. The longest one counts.
SHORTER = {
    "train": "train.steps=2 mesh.devices=1",
    "train movietweetings mesh.devices=8": "train.steps=2",
    "train runs/clicks --more": "mesh.devices=1",
    "train synthetic": "train.steps=2 mesh.devices=1 data.train_rows=4096 data.validation_rows=512 data.test_rows=512",
    "train bench_mlperf_dcnv2": (
        "train.steps=2 data.scale=0.001 data.test_rows=64 train.batch_size=64 "
        "tier.device_bytes=64MiB tier.dram_bytes=64MiB"
    ),
    "sweep": "--dry-run",
    "sweep mine.toml --dry-run": "",
    "data info zipf_stream": "max_rows=2000 --batches=3",
    "calibrate": "--quick",
}
# Pattern of a command -> why no test runs it here.
NOT_RUN = {
    r"^(pip|python3[.\d]*|python -m|sed|curl) ": "installs, asks a server, or edits this checkout",
    r"^recjax serve ": "runs until it is stopped: tests/serving/test_server.py",
    r"mesh.platform=gpu": "needs a GPU",
    r"^recjax bench bench_kaggle16$": "minutes: tests/lab/bench/test_bench.py",
    r"--against torchrec": "needs PyTorch and FBGEMM: tests/lab/bench/test_bench.py with a stand-in",
    r"^recjax data prepare (criteo|movielens|avazu|taobao|tfds|yelp|movietweetings --from FOLDER)": (
        "needs downloaded files: tests/data/ writes such files and prepares them"
    ),
    r"data.path=prepared/": "needs downloaded files",
    r"^recjax sweep mine.toml --(index|results)": "starts a process for each run: tests/sweep/test_run.py",
    r"^recjax study ": "minutes: tests/lab/studies/",
    r"^python benchmarks/": "measures, for minutes",
    r"data.where=|new.parquet|next_week.parquet": "a table of more columns: tests/data/test_transforms.py",
    r"shop.parquet": "a table of other columns: tests/data/test_shared_vocabularies.py",
    r"^recjax tune ": "needs Optuna, and minutes: tests/sweep/test_tune.py",
    r"^recjax weights|runs/imported": "needs a state dict of PyTorch: tests/test_weights.py",
    r"^python exported/loader.py": "in a process without recjax: tests/serving/test_export.py",
    r"^launch/local.sh": "tests/launch/test_local.py",
    r"DLRM_HybridParallel|pytorch/et": "needs files of other programs: tests/lab/simulate/, tests/lab/trace/",
    r"^recjax simulate workload hoti2020": "half a minute: tests/lab/studies/test_hoti2020.py",
    r"mesh.devices=64 --compile": "starts JAX with 64 devices: tests/train/test_compile_report.py",
    r"^recjax trace.*(--vary|traces/plan/)": "a minute: tests/lab/trace/",
    r"products\.json": "measures, for half a minute: tests/train/test_products.py",
    r"--measure": "half a minute: tests/lab/predict/test_plan_predict.py",
}


LISTED = [words for page in pages() for words in (*shell_lines(page), *inline_commands(page)) if words[0] == "recjax"]


def reason(words):
    line = shlex.join(words)
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), "")


def refusal(words):
    """Why a command is not accepted, by its verb, options, preset and settings; nothing is run."""
    try:
        options, rest = make_parser().parse_known_args(join_words([FILL.get(word, word) for word in words[1:]]))
        if getattr(options, "preset", None) and not getattr(options, "more", None):  # with it, a run folder
            recjax.load(options.preset, [*options.overrides, *rest])
    except (SystemExit, recjax.errors.RecjaxError) as error:
        return f"{shlex.join(words)}: {error!r}"
    unknown = [word for word in rest if "=" not in word or word.startswith("-")]
    return f"{shlex.join(words)}: {unknown}" if unknown else None


def test_all_are_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(LISTED) > 100 and [why for words in LISTED if (why := refusal(words))] == []
    for wrong in ("train --nothing", "nothing", "train no_preset", "train synthetic train.nothing=1"):
        assert refusal(["recjax", *wrong.split()])


# What a page's commands find when they begin, and what ran before them on another page.
BEFORE = {
    "lab/simulate.md": ["trace movietweetings train.batch_size=128 --steps=2 --out traces/first"],
    "guides/tiers.md": ["data prepare criteo_kaggle --from raw --out DIR"],
    "guides/export.md": ["train movietweetings train.steps=2 mesh.devices=1 --out runs/mine"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that pages name: tables of 400 clicks, a click log, rows to score, sweeps."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    clicked, stars = random.integers(0, 2, 400), random.integers(1, 6, 400)
    table = pa.table(
        {
            "user": random.integers(0, 40, 400),
            "price": random.random(400),
            "tags": [["a", "b"][: k % 3] for k in stars],
            "clicked": clicked,
            "bought": clicked * random.integers(0, 2, 400),
            "rating": stars * 1.5,
            "stars": stars,
        }
    )
    parquet.write_table(table, "clicks.parquet")
    for day in ("tuesday", "wednesday", "thursday", "friday"):  # of which some users are new
        of_day = table.set_column(0, "user", pa.array(random.integers(20, 60, 400)))
        parquet.write_table(of_day, f"{day}.parquet")
    joined = table.drop_columns(["tags"]).append_column("tags", pa.array(["a|b"] * 400))
    csv.write_csv(joined, "clicks.csv")
    csv.write_csv(joined.drop_columns(["clicked"]), "new.csv")
    events = {"user": random.integers(0, 9, 90), "item": random.integers(0, 20, 90), "time": 1e9 + np.arange(90)}
    csv.write_csv(pa.table(events | {"rating": stars[:90], "clicked": clicked[:90]}), "log.csv")
    offered = [[{"item": f"i{i % 9}", "clicked": i % 3 // 2} for i in range(n, n + 4)] for n in range(60)]
    rows = [{"user": f"u{n % 7}", "history": [{"item": f"i{n % 9}"}], "candidates": offered[n]} for n in range(60)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = {"user": random.integers(0, 40, 400), "item": random.integers(0, 60, 400), "time": np.arange(400)}
    csv.write_csv(pa.table(pairs), "pairs.csv")
    shutil.copy(ROOT / "recjax/planning/machines/h100.json", "machine.json")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/train.txt").write_bytes(text(random_rows(3000)))
    (tmp_path / "rows.jsonl").write_text(
        '{"user": 6, "movie": 1483013, "genres": ["Action"], "year": null, "time": 1373234211}\n'
    )
    for name, block in zip(("mine.toml", "search.toml"), code(ROOT / "docs/guides/sweeps.md", "toml"), strict=True):
        (tmp_path / name).write_text(block)
    return tmp_path


def shorter(line):
    begins = [begin for begin in SHORTER if line.startswith(begin)]
    return SHORTER[max(begins, key=len)].split() if begins else []


def runnable(page):
    return [words for words in shell_lines(page) if not reason(words)]


AGAIN = ("README.md", "docs/index.md")  # of which other pages have all commands
# They take the longest. `recjax bench` of tuning.md is also in kernels.md.
WIDE = (
    "foresight.md",
    "replica_groups.md",
    "optimizers.md",
    "several_labels.md",
    "tiers.md",
    "dynamic_ids.md",
    "tuning.md",
)
PAGES = [page for page in pages() if runnable(page) and str(page.relative_to(ROOT)) not in AGAIN]


def test_no_command_is_in_a_block_that_is_not_read():
    """`shell_lines` reads `bash`, and what follows `$ ` in blocks of output."""
    unread = re.compile(r"^( *```(?:sh|shell|zsh|console)\b)", re.M)
    assert [(page.name, block) for page in pages() for block in unread.findall(page.read_text())] == []


def test_reasons_hold_and_name_tests_that_are_there():
    lines = [shlex.join(words) for page in pages() for words in shell_lines(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, line) for line in lines)] == []
    named = [name for why in NOT_RUN.values() for name in re.findall(r"tests/[\w/.]+", why)]
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_no_command_of_the_first_pages_is_theirs_alone():
    others = [words for page in PAGES for words in shell_lines(page)]
    assert [words for name in AGAIN for words in runnable(ROOT / name) if words not in others] == []


@pytest.mark.full
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.wide] if page.name in WIDE else [], id=page.stem) for page in PAGES]
)
def test_run_one_after_the_other(page, folder):
    before = BEFORE.get(str(page.relative_to(ROOT / "docs")), ())
    for words in [*(["recjax", *line.split()] for line in before), *runnable(page)]:
        assert words[0] == "recjax", words
        line = shlex.join(words[1:])
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules rely on it
            done = inside(*(FILL.get(word, word) for word in words[1:]), *shorter(line))
        assert done.status == 0, (line, done.err)


# Python of a page, its blocks one after the other -> what is shorter here, as text to replace.
QUICK = {
    '"train.epochs": 2, "mesh.devices": 4': '"train.steps": 2, "mesh.devices": 1',
    '{"data.path": "prepared/"}': '{"data.path": "prepared/", "train.steps": 2, "mesh.devices": 1}',
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["README.md", "docs/getting_started/python.md", "docs/guides/own_data.md"])
def test_python_runs(name, folder):
    text = "\n".join(code(ROOT / name, "python"))
    for old, new in QUICK.items():
        text = text.replace(old, new)
    assert "train.steps" in text
    table = parquet.read_table("clicks.parquet").select(["user", "tags", "price", "clicked"])
    exec(compile(text, name, "exec"), {"__name__": "page", "frame": table, "new_rows": table})
