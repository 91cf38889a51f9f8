"""Damaged files of every kind that recjax reads, and what its readers make of them.

A reader must accept an input or refuse it with a `RecjaxError`; anything else is a defect. `TARGETS` holds the readers,
`damaged` the ways of damage; an input is a function of (reader, number) alone.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from recjax import settings
from recjax.config import presets
from recjax.data.datasets import avazu, criteo, movielens, movietweetings, own_table, taobao, yelp
from recjax.data.pipeline import batches
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.work_folder import WorkFolder
from recjax.data.source import SPLITS
from recjax.data.storage import manifest
from recjax.data.storage.blocks import open_prepared
from recjax.data.storage.run_snapshot import open_snapshot, snapshot_data
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.spec import TableSpec
from recjax.interop.weights import _open as open_weights
from recjax.planning import machine
from recjax.planning.machine import open_machine
from recjax.serving import rows
from recjax.serving.faults import RowFaults
from recjax.sweep.file import read_sweep
from recjax.train.checkpoint import manifest as checkpoints
from recjax.train.metrics.drift import read_profile
from recjax.train.run import sources
from recjax.train.run.folder import read_config
from support import damage_at_random as damage
from support import fuzz_tools, shop, tables
from support import yelp as yelp_support
from support.criteo import random_rows, text
from support.fuzz_target import Random, Target, good, texts
from support.machines import MACHINE

# Texts in the datasets' formats.

AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
    + "".join(
        f"{i}000009418151094273,{i % 2},141021{i % 24:02},1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,"
        f"a99f214a,ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79\n".replace("141021", f"1410{21 + i // 5}")
        for i in range(1, 20)
    )
)
TAOBAO = {
    "raw_sample.csv": "user,time_stamp,adgroup_id,pid,nonclk,clk\n"
    + "".join(f"{i % 3},{1494000000 + 40000 * i},{i % 4},43_{i % 2},1,{i % 2}\n" for i in range(20)),
    "ad_feature.csv": "adgroup_id,cate_id,campaign_id,customer,brand,price\n1,6,8,1,NULL,170.0\n2,39,7,5,,0.01\n",
    "user_profile.csv": "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,"
    "occupation,new_user_class_level \n1,0,5,2,5,,3,0,3\n2,5,2,2,2,1,3,1,2\n",
}
MOVIETWEETINGS = {
    "ratings.dat": "".join(f"{i % 5}::{i % 3}::{i % 11}::{10**9 + i}\n" for i in range(20)),
    "movies.dat": "0::Die Stille (1990)::Drama|Comedy\n1::Misérables, Les (1995)::\n2::x (2001)::War\n",
}
LATEST = {
    "ratings.csv": "userId,movieId,rating,timestamp\n"
    + "".join(f"{i % 5},{i % 3},{0.5 + i % 9 / 2},{10**9 + i}\n" for i in range(20)),
    "movies.csv": 'movieId,title,genres\n0,"Great, The (2013)",Drama|War\n1,Some (1990),(no genres listed)\n2,x,War\n',
    "tags.csv": 'userId,movieId,tag,timestamp\n1,0,"slow, very",1000000003\n2,1,dark,1000000001\n',
}
ONE_M = {
    "ratings.dat": "".join(f"{i % 5}::{i % 3}::{1 + i % 5}::{10**9 + i}\n" for i in range(20)),
    "movies.dat": MOVIETWEETINGS["movies.dat"],
    "users.dat": "".join(f"{i}::F::25::{i}::4806{i}\n" for i in range(5)),
}
HUNDRED_K = {
    "u.data": "".join(f"{i % 5}\t{i % 3}\t{1 + i % 5}\t{10**9 + i}\n" for i in range(20)),
    "u.item": "".join(f"{i}|Misérables (199{i})|01-Jan-1995|||{'|'.join('01'[i % 2] * 19)}\n" for i in range(3)),
    "u.user": "".join(f"{i}|2{i}|F|other|T8H1{i}\n" for i in range(5)),
}
SWEEP = """\
preset = "synthetic"
overrides = ["train.epochs=1"]
sort = "validation.auc"
[grid]
seed = [0, 1, 2]
embedding.dim = [4, 16]
model.top = [[64, 1], [32, 1]]
[zip]
"train.batch_size" = [512, 1024]
"train.optimizer.learning_rate" = [0.1, 0.2]
"""
PLAN = json.dumps(
    {
        "format": "recjax-plan/1",
        "tables": {
            "t": [
                {"placement": "row_wise", "rows": "rest", "exchange": {"forward": "int8"}, "owners": [1, 0]},
                {"placement": "data_parallel", "rows": {"ids": "hot.txt"}},
                {"placement": "table_wise", "rows": {"ids": "warm.npy"}, "columns": [0, 3], "owners": 2},
                {"placement": "column_wise", "rows": {"ids": "warm.npy"}, "columns": [3, 8]},
                {"placement": "table_row_wise", "rows": {"ids": [5, 7, 11]}, "owners": 0},
            ]
        },
    }
)


def chunks(open_raw: Callable[..., Any], config: Any) -> Callable[[Path], None]:
    """Reads a dataset's raw files."""

    def read(folder: Path) -> None:
        for _ in open_raw(config, folder).chunks(0):
            pass

    return read


def read_blocks(folder: Path) -> None:
    source = open_prepared(folder)
    for split in source._counts:
        for index in range(min(10, len(source.row_counts(split)))):
            source.read(split, index)
    open_encoder(folder)


def pack_shop(folder: Path) -> None:
    prepare(folder)
    read_packed(folder)


def read_packed(folder: Path) -> None:
    """Reads rows, which are packed where they are not, beside the blocks or in a cache folder beside all of it."""
    source = open_prepared(folder)
    with mock.patch.dict(os.environ, RECJAX_CACHE=str(folder.with_name("cache"))):
        for split in SPLITS:
            if source.row_counts(split).sum():
                for _ in batches(source, split, 512, shuffle=True, epochs=1, workers=0, pack=True):
                    pass


def prepare(folder: Path) -> None:
    made = shop.prepare_shop(folder.with_name("made"))
    shutil.copytree(made.path, folder, dirs_exist_ok=True)


def keep_some(folder: Path) -> None:
    prepare(folder.with_name("whole"))
    snapshot_data(open_prepared(folder.with_name("whole")), folder / "data")


def renew_fingerprint(folder: Path, rng: Random) -> None:
    """Lets the manifest fit the files and itself, as if somebody had written it so."""
    file = next(iter(folder.rglob("recjax.json")), None)
    if file is None or not file.is_file() or rng.random() < 0.3:
        return
    try:
        raw = json.loads(file.read_text())
        for name, entry in raw["files"].items():
            if (file.parent / name).is_file():
                data = (file.parent / name).read_bytes()
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        raw["fingerprint"] = manifest.fingerprint(raw["dataset"], raw["schema"], raw["splits"])
        file.write_text(json.dumps(raw))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return


def seal(folder: Path) -> None:
    (folder / "tables").mkdir()
    (folder / "tables" / "t.npy").write_bytes(b"x" * 100)
    (folder / "small.json").write_text("{}")
    checkpoints.seal(folder, {"step": 3, "tables": {"t": {"rows": 4}}})


def reseal(folder: Path, rng: Random) -> None:
    if all(file.is_file() for file in _sealed(folder)) and rng.random() < 0.8:
        file = folder / "manifest.json"
        (folder / "manifest.sha256").write_bytes(checkpoints._checksum_line(file.read_bytes()))


def _sealed(folder: Path) -> tuple[Path, Path]:
    return folder / "manifest.json", folder / "manifest.sha256"


def verify_checkpoint(folder: Path) -> None:
    checkpoints.peek(folder)
    try:
        checkpoints.verify(folder)
    except checkpoints.CorruptCheckpointError:  # which the caller turns into words
        pass


def write_weights(folder: Path) -> None:
    np.savez(folder / "w.npz", a=np.arange(6.0).reshape(2, 3), b=np.zeros(3, np.float32))


def read_weights(folder: Path) -> None:
    from recjax.interop.weights import _reading

    with open_weights(folder / "w.npz") as arrays:
        for name in arrays.files:
            with _reading(folder / "w.npz"):
                _ = arrays[name]


def write_journal(folder: Path) -> None:
    work = WorkFolder(folder)
    work.claim({"x": 1})
    (folder / "part-000000.npz").write_bytes(b"123")
    line = {"file": "part-000000.npz", "bytes": 3, "rows": [1, 1, 1], "skipped": {}, "done": 0.5}
    dense = {"count": [1.0], "mean": [1.0], "squares": [0.0], "least": [None]}
    (folder / "journal.jsonl").write_text(json.dumps(line | {"dense": dense}) + "\n")


def write_table(form: str) -> Callable[[Path], object]:
    """Clicks as a file of this format."""
    return lambda folder: grow_table(form)(folder, 0)


def grow_table(form: str) -> Callable[[Path, int], object]:
    """More clicks as a file of this format."""
    return lambda folder, size: tables.write(tables.clicks(40 + size // 60, lists=form != "csv"), folder / f"t.{form}")


def read_table(folder: Path) -> None:
    for path in sorted(folder.iterdir()):  # which may have another name by now
        for _ in own_table.open_raw(own_table.Table(label="clicked"), path).chunks(0):
            pass


def read_json_rows(folder: Path) -> None:
    encoder = _encoder()
    for part in rows.json_lines(folder / "rows.jsonl", encoder, RowFaults(), None):
        encoder.encode(part.chunk)


@functools.cache
def _encoder() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        good("blocks", prepare)(Path(folder))
        return open_encoder(Path(folder))


def write_json_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shop.rows()[:30]))


def read_overrides(folder: Path) -> None:
    if not (folder / "overrides.txt").is_file():
        return
    lines = (folder / "overrides.txt").read_bytes().decode("utf-8", "surrogateescape").split("\n")
    presets.load("movietweetings", [line for line in lines if "=" in line])


def write_machine(folder: Path) -> None:
    """A measured machine with a few kernel classes."""
    machine.write(MACHINE, folder / "m.json")


def write_plan(folder: Path) -> None:
    """A plan that splits a table, with ids in files."""
    (folder / "p.json").write_text(PLAN)
    (folder / "hot.txt").write_text("3\n17\n99\n")
    np.save(folder / "warm.npy", np.array([40, 41], np.int32))


PROFILE = json.dumps(
    {
        "rows": 9,
        "ids": {"u": {"edges": [1, 4], "counts": [0, 5, 4]}},
        "dense": {"x": {"edges": [0.5], "counts": [4, 5]}},
    }
)
CRITEO = text(random_rows(30)).decode()
TARGETS: dict[str, Target] = {
    "criteo": Target(
        texts({"train.txt": CRITEO}), chunks(criteo.open_raw, criteo.CriteoKaggle(split="random")), zipped=True
    ),
    "criteo, skipping": Target(
        texts({"train.txt": CRITEO}), chunks(criteo.open_raw, criteo.CriteoKaggle(on_error="skip")), zipped=True
    ),
    "avazu": Target(texts({"train.csv": AVAZU}), chunks(avazu.open_raw, avazu.Avazu()), zipped=True),
    "taobao": Target(texts(TAOBAO), chunks(taobao.open_raw, taobao.Taobao(on_error="skip")), zipped=True),
    "movietweetings": Target(
        texts(MOVIETWEETINGS), chunks(movietweetings.open_raw, movietweetings.MovieTweetings()), zipped=True
    ),
    "movielens, CSV": Target(texts(LATEST), chunks(movielens.open_raw, movielens.MovieLens(tags=2)), zipped=True),
    "movielens, ::": Target(texts(ONE_M), chunks(movielens.open_raw, movielens.MovieLens()), zipped=True),
    "movielens, tabs": Target(texts(HUNDRED_K), chunks(movielens.open_raw, movielens.MovieLens()), zipped=True),
    "yelp": Target(yelp_support.write, chunks(yelp.open_raw, yelp.Yelp()), zipped=True),
    "yelp, skipping": Target(yelp_support.write, chunks(yelp.open_raw, yelp.Yelp(on_error="skip")), zipped=True),
    "table, CSV": Target(write_table("csv"), read_table, zipped=True, grow=grow_table("csv")),
    "table, Parquet": Target(write_table("parquet"), read_table, grow=grow_table("parquet")),
    "table, Arrow": Target(write_table("feather"), read_table, grow=grow_table("feather")),
    "rows, JSON lines": Target(write_json_rows, read_json_rows, pipes=False),
    "rows, Criteo": Target(
        texts({"rows.txt": CRITEO}),
        lambda folder: sum(part.chunk.rows for part in rows.criteo(folder / "rows.txt", RowFaults(), None)),
        pipes=False,
    ),
    "prepared blocks": Target(good("blocks", prepare), read_blocks, renew_fingerprint),
    "packed rows": Target(good("packed", pack_shop), read_packed, renew_fingerprint),
    "kept data": Target(good("kept", keep_some), lambda folder: open_snapshot(folder / "data"), renew_fingerprint),
    "work journal": Target(write_journal, lambda folder: WorkFolder(folder)._journal()),
    "checkpoint manifest": Target(seal, verify_checkpoint, reseal),
    "weights, .npz": Target(write_weights, read_weights),
    "config.json": Target(
        lambda folder: (folder / "config.json").write_text(settings.to_json(presets.load("movietweetings"))),
        read_config,
    ),
    "paths.json": Target(texts({"paths.json": '{"data": "/a/data", "p.json": "/a/p.json"}'}), sources.recorded_sources),
    "profile.json": Target(texts({"profile.json": PROFILE}), read_profile),
    "overrides": Target(
        texts({"overrides.txt": "train.steps=3\nmodel.top=64-1\nplan=auto\nembedding.tables.user.dim=4\n"}),
        read_overrides,
    ),
    "sweep, TOML": Target(texts({"s.toml": SWEEP}), lambda folder: read_sweep(folder / "s.toml")),
    "machine": Target(write_machine, lambda folder: open_machine(str(folder / "m.json"))),
    "plan": Target(write_plan, lambda folder: make_plan(str(folder / "p.json"), (TableSpec("t", 100, 8, Sgd()),))),
    **fuzz_tools.TARGETS,
}


def damaged(target: Target, folder: Path, rng: Random) -> None:
    """Writes files into the empty `folder`, one to three times damaged."""
    target.write(folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        file = rng.choice(files)
        if not file.is_file() or file.is_symlink():
            continue
        if rng.random() < 0.04:
            damage.replace(file, rng, target.pipes)
        elif file.suffix in (".json", ".jsonl") and rng.random() < 0.5:
            damage.change_json(file, rng)
        else:
            file.write_bytes(damage.changed(file.read_bytes(), rng))
    if target.zipped and rng.random() < 0.2:
        file = rng.choice(files)
        if file.is_file() and not file.is_symlink():
            packed = gzip.compress(file.read_bytes(), 1)
            file.with_name(f"{file.name}.gz").write_bytes(packed if rng.random() < 0.5 else damage.changed(packed, rng))
            file.unlink()
    target.touch(folder, rng)
